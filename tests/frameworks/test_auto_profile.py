"""`@auto_profile` profiles some calls of a function and changes nothing that it does; `phase` names and times its parts."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bridge_profiling import ProfilingConfigError
from bridge_profiling.common.launch_env import LAUNCH_VARIABLE
from bridge_profiling.easy import MemoryProfiler, PerformanceCounter, auto_profile, phase, phase_times, reset_phase_times
from bridge_profiling.frameworks import points as module
from bridge_profiling.frameworks.phase_times import PhaseTime
from tests.frameworks.scripts import manifest, python, ranges

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
    found = []
    for _ in range(8):
        try:
            found.append(trainer.step(torch.ones(2, 4), scale=0.5))
        except ArithmeticError as error:
            found.append(f"raised {error}")
    return found


def test_a_method_returns_and_raises_what_it_does_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Profiled(Trainer):
        step = auto_profile(warmup=2, iterations=3, output_dir=tmp_path, profile_memory=True, summary=False)(Trainer.step)

    assert outcomes(Profiled()) == outcomes(Trainer())
    assert (Profiled.step.__name__, Profiled.step.capture_dir) == ("step", tmp_path)
    written = manifest(tmp_path, folder="iter-2-5")
    assert (written["status"], written["captured"]["iterations"], written["interrupted"]) == ("partial", [2, 4], [3])
    found = ranges(tmp_path, folder="iter-2-5")
    steps = ["ProfilerStep#2", "interrupted ProfilerStep#3", "ProfilerStep#4"]
    assert [name for name in found if "ProfilerStep" in name] == steps
    assert found.count("backward") == found.count("optimizer") == 3
    assert f"bridge-profiling report {tmp_path}" in capsys.readouterr().out


def test_only_calls_of_the_first_caller_count_and_phases_in_them_are_ranges(tmp_path: Path) -> None:
    @auto_profile(warmup=1, iterations=2, output_dir=tmp_path, summary=False)
    def fold(depth: int) -> int:
        with phase("evaluation") if depth == 0 else nullcontext():
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
    assert ranges(tmp_path, folder="iter-1-3") == ["ProfilerStep#1", "evaluation", "ProfilerStep#2", "evaluation"]


def test_a_coroutine_is_refused_when_it_is_decorated() -> None:
    async def step() -> None: ...

    with pytest.raises(ProfilingConfigError, match="coroutine or generator"):
        auto_profile()(step)


def test_a_directory_that_cannot_be_written_costs_the_capture_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    step = auto_profile(warmup=0, iterations=1, output_dir=tmp_path / "file" / "out")(lambda: 7)
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
    assert len(EXAMPLE.read_text().splitlines()) <= 30


@pytest.mark.integration
def test_torch_is_not_loaded_before_the_script_loads_it(tmp_path: Path) -> None:
    loaded = "import sys, bridge_profiling.cli, bridge_profiling.easy as easy; easy.phase, easy.auto_profile"
    ended = python(tmp_path, "-c", f"{loaded}; sys.exit('torch' in sys.modules)")
    assert ended.returncode == 0, ended.stderr


def test_times_of_phases_are_added_up_by_name_also_of_functions_and_of_those_that_raised(monkeypatch) -> None:
    reset_phase_times()
    with monkeypatch.context() as patch:
        # Two phases "forward" of 10 and 3 ns, each with "attention" of 2 and 1 ns inside, which ends first.
        clock = iter([0, 5, 7, 10, 20, 21, 22, 23])
        patch.setattr("bridge_profiling.frameworks.phase_times.perf_counter_ns", lambda: next(clock))
        for _ in range(2):
            with phase("forward"), phase("attention"):
                pass
    times = phase_times()
    assert times == {"attention": PhaseTime(2, 3, 1, 2), "forward": PhaseTime(2, 13, 3, 10)}
    assert times["forward"].mean_ns == 6.5
    assert times["forward"].std_ns == pytest.approx(4.95, abs=0.01)
    # Nested phases do not count twice in the whole.
    assert (times["forward"].share, times["attention"].share) == (1, 3 / 13)
    assert str(times).splitlines()[1].endswith("together, 100.0%")
    with monkeypatch.context() as patch:
        patch.setattr("bridge_profiling.frameworks.phase_times._synchronize", lambda: 1 / 0)  # a device that has failed
        with pytest.raises(ZeroDivisionError), phase("never", synchronize=True):
            pass
    with phase("whole"):
        pass
    assert phase_times()["whole"].share < 1, "as all that is inside no other"
    assert sum(phase_times()[name].share for name in ("forward", "whole")) == pytest.approx(1)

    @phase("logging", synchronize=True)
    def log(x: int) -> float:
        return 7 / x

    assert log(1) == 7
    with pytest.raises(ZeroDivisionError):
        log(0)
    assert phase_times()["logging"].count == 2
    reset_phase_times()


def test_pairs_of_a_name_add_up_and_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    counter = PerformanceCounter()
    for seconds in (1.0, 3.0):
        counter.start_counter("tokenize")
        now[0] += seconds
        other = threading.Thread(target=counter.end_counter, args=("tokenize",))  # which has begun nothing
        other.start()
        other.join()
        counter.end_counter("tokenize")
    assert counter.get_counter_stats("tokenize") == {"total_time": 4.0, "count": 2, "avg_time": 2.0}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of a GPU, in GB."""
    now = SimpleNamespace(allocated=1.0)

    def read() -> dict[str, float]:
        gb = {"allocated": now.allocated, "allocated_peak": now.allocated + 1, "reserved": 4.0, "reserved_peak": 5.0}
        return {f"{name}_bytes": value * 1e9 for name, value in gb.items()}

    monkeypatch.setattr(module, "device_memory", read)
    return now


def test_points_are_printed_and_summed_up(memory: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = MemoryProfiler()
    profiler.log_memory_stats(0, "after forward")
    memory.allocated = 3.0
    point = {"step": 1, "description": "", "allocated": 3.0, "cached": 4.0, "max_allocated": 4.0, "max_cached": 5.0}
    assert profiler.log_memory_stats(1) == profiler.memory_stats[1] == point
    assert capsys.readouterr().out.startswith("Step 0 (after forward): 1.00 GB allocated, 4.00 GB cached\n")
    expected = {"peak_allocated": 4.0, "peak_cached": 5.0, "avg_allocated": 2.0, "avg_cached": 4.0, "memory_efficiency": 0.5}
    assert profiler.analyze_memory_patterns() == expected


@pytest.mark.parametrize(
    ("growth", "labels", "points", "leaks"),
    [
        (0.01, ("",), 12, True),
        # Memory differs between the labels of a step, and grows at each of them.
        (0.01, ("before", "after"), 24, True),
        (0.0, ("before", "after"), 24, False),
        (0.01, tuple(f"step {step}" for step in range(12)), 12, True),
    ],
)
def test_memory_that_grows_from_point_to_point_is_a_leak(memory, growth, labels, points, leaks) -> None:
    profiler = MemoryProfiler()
    for step in range(points):
        memory.allocated = 1.0 + growth * step + 0.5 * (step % len(labels) if len(labels) == 2 else 0)
        profiler.log_memory_stats(step, labels[step % len(labels)])
    assert profiler.detect_memory_leaks() is leaks
