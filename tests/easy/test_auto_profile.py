"""`@auto_profile` profiles some calls of a function, and changes nothing that it does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from bridge_profiling import ProfilingConfigError
from bridge_profiling.easy import auto_profile
from bridge_profiling.launch_env import LAUNCH_VARIABLE
from tests.easy.scripts import manifest, python, ranges
from tests.forked_ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "auto_profile.py"


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.calls = 0

    def step(self, x: torch.Tensor, *, scale: float = 1.0) -> str:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * scale
        loss.backward()
        self.optimizer.step()
        if self.calls == 4:
            raise ArithmeticError(loss.item().hex())
        return loss.item().hex()


def outcomes(trainer: Trainer) -> list[str]:
    told = []
    for _ in range(8):
        try:
            told.append(trainer.step(torch.ones(2, 4), scale=0.5))
        except ArithmeticError as error:
            told.append(f"raised {error}")
    return told


def test_a_method_returns_and_raises_what_it_does_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Profiled(Trainer):
        step = auto_profile(warmup=2, iterations=3, output_dir=tmp_path, profile_memory=True, summary=False)(Trainer.step)

    profiled = outcomes(Profiled())
    assert profiled == outcomes(Trainer())
    assert profiled[3].startswith("raised 0x")
    assert Profiled.step.__name__ == "step"
    assert Profiled.step.capture_dir == tmp_path
    written = manifest(tmp_path, folder="iter-2-5")
    assert (written["status"], written["captured"]["iterations"], written["interrupted"]) == ("partial", [2, 4], [3])
    found = ranges(tmp_path, folder="iter-2-5")
    assert [name for name in found if "ProfilerStep" in name] == [
        "ProfilerStep#2",
        "interrupted ProfilerStep#3",
        "ProfilerStep#4",
    ]
    assert found.count("backward") == found.count("optimizer") == 3
    printed = capsys.readouterr().out
    assert "partial" in printed
    assert f"bridge-profiling report {tmp_path}" in printed


def test_only_calls_of_the_first_caller_count(tmp_path: Path) -> None:
    @auto_profile(warmup=1, iterations=2, output_dir=tmp_path, summary=False)
    def fold(depth: int) -> int:
        return depth and 1 + fold(depth - 1)

    assert fold(5) == 5
    thread = threading.Thread(target=lambda: [fold(3) for _ in range(5)])
    thread.start()
    thread.join()
    assert fold.capture_dir is None
    assert [fold(2), fold(2), fold(2)] == [2, 2, 2]
    assert fold.capture_dir == tmp_path
    assert LAUNCH_VARIABLE not in os.environ
    assert manifest(tmp_path, folder="iter-1-3")["captured"]["iterations"] == [1, 2]


def test_ranks_need_not_call_it_together(tmp_path: Path) -> None:
    ended = run_ranks(_uneven, folder=tmp_path, ranks=2)
    assert ended.exit_codes == [0, 0], ended.stderr
    assert manifest(tmp_path / "out", 0, "iter-1-3")["status"] == "complete"
    assert manifest(tmp_path / "out", 1, "iter-1-3")["status"] == "missed"


def _uneven() -> None:
    @auto_profile(warmup=1, iterations=2, output_dir="out", summary=False)
    def step() -> None:
        torch.ones(2).sum()

    # Rank 1 ends after one call; rank 0 waits for nobody.
    for _ in range(4 if torch.distributed.get_rank() == 0 else 1):
        step()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"iterations": 0}, "the window is empty"),
        ({"warmup": -1}, "is not an integer of at least 0"),
        ({"ranks": []}, "names no rank"),
        ({"profile_stack": True}, "profile_stack"),
    ],
)
def test_an_unusable_request_is_refused_when_the_function_is_decorated(asked: dict, said: str) -> None:
    with pytest.raises(ProfilingConfigError, match=said):
        auto_profile(**asked)


def test_what_returns_before_its_work_is_done_is_refused() -> None:
    async def step() -> None:
        pass

    with pytest.raises(ProfilingConfigError, match="coroutine or generator"):
        auto_profile(step)
    with pytest.raises(ProfilingConfigError, match=r"5, which is not a function. Name what you set"):
        auto_profile(5)  # type: ignore[call-overload]


def test_of_two_that_want_the_same_calls_one_is_captured_and_both_functions_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiled = auto_profile(warmup=1, iterations=2, output_dir=tmp_path, summary=False)

    @profiled
    def inner(x: int) -> int:
        return int(torch.ones(x).sum())

    @profiled
    def outer(x: int) -> int:
        return inner(x) + 1

    assert [outer(x) for x in range(5)] == [1, 2, 3, 4, 5]
    statuses = [manifest(tmp_path, folder=folder)["status"] for folder in ("iter-1-3", "iter-1-3.1")]
    assert sorted(statuses) == ["complete", "failed"]
    assert "another profiler was started in this process" in caplog.text
    assert not torch.autograd._profiler_enabled()


def test_a_directory_that_cannot_be_written_costs_the_capture_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    @auto_profile(warmup=0, iterations=1, output_dir=tmp_path / "file" / "out")
    def step() -> int:
        return 7

    assert [step(), step()] == [7, 7]
    assert step.capture_dir is None


@pytest.mark.system
def test_the_example_says_where_its_capture_is_and_what_it_tells(tmp_path: Path) -> None:
    ended = python(tmp_path, str(EXAMPLE))
    assert ended.returncode == 0, ended.stderr
    assert manifest(tmp_path / "profiles", folder="iter-3-13")["status"] == "complete"
    found = ranges(tmp_path / "profiles", folder="iter-3-13")
    assert found.count("forward") == found.count("optimizer") == 10
    assert f"bridge-profiling report {tmp_path}/profiles" in ended.stdout
    assert "no device work" in ended.stdout.lower()
    assert "samples/s (" in ended.stdout
    assert len(EXAMPLE.read_text().splitlines()) <= 30
