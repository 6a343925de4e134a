"""What makes captures small leaves out nothing that is read, and says so itself when it would."""

from __future__ import annotations

import json
import lzma
import sqlite3
from pathlib import Path

import pytest

from tests.gpu.planted import lean
from tests.planted.cases import CASES

STORED = {
    ".json": CASES["data_loading_2"].folder / "torch/iter-5-7/rank-1.pt.trace.json.xz",
    ".sqlite": CASES["clean_2_nsys"].folder / "nsys/iter-5-7/rank-1.sqlite.xz",
    ".pickle": CASES["memory_clean_2"].folder / "memory/iter-5-9/rank-0.pickle.xz",
}


def unchanged(text: str) -> str:
    return text


def stored(ending: str) -> bytes:
    return lzma.decompress(STORED[ending].read_bytes())


def checked(folder: Path, ending: str, before: bytes, after: bytes) -> None:
    """Have the readers compare two captures."""
    whole, small = folder / f"whole{ending}", folder / f"small{ending}"
    whole.write_bytes(before)
    small.write_bytes(after)
    lean.check(whole, small, lean.SOURCES[ending], unchanged)


@pytest.mark.parametrize("ending", STORED)
def test_what_is_stored_is_lean_already(ending: str, tmp_path: Path):
    again = lean.lean(stored(ending), ending, unchanged)
    assert len(again) <= len(stored(ending))
    checked(tmp_path, ending, stored(ending), again)


def test_operators_that_did_nothing_go_and_what_launched_stays(tmp_path: Path):
    def operator(name: str, start: float, duration: float) -> dict:
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration, "args": {}}

    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 13.0, "dur": 1.0}
    events = [
        operator("outer", 0.0, 20.0),
        operator("view", 1.0, 2.0),
        operator("launches", 12.0, 3.0),
        operator("alone", 30.0, 1.0),
        launch | {"args": {"correlation": 7, "cbid": 211}},
        {"ph": "s", "id": 7, "pid": 1, "tid": 1, "ts": 13.0, "cat": "ac2g", "name": "ac2g"},
    ]
    trace = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    small = lean.lean(trace, ".json", unchanged)
    found = json.loads(small)["traceEvents"]
    assert [event["name"] for event in found] == ["outer", "launches", "alone", "cudaLaunchKernel"]
    assert found[-1]["args"] == {"correlation": 7}
    checked(tmp_path, ".json", trace, small)


def without(category: str, trace: bytes) -> bytes:
    """A trace without its first event of a category."""
    document = json.loads(trace)
    events = document["traceEvents"]
    document["traceEvents"] = [*events]
    document["traceEvents"].remove(next(event for event in events if event.get("cat") == category))
    return json.dumps(document).encode()


@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", "cpu_op"])
def test_a_trace_that_lost_an_event_is_refused(category: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"is not what it was|is missing"):
        checked(tmp_path, ".json", stored(".json"), without(category, stored(".json")))


def test_an_export_that_lost_a_range_is_refused(tmp_path: Path):
    database = sqlite3.connect(":memory:")
    database.deserialize(stored(".sqlite"))
    database.execute("DELETE FROM NVTX_EVENTS WHERE rowid = (SELECT max(rowid) FROM NVTX_EVENTS)")
    database.commit()
    with pytest.raises(ValueError, match="is not what it was"):
        checked(tmp_path, ".sqlite", stored(".sqlite"), database.serialize())


def test_names_change_where_they_should(tmp_path: Path):
    small = lean.lean(stored(".pickle"), ".pickle", lambda text: text.replace("/checkout", "/elsewhere"))
    assert b"/checkout" not in small
    assert b"/elsewhere" in small
