"""Memory snapshots: the replay agrees with a naive one, and what is lost is said.

A pickle of plain data is read as Python wrote it; one that asks for anything else is refused, and runs nothing.
"""

import pickle
import pickletools
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces import memory as memory_snapshot
from bridge_profiling.traces.memory.plain_pickle import CheckedPickle
from bridge_profiling.traces.memory.replay import replay
from tests.traces.conftest import caveats, values

T0 = 1_795_178_470_000_000
BASE = 0x7F00_0000_0000
FRAMES = [{"name": "empty", "filename": "??", "line": 0}, {"name": "forward", "filename": "model.py", "line": 12}]
STACK = "empty\nforward model.py:12"


def entry(action, address, size, at, **more):
    return {"action": action, "addr": BASE + address, "size": size, "stream": 0, "time_us": T0 + at, "frames": FRAMES} | more


def segment(address, size, *blocks, **more):
    """A segment with blocks (size, state, requested) one after another."""
    listed, at = [], BASE + address
    for length, state, requested in blocks:
        listed.append({"address": at, "size": length, "requested_size": requested, "state": state, "frames": FRAMES})
        at += length
    place = {"device": 0, "stream": 0, "address": BASE + address, "total_size": size}
    return place | {"segment_type": "large", "blocks": listed} | more


def offset(time_ns):
    """Microseconds after T0."""
    return None if time_ns is None else time_ns // 1000 - T0


@pytest.fixture
def read(tmp_path):
    """Reads a pickle, or a snapshot with this history of device 0, these segments and further keys."""

    def read_snapshot(trace, segments=None, **keys):
        path = tmp_path / "snapshot_1.pickle"
        snapshot = {"segments": segments or [], "device_traces": [trace], **keys}
        path.write_bytes(trace if isinstance(trace, bytes) else pickle.dumps(snapshot))
        return memory_snapshot.read(path)

    return read_snapshot


def lives(tables, *columns):
    """Each allocation's address, when it was allocated, released and freed, and further columns."""
    rows = values(tables["allocations"], "address", "allocated_ns", "free_requested_ns", "freed_ns", *columns)
    return [(row[0] - BASE, *map(offset, row[1:4]), *row[4:]) for row in rows]


def test_what_was_there_before_the_history_has_no_start_and_a_caveat(read):
    frees = (("free_requested", 0), ("free_completed", 0), ("free_completed", 512), ("free_requested", 1024))
    held = segment(0, 4096, (1024, "inactive", 0), (512, "active_pending_free", 400), (2560, "active_allocated", 2222))
    tables = read([entry(action, address, 512, at) for at, (action, address) in enumerate(frees)], [held])
    # The stack of a free says nothing of who allocated it.
    assert lives(tables, "bytes", "requested_bytes", "stack") == [
        (0, None, 0, 1, 512, 512, None),
        (512, None, None, 2, 512, 512, None),
        (1024, None, 3, None, 512, 400, None),
        (1536, None, None, None, 2560, 2222, STACK),
    ]
    assert caveats(tables)["frees_unmatched"].startswith("3 frees on device 0")
    assert caveats(tables)["allocated_before_history"].startswith("1 allocations on device 0")


def test_a_full_history_says_that_it_was_overwritten(read, monkeypatch):
    monkeypatch.setattr(memory_snapshot, "_USUAL_CAP", 100)
    trace = [entry("alloc", 0, 512, 1), *[{"action": "snapshot"}] * 99]
    assert "100 entries" in caveats(read(trace))["history_overwritten"]
    assert "history_overwritten" not in caveats(read(trace[:-1]))


def test_segments_have_their_pool_and_how_full_they_are_at_the_end(read):
    trace = [entry("segment_alloc", 0, 4096, 0), entry("segment_alloc", 8192, 4096, 1), entry("segment_free", 8192, 4096, 2)]
    listed = [
        segment(0, 4096, (1024, "active_allocated", 900), (512, "inactive", 0), (2560, "inactive", 0)),
        segment(1 << 20, 2048, (2048, "active_allocated", 2048), segment_type="small"),
    ]
    columns = ("address", "allocated_ns", "freed_ns", "pool", "active_bytes", "largest_free_bytes")
    rows = values(read(trace, listed)["segments"], *columns)
    assert sorted((address - BASE, offset(start), offset(end), *rest) for address, start, end, *rest in rows) == [
        (0, 0, None, "large", 1024, 2560),
        (8192, 1, 2, None, None, None),
        (1 << 20, None, None, "small", 2048, 0),
    ]


