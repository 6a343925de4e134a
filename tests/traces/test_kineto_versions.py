"""Traces of torch 2.11, 2.13 and 2.15 read alike, without loss; tools/kineto_traces.py makes those of a CPU."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.traces import kineto
from bridge_profiling.traces.tables import SCHEMAS
from bridge_profiling.traces.types import RankTables

FOLDER = Path(__file__).parent / "torch_versions"
VERSIONS = ("2.11.0", "2.13.0", "2.15.0")

#: Recorded by torch 2.11 with CUDA 13.0 on an H200.
CUDA = Path(__file__).parents[1] / "planted" / "witness_pp2_dp2" / "torch" / "iter-5-7" / "rank-0.pt.trace.json.xz"

CATEGORIES = {
    "cpu_op": "operator",
    "user_annotation": "annotation",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "overhead": "overhead",
}
PHASES = ["data-loading", "forward", "backward", "optimizer"]


def _paths(kind: str) -> list[Path]:
    return sorted(FOLDER.glob(f"{kind}-*.json.xz"))


def _written(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(lzma.decompress(path.read_bytes()))["traceEvents"]
    return events


def _annotations(tables: RankTables, *names: str) -> list[str]:
    rows = tables.host_events.to_pylist()
    return [row["name"] for row in rows if row["category"] == "annotation" and row["name"] in names]


def test_each_version_has_its_traces() -> None:
    for kind in ("hook", "plain"):
        assert [path.name for path in _paths(kind)] == [f"{kind}-{version}.json.xz" for version in VERSIONS]
    assert [path.name for path in _paths("python_export")] == [f"python_export-{version}.json.xz" for version in VERSIONS[1:]]


@pytest.mark.parametrize("path", [*FOLDER.iterdir(), CUDA], ids=lambda path: path.name.split(".json")[0])
def test_every_event_is_in_its_table(path: Path) -> None:
    written = Counter(event.get("cat") for event in _written(path) if event["ph"] == "X")
    memory = sum(event["name"] == "[memory]" for event in _written(path))
    tables = kineto.read(path)
    host: Counter[str] = Counter()
    for category, name in CATEGORIES.items():
        host[name] += written[category]
    assert Counter(tables.host_events["category"].to_pylist()) == +host
    assert tables.device_events.num_rows == sum(written[category] for category in ("kernel", "gpu_memcpy", "gpu_memset"))
    assert (tables["memory_events"].num_rows if "memory_events" in tables.tables else 0) == memory
    for name, table in tables.tables.items():
        assert table.schema.equals(SCHEMAS[name])
    assert tables.info.error is None
    assert not [each for each in tables.info.caveats if "left out" in each.text]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_window_of_the_hook(version: str) -> None:
    tables = kineto.read(FOLDER / f"hook-{version}.json.xz")
    assert tables.iterations["iteration"].to_pylist() == [1]
    assert tables.iterations["boundary"].to_pylist() == [False]
    assert _annotations(tables, "ProfilerStep#1", *PHASES) == ["ProfilerStep#1", *PHASES]
    assert (tables.info.rank, tables.info.rank_source, tables.info.world_size) == (0, "trace", 1)
    assert (tables.info.clock, [each.code for each in tables.info.caveats]) == ("unix", ["no_device_work"])
    assert tables.info.coordinates is not None
    assert tables.info.coordinates["dp"] == (0, 1)
    assert [(group.name, group.description, group.ranks) for group in tables.info.groups] == [("0", "default_pg", (0,))]


@pytest.mark.parametrize("path", [*_paths("plain"), *_paths("python_export")], ids=lambda path: path.name.split(".json")[0])
def test_a_profile_of_torchs_own(path: Path) -> None:
    tables = kineto.read(path)
    assert tables.iterations["iteration"].to_pylist() == [0, 1]
    marks = ["ProfilerStep#0", *PHASES, "ProfilerStep#1", *PHASES]
    assert _annotations(tables, *marks) == marks
    assert [each.code for each in tables.info.caveats] == ["no_device_work"]
    memory = tables["memory_events"].to_pylist()
    assert {row["device_type"] for row in memory} == {"cpu"}
    assert any(row["bytes"] > 0 for row in memory)
    assert any(row["bytes"] < 0 for row in memory)


@pytest.mark.parametrize("kind", ["hook", "plain", "python_export"])
def test_the_versions_read_alike(kind: str) -> None:
    """The same tables, the same ranges, and the model's operators with the same shapes, whatever else a version records."""
    found = []
    for path in _paths(kind):
        tables = kineto.read(path)
        shapes = Counter(
            (row["name"], row["shapes"])
            for row in tables.host_events.to_pylist()
            if row["name"] in ("aten::linear", "aten::addmm", "aten::gelu", "AddmmBackward0", "c10d::allreduce_")
        )
        found.append((set(tables.tables), tables.host_events.schema, shapes, Counter(_annotations(tables, *PHASES))))
    assert found[0][2]["aten::linear", "[[8,16],[32,16],[32]]"] == (1 if kind == "hook" else 2)
    assert all(each == found[0] for each in found[1:])
