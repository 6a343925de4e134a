"""Memory snapshots: the replay agrees with a naive one and with the real capture, and what is lost is said."""

from __future__ import annotations

import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.memory import snapshot as memory_snapshot
from bridge_profiling.traces.memory.replay import replay

T0 = 1_795_178_470_000_000
BASE = 0x7F00_0000_0000
FRAMES = [{"name": "empty", "filename": "??", "line": 0}, {"name": "forward", "filename": "model.py", "line": 12}]


def entry(action: str, address: int, size: int, at: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": BASE + address, "size": size, "stream": 0, "time_us": T0 + at, "frames": FRAMES} | more


def segment(address: int, size: int, *blocks: tuple[int, str, int], **more: Any) -> dict[str, Any]:
    """A segment with blocks (size, state, requested) one after another."""
    listed, at = [], BASE + address
    for length, state, requested in blocks:
        listed.append({"address": at, "size": length, "requested_size": requested, "state": state, "frames": FRAMES})
        at += length
    shared = {"device": 0, "stream": 0, "segment_type": "large"}
    return shared | {"address": BASE + address, "total_size": size, "blocks": listed} | more


def write(path: Path, trace: list[dict[str, Any]], segments: list[dict[str, Any]] = [], **keys: Any) -> Path:  # noqa: B006
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [trace], **keys}))
    return path


def caveats(tables: Any) -> dict[str, str]:
    return {each.code: each.text for each in tables.info.caveats}


def test_an_allocation_lives_from_its_alloc_to_the_end_of_its_free(tmp_path: Path) -> None:
    trace = [
        entry("segment_alloc", 0, 2 << 20, 0),
        entry("alloc", 0, 1000, 1),
        entry("free_requested", 0, 1000, 5),
        entry("free_completed", 0, 1000, 9),
    ]
    tables = memory_snapshot.read(write(tmp_path / "snapshot_3.pickle", trace), rank=3, rank_source="file name")
    (row,) = tables["allocations"].to_pylist()
    assert row == {
        "rank": 3, "device": 0, "stream": 0, "address": BASE, "bytes": 1024, "requested_bytes": 1000,
        "allocated_ns": (T0 + 1) * 1000, "free_requested_ns": (T0 + 5) * 1000, "freed_ns": (T0 + 9) * 1000,
        "stack": "empty\nforward model.py:12",
    }  # fmt: skip
    assert (tables.info.rank, tables.info.rank_source, tables.info.clock) == (3, "file name", "unix")


def test_what_was_there_before_the_history_has_no_start_and_a_caveat(tmp_path: Path) -> None:
    trace = [
        entry("free_requested", 0, 512, 1),
        entry("free_completed", 0, 512, 2),
        entry("free_completed", 512, 512, 3),
        entry("free_requested", 1024, 512, 4),
    ]
    segments = [segment(0, 4096, (1024, "inactive", 0), (512, "active_pending_free", 400), (2560, "active_allocated", 2222))]
    tables = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace, segments))
    rows = {row["address"] - BASE: row for row in tables["allocations"].to_pylist()}
    assert {address: row["allocated_ns"] for address, row in rows.items()} == dict.fromkeys((0, 512, 1024, 1536))
    assert [rows[address]["freed_ns"] is None for address in (0, 512, 1024, 1536)] == [False, False, True, True]
    assert rows[1024]["requested_bytes"] == 400
    assert (rows[1536]["bytes"], rows[1536]["requested_bytes"], rows[1536]["stack"]) == (
        2560,
        2222,
        "empty\nforward model.py:12",
    )
    assert rows[0]["stack"] is None  # the stack of a free says nothing of who allocated it
    assert caveats(tables)["frees_unmatched"].startswith("3 frees on device 0")
    assert caveats(tables)["allocated_before_history"].startswith("1 allocations on device 0")


def test_a_full_history_says_that_it_was_overwritten(tmp_path: Path) -> None:
    frames: list[Any] = []
    trace = [entry("alloc" if at % 2 else "free_completed", 0, 512, at, frames=frames) for at in range(100_000)]
    full, less = (memory_snapshot.read(write(tmp_path / f"{len(each)}.pickle", each)) for each in (trace, trace[:-1]))
    assert "100,000 entries" in caveats(full)["history_overwritten"]
    assert "history_overwritten" not in caveats(less)


