"""Each example of docs/examples on two connected CPU ranks: the window, the phases, and the same training without profiling."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from bridge_profiling.cli import app
from bridge_profiling.run import Run
from tests.frameworks import with_and_without
from tests.frameworks.captured import Captured
from tests.system.jobs import ended_well, environment

pytestmark = pytest.mark.system

_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class Example(NamedTuple):
    """What is captured of an example in each of its two iterations."""

    phases: list[str]
    facts: dict[str, Any]
    library: dict[str, list[str]] = {}  # by the beginning of their names, ranges around the library's own steps


#: Accelerate's loader fetches one batch ahead, and moves the one before to the device while it does.
FETCH = ["data-loading", "host-to-device"]
WORK = ["forward", "backward"]
LOOP = ["host-to-device", *WORK, "optimizer", "data-loading"]

#: Parameters of the models: Linear(32, 64) and Linear(64, 4).
TWO_LAYERS = {"parameters": (32 * 64 + 64) + (64 * 4 + 4), "trainable_parameters": (32 * 64 + 64) + (64 * 4 + 4)}


def gathers(*units: str) -> dict[str, list[str]]:
    return {"FSDP::all_gather (": [f"FSDP::all_gather ({unit})" for unit in units]}


def reduces(*units: str) -> dict[str, list[str]]:
    return {"FSDP::post_backward_reduce": [f"FSDP::post_backward_reduce ({unit})" for unit in units]}


EXAMPLES = {
    "ddp": Example(LOOP, TWO_LAYERS | {"name": "ddp", "world_size": 2, "notes": []}),
    "fsdp": Example(
        LOOP,
        {"name": "fsdp", "parameters": 2 * (32 * 32 + 32), "sharding_strategy": "FULL_SHARD"},
        gathers("0", "1", "1", "0") | reduces("1", "0"),
    ),
    "fully_shard": Example(
        LOOP,
        TWO_LAYERS | {"name": "fully_shard", "mesh": {"dp": 2}, "sharded_over": {"dp": 2}},
        gathers("0", "2", "2", "0"),
    ),
    "deepspeed_zero": Example(
        [*LOOP[:3], "data-loading", *LOOP],
        TWO_LAYERS | {"name": "deepspeed", "zero_stage": 2, "gradient_accumulation": 2, "batch_size": 4, "notes": []},
        {"ZeRO::reduce": ["ZeRO::reduce"] * 2, "ZeRO::all_gather": ["ZeRO::all_gather"]},
    ),
    "hugging_face": Example(
        # Two batches an iteration, here fetched together.
        [*FETCH, "host-to-device", *WORK * 2, "optimizer"],
        {"name": "transformers", "strategy": "MULTI_CPU", "gradient_accumulation": 2},
    ),
    "accelerate_loop": Example(
        [*WORK, *FETCH, *WORK, "optimizer", *FETCH],
        {"name": "accelerate", "strategy": "MULTI_CPU", "gradient_accumulation": 2},
    ),
    "lightning_ddp": Example(
        [*FETCH, *WORK, "optimizer"],
        {"name": "lightning", "strategy": "DDPStrategy", "precision": "32-true", "gradient_accumulation": 1},
    ),
}
NEEDS = {"deepspeed_zero": "deepspeed", "lightning_ddp": "lightning"} | dict.fromkeys(
    ("hugging_face", "accelerate_loop"), "hugging_face"
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.needs(NEEDS[name])] if name in NEEDS else []) for name in EXAMPLES]
)
def test_an_example_captures_its_window_on_each_rank_and_changes_no_loss(name: str, tmp_path: Path, monkeypatch) -> None:
    script, example = _EXAMPLES / f"{name}.py", EXAMPLES[name]
    assert len(script.read_text().splitlines()) <= 30
    if "deepspeed" in name:
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [with_and_without.__file__, str(script), str(tmp_path)]
    ended_well(command, env=environment(CUDA_VISIBLE_DEVICES=""))
    captured = Captured(tmp_path / "with" / "profiles", "iter-3-5")
    for rank in (0, 1):
        manifest = captured.manifest(rank)
        assert (manifest["status"], manifest["reason"], manifest["captured"]["iterations"]) == ("complete", None, [3, 4])
        assert manifest["coordinates"]["dp"] == [rank, 2]
        unavailable = "unavailable: this process trains on no CUDA device"
        known = example.facts | {"iteration": "optimizer step", "phase_memory": unavailable}
        assert {fact: manifest["framework"].get(fact) for fact in known} == known
        found = captured.phases(rank)
        assert {iteration: found[iteration] for iteration in (3, 4)} == {3: example.phases, 4: example.phases}
        assert found.keys() <= {3, 4, None}
        ranges = captured.ranges(rank)
        for begin, expected in example.library.items():
            assert [one for one in ranges if one.startswith(begin)] == expected * 2
        losses = [_losses(tmp_path / kind / f"rank-{rank}.out") for kind in ("with", "without")]
        assert losses[0]
        assert losses[0] == losses[1], "to the last bit"
    assert not (tmp_path / "without" / "profiles").exists()
    analysis = json.loads(CliRunner().invoke(app, ["analyze", str(captured.root), "--json"]).stdout)
    assert [[one["iteration"] for one in rank["iterations"]] for rank in analysis["ranks"]] == [[3, 4], [3, 4]]
    if "FSDP::all_gather (" in example.library:
        _check_units(captured.root, example)


def _losses(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith("rank") and "loss" in line]


def _check_units(root: Path, example: Example) -> None:
    """The analysis distinguishes FSDP's units: two iterations, each gathers for both passes and reduces once."""
    units = {name.partition("(")[2].strip(")") for name in example.library["FSDP::all_gather ("]}
    with Run(root) as run:
        rows = [row for row in run.facts.units.to_pylist() if row["rank"] == 1]
    counts = {(row["unit"], row["step"]): row["count"] for row in rows}
    assert counts == {(unit, "all_gather"): 4 for unit in units} | {(unit, "reduce"): 2 for unit in units}
    assert all(row["host_ns"] > 0 and row["device_ns"] is None for row in rows)
