"""A pickle of plain data is read as Python wrote it; one that asks for anything else is refused, and runs nothing."""

from __future__ import annotations

import builtins
import pickle
import pickletools
import struct
import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.traces.memory.snapshot import load_plain

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


@settings(max_examples=60, deadline=None)
@given(plain, st.integers(2, 5))
def test_plain_data_is_what_it_was(data, protocol):
    """By its text: NaN is not equal to itself, 1 is equal to True and 0.0 to -0.0."""
    assert repr(load_plain(pickle.dumps(data, protocol))) == repr(data)


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_referred_to_twice_is_one_object(protocol):
    shared = {"name": "f" * 300}
    value = [[shared] * 300, [shared, [shared] * 2000], [{"a": number} for number in range(3000)]]
    found = load_plain(pickle.dumps(value, protocol))
    assert {id(each) for each in (*found[0], found[1][0], *found[1][1])} == {id(found[0][0])}
    assert found[2][2999] == {"a": 2999}


class RunsCode:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(protocol, tmp_path):
    trap = tmp_path / "it ran"
    raw = pickle.dumps({"segments": [], "device_traces": [RunsCode(trap)]}, protocol)
    with pytest.raises(ValueError, match=r"more than plain data: (?:STACK_)?GLOBAL at byte \d+ could run code"):
        load_plain(raw)
    assert not trap.exists()
    pickle.loads(raw)["device_traces"][0].close()
    assert trap.exists()  # the trap is a real one


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
    # An integer's digits, marks, and integer keys that collide: all have the hash 0, which takes 1.9 s for these 280 kB.
    collide = b"".join(b"\x8a\x0b" + (number * ((1 << 61) - 1)).to_bytes(11, "little") + b"N" for number in range(512, 20_512))
    for raw in (*asking, b"I" + b"9" * 100_000 + b"\n.", b"(" * 1_000_000 + b".", b"}(" + collide + b"u."):
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"damaged|cut off"):
            load_plain(HEAD + raw)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 10 * len(raw)
        tracemalloc.stop()


def test_nesting_costs_no_memory_or_time():
    """Sixty levels of a list that holds the one before twice, and 300,000 of lists with one item."""
    value = []
    for _ in range(60):
        value = [value, value]
    found, depth = load_plain(pickle.dumps(value, 4)), 0
    while found:
        assert found[0] is found[1]
        found, depth = found[0], depth + 1
    assert depth == 60
    assert len(load_plain(HEAD + b"]" * 300_000 + b"a" * 299_999 + b".")) == 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "does not begin as a pickle"),
        (b"\x80", "does not begin as a pickle"),
        (b"(dp0\n.", "does not begin as a pickle"),
        (b"\x80\x63N.", "does not begin as a pickle"),
        (HEAD, "cut off"),
        (HEAD + b".", "damaged"),
        (HEAD + b"(.", "damaged"),
        (HEAD + b"e.", "damaged"),
        (HEAD + b"h\x05.", "damaged"),
        (HEAD + b"j\x05", "damaged"),
        (HEAD + b"\x8c\x05abc", "cut off"),
        (HEAD + b"NN\x86.", "TUPLE2 at byte 4"),
        (HEAD + b"K\x00\x86.", "TUPLE2 at byte 4"),
        (HEAD + b"K\x00K\x00\x86K\x00\x86.", "TUPLE2 at byte 9"),  # the hash of nested ones takes exponential time
        (HEAD + b"}(Nu.", "damaged"),
        (HEAD + b"}]Ns.", "damaged: TypeError"),
        (HEAD + b"\x8c\x02\xff\xfe.", "damaged"),
        *((pickle.dumps([number], 4), "LONG1") for number in (1 << 64, -(1 << 63) - 1, 1 << 70)),
    ],
)
def test_a_damaged_pickle_says_what_is_wrong(raw, words):
    with pytest.raises(ValueError, match=words):
        load_plain(raw)


def _damaged(sample, random):
    """A sample with some bytes changed, or random opcodes."""
    codes = list(OPCODES.values())
    if random.random() < 0.5:
        opcodes = (random.choice(codes) + random.randbytes(random.choice((0, 0, 1, 4))) for _ in range(random.randint(1, 60)))
        return HEAD + b"".join(opcodes)
    damaged = bytearray(sample)
    for _ in range(random.randint(1, 6)):
        place = random.randrange(len(damaged))
        change = random.choice((b"", random.choice(codes), random.randbytes(1)))
        damaged[place : place + random.randint(0, 9 if not change else 1)] = change
    return bytes(damaged)


def test_any_bytes_are_read_or_refused(monkeypatch):
    """Nothing but plain data or ValueError comes out."""

    def refuse(*arguments):
        raise AssertionError(f"the reader imports {arguments[0]}")

    frames = [{"name": f"f{number}", "filename": "a.py", "line": number} for number in range(40)]
    entries = [{"action": "alloc", "addr": 2**47 + number, "frames": frames[number % 7 :], "p": (0, 7)} for number in range(60)]
    sample = pickle.dumps({"device_traces": [entries], "segments": [], "x": {1: 1.5, None: True}}, 4)
    random, read = Random(20), 0
    monkeypatch.setattr(builtins, "__import__", refuse)
    for _ in range(3000):
        raw = _damaged(sample, random)
        try:
            found = load_plain(raw)
        except ValueError:
            continue
        assert type(found) in (dict, list, tuple, str, int, float, bool, type(None))
        read += 1
    monkeypatch.undo()
    assert read > 20