def test_an_address_that_is_allocated_again_without_a_free_ends_there(tmp_path: Path) -> None:
    trace = [entry("alloc", 0, 512, 1), entry("alloc", 0, 1024, 5)]
    tables = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace))
    first, second = tables["allocations"].to_pylist()
    assert (first["freed_ns"], second["freed_ns"]) == ((T0 + 5) * 1000, None)
    assert caveats(tables)["frees_missing"].startswith("1 allocations on device 0")
    assert caveats(tables)["allocations_outside_segments"].startswith("1 allocations on device 0")


def test_segments_have_their_pool_and_how_full_they_are_at_the_end(tmp_path: Path) -> None:
    trace = [entry("segment_alloc", 0, 4096, 0), entry("segment_alloc", 8192, 4096, 1), entry("segment_free", 8192, 4096, 2)]
    listed = [
        segment(0, 4096, (1024, "active_allocated", 900), (512, "inactive", 0), (2560, "inactive", 0)),
        segment(1 << 20, 2048, (2048, "active_allocated", 2048), segment_type="small"),
    ]
    tables = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace, listed))
    rows = {row["address"] - BASE: row for row in tables["segments"].to_pylist()}
    assert (rows[0]["pool"], rows[0]["active_bytes"], rows[0]["largest_free_bytes"]) == ("large", 1024, 2560)
    assert (rows[8192]["freed_ns"], rows[8192]["active_bytes"]) == ((T0 + 2) * 1000, None)
    assert (rows[1 << 20]["allocated_ns"], rows[1 << 20]["pool"], rows[1 << 20]["active_bytes"]) == (None, "small", 2048)


def test_an_expandable_segment_gives_back_parts_of_what_it_mapped(tmp_path: Path) -> None:
    trace = [entry("segment_map", 0, 4096, 1), entry("segment_map", 4096, 4096, 2), entry("segment_unmap", 2048, 4096, 7)]
    listed = [
        segment(0, 2048, (2048, "active_allocated", 2048), is_expandable=True),
        segment(6144, 2048, (2048, "inactive", 0), is_expandable=True),
    ]
    rows = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace, listed))["segments"].to_pylist()
    found = [
        (
            row["allocated_ns"] - T0 * 1000,
            None if row["freed_ns"] is None else row["freed_ns"] - T0 * 1000,
            row["address"] - BASE,
            row["bytes"],
            row["active_bytes"],
        )
        for row in rows
    ]
    assert sorted(found, key=lambda row: row[2]) == [
        (1000, None, 0, 2048, 2048),
        (1000, 7000, 2048, 2048, None),
        (2000, 7000, 4096, 2048, None),
        (2000, None, 6144, 2048, 0),
    ]


def test_devices_are_kept_apart(tmp_path: Path) -> None:
    traces = [[entry("alloc", 0, 512, 1)], [], [entry("alloc", 0, 1024, 2), entry("free_completed", 0, 1024, 3)]]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": traces}))
    rows = memory_snapshot.read(path)["allocations"].to_pylist()
    assert [(row["device"], row["freed_ns"] is None) for row in rows] == [(0, True), (2, False)]


def test_an_out_of_memory_error_is_a_caveat(tmp_path: Path) -> None:
    oom = {"action": "oom", "size": 4096, "device_free": 17, "time_us": T0, "stream": 0, "frames": []}
    tables = memory_snapshot.read(write(tmp_path / "oom.pickle", [entry("alloc", 0, 512, 1), oom]))
    assert "4096 bytes requested, 17 free" in caveats(tables)["out_of_memory"]


def test_an_out_of_memory_error_names_who_asked_and_for_how_much(tmp_path: Path) -> None:
    oom = {"action": "oom", "size": 4096, "device_free": 17, "time_us": T0 + 3, "stream": 0, "frames": FRAMES}
    untold = {"action": "oom", "size": 512}
    tables = memory_snapshot.read(write(tmp_path / "oom.pickle", [entry("alloc", 0, 512, 1), oom, untold]), rank=2)
    first, second = tables["out_of_memory"].to_pylist()
    assert first == {
        "rank": 2, "device": 0, "time_ns": (T0 + 3) * 1000, "requested_bytes": 4096, "free_bytes": 17,
        "stack": "empty\nforward model.py:12",
    }  # fmt: skip
    assert (second["requested_bytes"], second["time_ns"], second["free_bytes"], second["stack"]) == (512, None, None, None)
    assert tables["allocations"].num_rows == 1, "a request that failed is no allocation"


