"""A pickle of plain data is read as Python wrote it; one that asks for anything else is refused, and runs nothing."""

import pickle
import pickletools
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.traces.memory.plain_pickle import CheckedPickle

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
    max_leaves=40,
)


def load_plain(data):
    return CheckedPickle(data).load()[0]


@settings(max_examples=60, deadline=None)
@given(plain, st.integers(2, 5))
def test_plain_data_is_what_it_was(data, protocol):
    """By its text: NaN is not equal to itself, 1 is equal to True and 0.0 to -0.0."""
    assert repr(load_plain(pickle.dumps(data, protocol))) == repr(data)


def test_what_is_referred_to_twice_is_one_object():
    shared = {"name": "f" * 300}
    found = load_plain(pickle.dumps([[shared] * 300, [{"a": number} for number in range(300)], [shared]], 2))
    assert {id(each) for each in (*found[0], *found[2])} == {id(found[0][0])}
    assert found[1][299] == {"a": 299}


@pytest.mark.parametrize("before", [0, 300])  # references in one byte, and in four
def test_equal_call_stacks_are_kept_once_and_other_lists_stay(before):
    frames = [{"name": name} for name in "abc"]
    entries = [{"frames": list(frames), "other": list(frames)} for _ in range(4)]
    found, stacks = CheckedPickle(pickle.dumps([[[] for _ in range(before)], entries])).load()
    assert found[1][0] == entries[0]
    assert found[1][1:] == [{"frames": bytes(4), "other": frames}] * 3
    assert stacks == [frames]


def test_only_opcodes_of_plain_data_are_known():
    """Every other one is refused by name, whatever is on the stack and whatever its arguments are."""
    prepared = HEAD + b"]\x94(]\x8c\x02os\x8c\x06system"
    for name in OPCODES.keys() - ALLOWED:
        with pytest.raises(ValueError, match=rf" {name} at byte {len(prepared)} "):
            load_plain(prepared + OPCODES[name] + b"os\nsystem\n" + bytes(8) + b".")


def test_a_pickle_that_asks_for_more_memory_than_it_has_is_refused_without_it():
    numbers = [
        ("BINBYTES8", "<Q", 1 << 40),
        ("BINUNICODE8", "<Q", (1 << 63) - 1),
        ("BINUNICODE", "<I", (1 << 32) - 1),
        ("LONG4", "<I", (1 << 31) - 1),
        ("FRAME", "<Q", (1 << 64) - 1),
        ("BYTEARRAY8", "<Q", 1 << 40),
        ("LONG_BINPUT", "<I", (1 << 32) - 1),  # 4.1 GB without the check
    ]
    asking = [b"]" + OPCODES[name] + struct.pack(width, number) + b"x." for name, width, number in numbers]
    for raw in (*asking, b"I" + b"9" * 100_000 + b"\n.", b"(" * 1_000_000 + b"."):
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"damaged|cut off"):
            load_plain(HEAD + raw)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 10 * len(raw)
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"(dp0\n.", "does not begin as a pickle"),
        (HEAD + b"j\x05", "damaged"),
        (HEAD + b"\x8c\x05abc", "cut off"),
        (HEAD + b"K\x00\x86.", "TUPLE2 at byte 4"),
        (HEAD + b"K\x00K\x00\x86K\x00\x86.", "TUPLE2 at byte 9"),  # the hash of nested ones takes exponential time
        (HEAD + b"}]Ns.", "damaged: TypeError"),
        # Longer integers as keys can be made to collide: 280 kB of them take 1.9 s.
        *((pickle.dumps([number], 4), "LONG1") for number in (1 << 64, -(1 << 63) - 1)),
    ],
)
def test_a_damaged_pickle_says_what_is_wrong(raw, words):
    with pytest.raises(ValueError, match=words):
        load_plain(raw)
