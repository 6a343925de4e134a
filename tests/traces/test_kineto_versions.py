"""Traces of torch 2.11, 2.13 and 2.15 are read without loss; tools/kineto_traces.py makes those of a CPU."""

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest

from bridge_profiling.traces import kineto
from bridge_profiling.traces.tables import SCHEMAS

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