def test_actions_of_other_versions_are_left_out(tmp_path: Path) -> None:
    trace = [
        entry("alloc", 0, 512, 1),
        entry("teleported", 0, 512, 2),
        {"action": "snapshot"},
        {"action": "alloc", "addr": None},
    ]
    tables = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace))
    assert tables["allocations"].num_rows == 1
    assert "1 history entries on device 0 with the unknown action 'teleported'" in caveats(tables)["actions_unknown"]
    assert caveats(tables)["entries_without_place"].startswith("1 history entries on device 0")


def test_a_snapshot_of_torch_2_0_is_read(tmp_path: Path) -> None:
    """No times, blocks without addresses, call stacks in a block's history."""
    blocks = [
        {"size": 512, "state": "inactive"},
        {"size": 1024, "state": "active_allocated", "history": [{"addr": BASE + 512, "real_size": 1000, "frames": FRAMES}]},
    ]
    held = {"device": 0, "address": BASE, "total_size": 1536, "stream": 0, "segment_type": "small", "blocks": blocks}
    trace = [
        {"action": "alloc", "addr": BASE, "size": 512, "stream": 0},
        {"action": "free", "addr": BASE, "size": 512, "stream": 0},
    ]
    tables = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace, [held]))
    rows = {row["address"] - BASE: row for row in tables["allocations"].to_pylist()}
    assert (rows[512]["bytes"], rows[512]["stack"]) == (1024, "empty\nforward model.py:12")
    assert tables.info.clock == "unknown"


def test_annotations_are_host_events(tmp_path: Path) -> None:
    marks = [
        {"stage": stage, "name": name, "device": 0, "time_us": T0 + at}
        for stage, name, at in (("START", "a", 1), ("START", "b", 2), ("END", "b", 3), ("END", "a", 4), ("END", "c", 5))
    ]
    path = write(tmp_path / "snapshot.pickle", [entry("alloc", 0, 512, 1)], external_annotations=marks)
    rows = memory_snapshot.read(path).host_events.to_pylist()
    assert [(row["name"], row["category"], row["end_ns"] - row["start_ns"]) for row in rows] == [
        ("a", "annotation", 3000),
        ("b", "annotation", 1000),
    ]


#: What programs do with a few addresses: (operation, address, size).
operations = st.lists(
    st.tuples(st.sampled_from(["alloc", "free_requested", "free_completed"]), st.integers(0, 5), st.integers(0, 3000)),
    max_size=60,
)
live_at_end = st.sets(st.integers(0, 7))


