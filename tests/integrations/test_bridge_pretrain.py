"""Our callback in Megatron Bridge's own, whole `pretrain()`: the right window, nothing lost, and the same training.

Each test trains a small GPT on CPU ranks: see `bridge_pretrain.py`. Bridge is the one that this Python has, or that of the
Python which the variable BRIDGE_PYTHON names.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import pytest

from recipes.megatron.cpu import _WITHOUT_CUDA
from tests.integrations.bridge_environment import ROOT, BridgeProcess
from tests.integrations.bridge_pretrain import MODEL
from tests.integrations.captured import Captured
from tests.system.jobs import manifests

pytestmark = [pytest.mark.system, pytest.mark.needs("bridge")]

TORCH = {"profiling.use_pytorch_profiler": True}
ALL = {"profile_ranks": "all"}
#: The window of every case.
FOLDER = "iter-4-6"


class Training:
    """What a training has left in its folder."""

    def __init__(self, bridge: BridgeProcess, folder: Path, exit_codes: list[int], **case: object) -> None:
        self.folder = folder
        found = bridge.ask(out=str(folder), ranks=len(exit_codes), **case)
        assert found == exit_codes, self.log()

    @cached_property
    def losses(self) -> list[dict[int, str]]:
        """By rank: the loss of each iteration that was trained, to the last bit."""
        files = sorted(self.folder.glob("rank-*.jsonl"))
        records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        return [{record["iteration"]: record["hex"] for record in of_rank} for of_rank in records]

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    @property
    def captured(self) -> Captured:
        return Captured(self.folder / "profiles", FOLDER)

    def endings(self) -> list[tuple[str, list[int] | None]]:
        """Status and captured iterations of each rank that has a manifest."""
        return [(one["status"], (one["captured"] or {}).get("iterations")) for one in self.manifests()]

    def reasons(self) -> list[str | None]:
        return [one["reason"] for one in self.manifests()]

    def manifests(self) -> list[dict]:
        return [found for _, found in sorted(manifests(self.folder).items())]


@pytest.fixture
def train(bridge, tmp_path):
    return lambda exit_codes, **case: Training(bridge, tmp_path / "training", exit_codes, **case)


@pytest.fixture(scope="module")
def plain(bridge, tmp_path_factory):
    """A training without any profiling."""
    return Training(bridge, tmp_path_factory.mktemp("plain"), [0, 0], callback=False)


def test_the_window_is_captured_exactly_on_every_rank_and_the_losses_stay_bit_identical(train, plain):
    training = train([0, 0], config={**TORCH, "profiling.record_shapes": True}, settings=ALL)
    assert training.endings() == [("complete", [4, 5])] * 2
    assert training.reasons() == [None, None]
    for rank in (0, 1):
        assert set(training.captured.phases(rank)) == {4, 5}
        names = {event["name"] for event in training.captured.events(rank)}
        assert {name for name in names if "of iteration" in name} == {"forward of iteration 4", "forward of iteration 5"}
        alone = {dimension: [0, 1] for dimension in ("tp", "cp", "pp", "ep")}
        assert training.manifests()[rank]["coordinates"] == alone | {"dp": [rank, 2]}
    # Bridge's own profiler is off.
    assert not [*training.folder.glob("tensorboard/*.pt.trace.json"), *training.folder.glob("torch_profile/*")]
    assert list(training.losses[0]) == list(range(12))
    assert training.losses == plain.losses


@pytest.mark.parametrize(
    ("config", "fault", "code"),
    [
        ({}, {"signal": 5}, 143),
        # Megatron Bridge finishes the iteration, and leaves on all ranks; callbacks are not informed of an exit interval.
        ({"train.exit_signal_handler": True}, {"signal": 4, "rank": 1}, 0),
        ({"train.exit_interval": 5}, {}, 0),
    ],
)
def test_an_exit_inside_the_window_writes_the_partial_trace(train, config, fault, code):
    training = train([code, code], config=TORCH | config, settings=ALL, fault=fault)
    assert ("exiting program after receiving SIGTERM" in training.log()) == ("train.exit_signal_handler" in config)
    assert training.endings() == [("partial", [4])] * 2
    assert all(f"the process exited (code {code})" in reason for reason in training.reasons())


SMALL_AND_ON_CPU = [
    "train.train_iters=14",
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "validation.eval_iters=0",
    "dataset.seq_length=32",
    "dataset.num_workers=0",
    "mixed_precision=null",
    "checkpoint.save=null",
    "dist.distributed_backend=gloo",
    "dist.disable_jit_fuser=true",
    *(f"model.{name}={str(value).lower()}" for name, value in (MODEL | _WITHOUT_CUDA).items()),
]


def test_the_documented_script(about, train):
    """docs/examples/megatron_bridge.py as it is, with what a small model on CPUs needs as overrides on its command line."""
    if about["release"] < "0.6":
        pytest.skip("it is written for Megatron Bridge 0.6")
    script = ROOT / "docs" / "examples" / "megatron_bridge.py"
    assert len(script.read_text().splitlines()) <= 30
    training = train([0, 0], script=[str(script), *SMALL_AND_ON_CPU])
    found = [manifests(training.folder, "iter-10-12")[rank] for rank in (0, 1)]
    assert [(one["status"], one["captured"]["iterations"]) for one in found] == [("complete", [10, 11])] * 2
    assert [one["coordinates"]["dp"] for one in found] == [[0, 2], [1, 2]]
