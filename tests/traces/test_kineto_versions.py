"""Traces of torch 2.11, 2.13 and 2.15 read alike, without loss; tools/kineto_traces.py makes those of a CPU."""

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest

from bridge_profiling.traces import kineto
from bridge_profiling.traces.tables import SCHEMAS
from tests.traces.conftest import values

FOLDER = Path(__file__).parent / "torch_versions"
VERSIONS = {
    "hook": ("2.11.0", "2.13.0", "2.15.0"),
    "plain": ("2.11.0", "2.13.0", "2.15.0"),
    "python_export": ("2.13.0", "2.15.0"),
}

#: Recorded by torch 2.11 with CUDA 13.0 on an H200.
CUDA = Path(__file__).parents[1] / "planted" / "witness_pp2_dp2" / "torch" / "iter-5-7" / "rank-0.pt.trace.json.xz"

#: Categories of host events.
HOST = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "overhead")
PHASES = ["data-loading", "forward", "backward", "optimizer"]
OPERATORS = ("aten::linear", "aten::addmm", "aten::gelu", "AddmmBackward0", "c10d::allreduce_")


def _paths(kind):
    return [FOLDER / f"{kind}-{version}.json.xz" for version in VERSIONS[kind]]


@pytest.mark.parametrize("paths", [*map(_paths, VERSIONS), [CUDA]], ids=[*VERSIONS, "cuda"])
def test_every_event_is_in_its_table(paths):
    for path in paths:
        events = json.loads(lzma.decompress(path.read_bytes()))["traceEvents"]
        written = Counter(event.get("cat") for event in events if event["ph"] == "X")
        tables = kineto.read(path)
        assert tables.host_events.num_rows == sum(written[name] for name in HOST)
        assert tables.device_events.num_rows == sum(written[name] for name in ("kernel", "gpu_memcpy", "gpu_memset"))
        memory = tables["memory_events"].num_rows if "memory_events" in tables.tables else 0
        assert memory == sum(event["name"] == "[memory]" for event in events)
        assert all(table.schema.equals(SCHEMAS[name]) for name, table in tables.tables.items())
        assert tables.info.error is None
        assert not [caveat for caveat in tables.info.caveats if "left out" in caveat.text]


@pytest.mark.parametrize("kind", VERSIONS)
def test_the_versions_read_alike(kind):
    """The same tables, the same ranges, and the model's operators with the same shapes, whatever else a version records."""
    found = []
    for path in _paths(kind):
        tables = kineto.read(path)
        host, info = values(tables.host_events, "category", "name", "shapes"), tables.info
        found.append(
            {
                "tables": set(tables.tables),
                "iterations": values(tables.iterations, "iteration", "boundary"),
                "ranges": [
                    name for kind, name, _ in host if kind == "annotation" and name.startswith(("ProfilerStep", *PHASES))
                ],
                "shapes": Counter((name, shapes) for _, name, shapes in host if name in OPERATORS),
                "caveats": [each.code for each in info.caveats],
                "groups": [(group.name, group.description, group.ranks) for group in info.groups],
                "rank": (info.rank, info.rank_source, info.world_size, info.clock, (info.coordinates or {}).get("dp")),
            }
        )
        if kind != "hook":
            memory = values(tables["memory_events"], "device_type", "bytes")
            assert {(device, size > 0) for device, size in memory} == {("cpu", True), ("cpu", False)}
    assert all(each == found[0] for each in found[1:])
    steps = [1] if kind == "hook" else [0, 1]
    assert [number for number, _ in found[0]["iterations"]] == steps
    assert found[0]["ranges"] == [name for number in steps for name in (f"ProfilerStep#{number}", *PHASES)]
    assert found[0]["shapes"]["aten::linear", "[[8,16],[32,16],[32]]"] == len(steps)
    assert found[0]["caveats"] == ["no_device_work"]