@settings(max_examples=300, deadline=None)
@given(operations, live_at_end)
def test_the_replay_agrees_with_a_naive_one(history: list[tuple[str, int, int]], live: set[int]) -> None:
    """The naive one looks, for each allocation and each free, through the rest of the history."""
    trace = [entry(action, address * 4096, size, at) for at, (action, address, size) in enumerate(history)]
    blocks = [(4096, "active_allocated" if address in live else "inactive", 4000) for address in range(8)]
    found = replay(0, trace, [segment(0, 8 * 4096, *blocks)])
    expected = []
    for address in range(8):
        mine = [(at, action) for at, (action, where, _) in enumerate(history) if where == address]
        lives: list[list[int | None]] = []
        for at, action in mine:
            is_open = bool(lives) and lives[-1][2] is None
            if action == "alloc":
                if is_open:
                    lives[-1][2] = at
                lives.append([at, None, None])
                continue
            if not is_open:
                lives.append([None, None, None])
            lives[-1][1 if action == "free_requested" else 2] = at
        if address in live and not (lives and lives[-1][2] is None):
            lives.append([None, None, None])
        expected += [(BASE + address * 4096, *life) for life in lives]
    times = [(each.address, each.allocated_ns, each.free_requested_ns, each.freed_ns) for each in found.allocations]
    shown = [(address, *(None if time is None else time // 1000 - T0 for time in rest)) for address, *rest in times]
    assert sorted(shown, key=repr) == sorted(expected, key=repr)


maps = st.lists(
    st.tuples(st.sampled_from(["segment_map", "segment_unmap"]), st.integers(0, 15), st.integers(1, 8)), max_size=25
)


@settings(max_examples=300, deadline=None)
@given(maps, st.sets(st.integers(0, 23)))
def test_segments_agree_with_a_naive_replay_page_by_page(history: list[tuple[str, int, int]], held: set[int]) -> None:
    page = 1 << 21
    trace = [entry(action, address * page, pages * page, at) for at, (action, address, pages) in enumerate(history)]
    listed = [segment(address * page, page, (page, "inactive", 0)) for address in sorted(held)]
    lives: dict[int, list[tuple[int | None, int | None]]] = {address: [] for address in range(24)}
    since: dict[int, int | None] = {}
    for at, (action, address, pages) in enumerate(history):
        for each in range(address, address + pages):
            if action == "segment_unmap" or each in since:
                lives[each].append((since.pop(each, None), at))
            if action == "segment_map":
                since[each] = at
    for each in range(24):
        if each in since or each in held:
            lives[each].append((since.get(each), None))
    found: dict[int, list[tuple[int | None, int | None]]] = {address: [] for address in range(24)}
    for row in replay(0, trace, listed).segments:
        first, count = (row.address - BASE) // page, row.bytes // page
        times = tuple(None if time is None else time // 1000 - T0 for time in (row.allocated_ns, row.freed_ns))
        for each in range(first, first + count):
            found[each].append((times[0], times[1]))
    assert {each: sorted(lived, key=repr) for each, lived in found.items()} == {
        each: sorted(lived, key=repr) for each, lived in lives.items()
    }


def test_the_real_snapshot_agrees_with_what_its_segments_say(captures: Path) -> None:
    path = captures / "memory" / "tp2_dp2" / "snapshot_0.pickle.xz"
    tables = memory_snapshot.read(path)
    slow = pickle.loads(lzma.decompress(path.read_bytes()))  # made by the run that the captures' README describes
    blocks = [block for each in slow["segments"] for block in each["blocks"] if block["state"] == "active_allocated"]
    allocations = tables["allocations"]
    live = allocations.filter(pc.is_null(allocations["freed_ns"]))
    assert sorted(zip(live["address"].to_pylist(), live["bytes"].to_pylist(), strict=True)) == sorted(
        (block["address"], block["size"]) for block in blocks
    )
    assert live["requested_bytes"].to_pylist().count(None) == 0
    assert allocations.num_rows == sum(each["action"] == "alloc" for each in slow["device_traces"][0]) == 19809
    assert pc.sum(tables["segments"]["bytes"]).as_py() == sum(each["total_size"] for each in slow["segments"])
    assert pc.sum(tables["segments"]["active_bytes"]).as_py() == sum(each["active_size"] for each in slow["segments"])
    assert not {"frees_unmatched", "allocated_before_history"} & set(caveats(tables))
    assert tables.host_events.num_rows == 1016


def test_eight_times_the_history_takes_eight_times_the_steps(tmp_path: Path) -> None:
    def calls(count: int) -> int:
        trace = [entry("alloc", at * 512, 512, at) for at in range(count)]
        trace += [entry("free_completed", at * 512, 512, count + at) for at in range(count)]
        trace += [entry("segment_map", at * 4096, 4096, at) for at in range(count)]
        path = write(tmp_path / f"{count}.pickle", trace, [segment(at * 4096, 4096) for at in range(count)])
        counted = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            memory_snapshot.read(path)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(4_000) < 9 * calls(500)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_snapshot_that_runs_code_is_one_error_that_names_it(tmp_path: Path) -> None:
    trap, path = tmp_path / "it ran", tmp_path / "snapshot_1.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [], "x": RunsCode(trap)}))
    with pytest.raises(TraceError, match=r"snapshot_1.pickle cannot be read as a memory snapshot: .*more than plain data"):
        memory_snapshot.read(path)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin as a pickle"),
        (bytes(5000), "does not begin as a pickle"),
        (b"{}", "does not begin as a pickle"),
        (pickle.dumps([1, 2]), "is not a memory snapshot: it holds no segments"),
        (pickle.dumps({"weights": {}}), "is not a memory snapshot: it holds no segments"),
        (pickle.dumps({"segments": [], "device_traces": []}), "without a single segment or allocation"),
        (pickle.dumps({"segments": 5, "device_traces": {"a": "b"}}), "without a single segment or allocation"),
        (pickle.dumps({"segments": [None, 3, "x"], "device_traces": [None, 7]}), "without a single segment or allocation"),
        (pickle.dumps({"segments": [{"address": 0}] * 20})[:-30], "cut off|damaged"),
    ],
)
def test_a_file_that_is_no_snapshot_is_one_error_that_names_it(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "snapshot_1.pickle"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words) as caught:
        memory_snapshot.read(path)
    assert "snapshot_1.pickle" in str(caught.value)


@pytest.mark.parametrize("odd", [None, "x", -1, 1 << 63, 2.5, [], {}, (0, 1), True])
@pytest.mark.parametrize("key", ["action", "addr", "size", "stream", "time_us", "frames"])
def test_a_field_of_another_type_costs_no_more_than_its_entry(tmp_path: Path, key: str, odd: Any) -> None:
    trace = [entry("alloc", 0, 512, 1), entry("alloc", 4096, 512, 2) | {key: odd}, entry("free_completed", 0, 512, 3)]
    rows = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace))["allocations"].to_pylist()
    assert [row["freed_ns"] for row in rows if row["address"] == BASE] == [(T0 + 3) * 1000]