def test_the_caveats_say_what_the_history_lacks(read):
    odd = [entry("teleported", 0, 512, 2), {"action": "snapshot"}, {"action": "alloc", "addr": None}]
    tables = read([entry("alloc", 0, 512, 1), *odd, entry("alloc", 0, 1024, 5)])
    assert tables["allocations"].num_rows == 2
    for code, said in {
        "actions_unknown": "1 history entries on device 0 with the unknown action 'teleported'",
        "entries_without_place": "1 history entries on device 0",
        "frees_missing": "1 allocations on device 0",
        "allocations_outside_segments": "1 allocations on device 0",
    }.items():
        assert caveats(tables)[code].startswith(said)


@pytest.mark.parametrize(
    ("damage", "code", "count"),
    [
        ({"segments": [segment(0, 1024), 5, None]}, "parts_unusable", 2),
        ({"device_traces": [[entry("alloc", 0, 512, 1), "x"], 7]}, "parts_unusable", 2),
        ({"segments": [segment(0, 1024), segment(4096, -1)]}, "segments_without_place", 1),
        ({"segments": [segment(0, 1024, (float("nan"), "inactive", 0))]}, "blocks_unusable", 1),
    ],
)
def test_parts_that_cannot_be_used_are_counted(read, damage, code, count):
    told = caveats(read([], **({"device_traces": [[entry("alloc", 0, 512, 1)]]} | damage)))
    assert told[code].startswith(f"{count} ")
    assert not told.keys() & {"parts_unusable", "segments_without_place", "blocks_unusable"} - {code}


def test_a_snapshot_of_torch_2_0_is_read(read):
    """No times, blocks without addresses, call stacks in a block's history."""
    blocks = [
        {"size": 512, "state": "inactive"},
        {"size": 1024, "state": "active_allocated", "history": [{"addr": BASE + 512, "real_size": 1000, "frames": FRAMES}]},
    ]
    held = {"device": 0, "address": BASE, "total_size": 1536, "stream": 0, "segment_type": "small", "blocks": blocks}
    tables = read([{"action": action, "addr": BASE, "size": 512, "stream": 0} for action in ("alloc", "free")], [held])
    assert (BASE + 512, 1024, STACK) in values(tables["allocations"], "address", "bytes", "stack")
    assert tables.info.clock == "unknown"


def test_annotations_are_host_events(read):
    stages = (("START", "a"), ("START", "b"), ("END", "b"), ("END", "a"), ("END", "c"))
    marks = [{"stage": stage, "name": name, "device": 0, "time_us": T0 + at} for at, (stage, name) in enumerate(stages)]
    rows = values(read([entry("alloc", 0, 512, 1)], external_annotations=marks)["host_events"], "name", "start_ns", "end_ns")
    assert [(name, offset(start), offset(end)) for name, start, end in rows] == [("a", 0, 3), ("b", 1, 2)]


def histories(actions, last, sizes, length):
    return st.lists(st.tuples(st.sampled_from(actions), st.integers(0, last), sizes), max_size=length)


@settings(max_examples=100, deadline=None)
@given(histories(["alloc", "free_requested", "free_completed"], 5, st.integers(0, 3000), 60), st.sets(st.integers(0, 7)))
def test_the_replay_agrees_with_a_naive_one(history, live):
    """The naive one looks, for each allocation and each free, through the rest of the history."""
    trace = [entry(action, address * 4096, size, at) for at, (action, address, size) in enumerate(history)]
    blocks = [(4096, "active_allocated" if address in live else "inactive", 4000) for address in range(8)]
    expected = []
    for address in range(8):
        found = []
        for at, action in [(at, action) for at, (action, where, _) in enumerate(history) if where == address]:
            is_open = found and found[-1][2] is None
            if action == "alloc" and is_open:
                found[-1][2] = at
            if action == "alloc" or not is_open:
                found.append([None, None, None])
            found[-1][["alloc", "free_requested", "free_completed"].index(action)] = at
        if address in live and not (found and found[-1][2] is None):
            found.append([None, None, None])
        expected += [(BASE + address * 4096, *life) for life in found]
    shown = [
        (each.address, *map(offset, (each.allocated_ns, each.free_requested_ns, each.freed_ns)))
        for each in replay(0, trace, [segment(0, 8 * 4096, *blocks)]).allocations
    ]
    assert sorted(shown, key=repr) == sorted(expected, key=repr)


