"""Our callback in Megatron Bridge's own, whole `pretrain()`: the right window, nothing lost, and the same training.

Each test reads what a small GPT has left on two CPU ranks: see `bridge_pretrain.py`. Bridge is the one that this Python has, or
that of the Python which the variable BRIDGE_PYTHON names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.bridge_pretrain import EXAMPLE
from tests.integrations.captured import Captured
from tests.system.jobs import manifests

pytestmark = [pytest.mark.system, pytest.mark.needs("bridge")]


class Training:
    """What a case has left in its folder."""

    def __init__(self, bridge: Path, name: str) -> None:
        self.folder = bridge / name
        self.exit_codes = json.loads((bridge / "exit_codes.json").read_text())[name]
        self.log = (self.folder / "rank-0.log").read_text()
        self.manifests = [found for _, found in sorted(manifests(self.folder).items())]
        # By rank: the loss of each iteration that was trained, to the last bit.
        files = sorted(self.folder.glob("rank-*.jsonl"))
        records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        self.losses = [{record["iteration"]: record["hex"] for record in of_rank} for of_rank in records]

    def endings(self) -> list[tuple[str, list[int] | None]]:
        """Status and captured iterations of each rank that has a manifest."""
        return [(one["status"], (one["captured"] or {}).get("iterations")) for one in self.manifests]


def test_the_window_is_captured_exactly_on_every_rank_and_the_losses_stay_bit_identical(bridge):
    training, captured = Training(bridge, "window"), Captured(bridge / "window" / "profiles", "iter-4-6")
    assert training.exit_codes == [0, 0], training.log
    assert training.endings() == [("complete", [4, 5])] * 2
    for rank in (0, 1):
        assert set(captured.phases(rank)) == {4, 5}
        names = {event["name"] for event in captured.events(rank)}
        assert {name for name in names if "of iteration" in name} == {"forward of iteration 4", "forward of iteration 5"}
        alone = {dimension: [0, 1] for dimension in ("tp", "cp", "pp", "ep")}
        assert training.manifests[rank]["coordinates"] == alone | {"dp": [rank, 2]}
        assert training.manifests[rank]["reason"] is None
    # Bridge's own profiler is off.
    assert not [*training.folder.glob("tensorboard/*.pt.trace.json"), *training.folder.glob("torch_profile/*")]
    assert list(training.losses[0]) == list(range(12))
    assert training.losses == Training(bridge, "plain").losses


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("signal", 143),
        # Megatron Bridge finishes the iteration, and leaves on all ranks; callbacks are not informed of an exit interval.
        ("handled_signal", 0),
        ("exit_interval", 0),
    ],
)
def test_an_exit_inside_the_window_writes_the_partial_trace(bridge, name, code):
    training = Training(bridge, name)
    assert training.exit_codes == [code, code], training.log
    assert ("exiting program after receiving SIGTERM" in training.log) == (name == "handled_signal")
    assert training.endings() == [("partial", [4])] * 2
    assert all(f"the process exited (code {code})" in one["reason"] for one in training.manifests)


def test_the_documented_script(about, bridge):
    if about["release"] < "0.6":
        pytest.skip("it is written for Megatron Bridge 0.6")
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    training = Training(bridge, "example")
    assert training.exit_codes == [0, 0], training.log
    assert training.endings() == [("complete", [10, 11])] * 2
    assert [one["coordinates"]["dp"] for one in training.manifests] == [[0, 2], [1, 2]]