def test_a_field_whose_text_would_not_end_is_no_text(tmp_path: Path) -> None:
    """Sixty levels of a list that holds the one before twice: 2**60 items to write out."""
    laughs: list[Any] = []
    for _ in range(60):
        laughs = [laughs, laughs]
    frames = [{"name": laughs, "filename": laughs, "line": laughs}]
    trace = [entry("alloc", 0, 512, 1, frames=frames), entry("alloc", 0, 512, 1) | {"action": laughs}]
    marks = [{"stage": laughs, "name": laughs, "device": laughs, "time_us": T0}]
    held = segment(0, 4096, (4096, laughs, laughs), segment_type=laughs)  # type: ignore[arg-type]
    tables = memory_snapshot.read(write(tmp_path / "snapshot.pickle", trace, [held], external_annotations=marks))
    assert tables["allocations"]["stack"].to_pylist() == ["?"]


def test_entries_that_are_repeated_by_reference_are_refused(tmp_path: Path) -> None:
    """A megabyte that stands for 40 billion entries."""
    history = [entry("alloc", 0, 512, 1)] * 200_000
    path = tmp_path / "snapshot_1.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [history] * 200_000}))
    assert path.stat().st_size < 3_000_000
    with pytest.raises(TraceError, match=r"snapshot_1.pickle needs memory far beyond its size: it repeats its entries"):
        memory_snapshot.read(path)


def test_call_stacks_that_are_repeated_by_reference_are_refused(tmp_path: Path) -> None:
    frame = {"name": "f" * 100_000, "filename": "a.py", "line": 1}
    trace = [entry("alloc", at, 512, at, frames=[frame] * (at + 1)) for at in range(300)]
    path = write(tmp_path / "snapshot_1.pickle", trace)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(TraceError, match=r"snapshot_1.pickle needs memory far beyond its size: it repeats its call stacks"):
        memory_snapshot.read(path)


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot_1.pickle.xz"
    packer = lzma.LZMACompressor(preset=0)
    pieces = [packer.compress(bytes(1 << 24)) for _ in range(8)]
    path.write_bytes(b"".join([*pieces, packer.flush()]))
    with pytest.raises(TraceError, match=r"snapshot_1.pickle.xz is refused: it unpacks to more than 400 times its size"):
        memory_snapshot.read(path)


def test_a_cut_packed_snapshot_is_one_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "snapshot_1.pickle.xz"
    path.write_bytes(lzma.compress(pickle.dumps({"segments": [segment(0, 512)]}))[:-20])
    with pytest.raises(TraceError, match=r"snapshot_1.pickle.xz is cut off"):
        memory_snapshot.read(path)