@settings(max_examples=100, deadline=None)
@given(histories(["segment_map", "segment_unmap"], 15, st.integers(1, 8), 25), st.sets(st.integers(0, 23)))
def test_segments_agree_with_a_naive_replay_page_by_page(history, held):
    page = 1 << 21
    trace = [entry(action, address * page, pages * page, at) for at, (action, address, pages) in enumerate(history)]
    expected, since = Counter(), {}
    for at, (action, address, pages) in enumerate(history):
        for each in range(address, address + pages):
            if action == "segment_unmap" or each in since:
                expected[each, since.pop(each, None), at] += 1
            if action == "segment_map":
                since[each] = at
    expected.update((each, since.get(each), None) for each in since.keys() | held)
    found = Counter()
    for row in replay(0, trace, [segment(address * page, page, (page, "inactive", 0)) for address in sorted(held)]).segments:
        for each in range(row.address - BASE, row.address - BASE + row.bytes, page):
            found[each // page, offset(row.allocated_ns), offset(row.freed_ns)] += 1
    assert found == expected


def test_a_field_whose_text_would_not_end_is_no_text(read):
    """Sixty levels of a list that holds the one before twice: 2**60 items to write out."""
    laughs = []
    for _ in range(60):
        laughs = [laughs, laughs]
    frames = [{"name": laughs, "filename": laughs, "line": laughs}]
    trace = [entry("alloc", 0, 512, 1, frames=frames), entry("alloc", 0, 512, 1) | {"action": laughs}]
    marks = [{"stage": laughs, "name": laughs, "device": laughs, "time_us": T0}]
    held = segment(0, 4096, (4096, laughs, laughs), segment_type=laughs)
    assert values(read(trace, [held], external_annotations=marks)["allocations"], "stack") == ["?"]


def test_entries_and_call_stacks_that_are_repeated_by_reference_are_refused(read):
    """A megabyte stands for 200 million entries, or for 4.5 GB of text."""
    history = [entry("alloc", 0, 512, 1)] * 200_000
    with pytest.raises(TraceError, match=r"snapshot_1.pickle needs memory far beyond its size: it repeats its entries"):
        read([], device_traces=[history] * 1000)
    frame = {"name": "f" * 100_000, "filename": "a.py", "line": 1}
    with pytest.raises(TraceError, match=r"snapshot_1.pickle needs memory far beyond its size: it repeats its call stacks"):
        read([entry("alloc", at, 512, at, frames=[frame] * (at + 1)) for at in range(300)])


# -- pickles of plain data ---------------------------------------------------------------------------------------------

HEAD = b"\x80\x04"
OPCODES = {opcode.name: opcode.code.encode("latin1") for opcode in pickletools.opcodes}
ALLOWED = {
    "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE",
    "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
}  # fmt: skip

keys = st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.none() | st.floats()
small = st.integers(-(2**31), 2**31 - 1)
plain = st.recursive(
    keys | st.text() | st.tuples(small, small),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=30, deadline=None)
@given(plain, st.integers(2, 5))
def test_plain_data_is_what_it_was(data, protocol):
    """By its text: NaN is not equal to itself, 1 is equal to True and 0.0 to -0.0."""
    assert repr(CheckedPickle(pickle.dumps(data, protocol)).load()[0]) == repr(data)


def test_only_opcodes_of_plain_data_are_known():
    """Every other one is refused by name, whatever is on the stack and whatever its arguments are."""
    prepared = HEAD + b"]\x94(]\x8c\x02os\x8c\x06system"
    for name in OPCODES.keys() - ALLOWED:
        with pytest.raises(ValueError, match=rf" {name} at byte {len(prepared)} "):
            CheckedPickle(prepared + OPCODES[name] + b"os\nsystem\n" + bytes(8) + b".").load()


def test_a_pickle_that_asks_for_more_memory_than_it_has_is_refused_without_it():
    numbers = [
        ("BINUNICODE", "<I", (1 << 32) - 1),
        ("FRAME", "<Q", (1 << 64) - 1),
        ("LONG_BINPUT", "<I", (1 << 32) - 1),  # 4.1 GB without the check
    ]
    asking = [b"]" + OPCODES[name] + struct.pack(width, number) + b"x." for name, width, number in numbers]
    for raw in (*asking, b"I" + b"9" * 100_000 + b"\n.", b"(" * 1_000_000 + b"."):
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"damaged|cut off"):
            CheckedPickle(HEAD + raw).load()
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 10 * len(raw)
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"(dp0\n.", "does not begin as a pickle"),
        (HEAD + b"j\x05", "damaged"),
        (HEAD + b"\x8c\x05abc", "cut off"),
        (HEAD + b"K\x00K\x00\x86K\x00\x86.", "TUPLE2 at byte 9"),  # the hash of nested ones takes exponential time
        # Longer integers as keys can be made to collide: 280 kB of them take 1.9 s.
        *((pickle.dumps([number], 4), "LONG1") for number in (1 << 64, -(1 << 63) - 1)),
        (pickle.dumps({"segments": [], "x": Path("code")}), "cannot be read as a memory snapshot: .*more than plain data"),
        (pickle.dumps({"weights": {}}), "is not a memory snapshot: it holds no segments"),
        (pickle.dumps({"segments": 5, "device_traces": {"a": "b"}}), "without a single segment or allocation"),
    ],
)
def test_a_file_that_is_no_snapshot_is_one_error_that_says_what_is_wrong(read, content, words):
    with pytest.raises(TraceError, match=f"snapshot_1.pickle.*({words})"):
        read(content)
