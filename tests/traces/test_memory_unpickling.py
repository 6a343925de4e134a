"""A pickle of plain data is read as Python wrote it; one that asks for anything else is refused, and runs nothing."""

from __future__ import annotations

import builtins
import collections
import copyreg
import io
import pickle
import pickletools
import struct
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.traces.memory.snapshot import load_plain

HEAD = b"\x80\x04"


def plain() -> st.SearchStrategy[Any]:
    keys = st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.none() | st.floats()
    small = st.integers(-(2**31), 2**31 - 1)
    return st.recursive(
        keys | st.text() | st.tuples(small, small),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=40,
    )


@pytest.mark.parametrize("protocol", range(2, 6))
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_plain_data_is_what_it_was(data: st.DataObject, protocol: int) -> None:
    raw = pickle.dumps(data.draw(plain()), protocol)
    assert comparable(load_plain(raw)) == comparable(pickle.loads(raw))


def comparable(value: Any) -> Any:
    """NaN is not equal to itself, 1 is equal to True and 0.0 to -0.0."""
    if isinstance(value, (list, tuple)):
        return type(value), [comparable(item) for item in value]
    if isinstance(value, dict):
        return dict, [(repr(key), comparable(item)) for key, item in value.items()]
    return type(value), repr(value)


def test_comparable_distinguishes_data_that_python_calls_equal() -> None:
    pairs = [(1, True), (1, 1.0), (0.0, -0.0), ([1], [True]), ({"a": 1}, {"a": 1.0}), ([], ())]
    assert not [pair for pair in pairs if comparable(pair[0]) == comparable(pair[1])]
    nan = float("nan")
    assert comparable([nan]) == comparable([float("nan")])


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_is_referred_to_twice_is_one_object(protocol: int) -> None:
    shared = {"name": "f" * 300}
    found = load_plain(
        pickle.dumps([[shared] * 300, [shared, [shared] * 2000], [{"a": number} for number in range(3000)]], protocol)
    )
    assert {id(each) for each in (*found[0], found[1][0], *found[1][1])} == {id(found[0][0])}
    assert found[2][2999] == {"a": 2999}


class Planted:
    """What its pickle calls when `pickle.load` reads it."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple:
        return self.call, self.arguments


class Slotted:
    __slots__ = ("a",)


class Persistent(pickle.Pickler):
    def persistent_id(self, found: Any) -> Any:
        return "id" if isinstance(found, Slotted) else None


def persistent(protocol: int) -> bytes:
    file = io.BytesIO()
    Persistent(file, protocol).dump([Slotted()])
    return file.getvalue()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(protocol: int, tmp_path: Path) -> None:
    trap = tmp_path / "it ran"
    raw = pickle.dumps({"segments": [], "device_traces": [Planted(open, str(trap), "w")]}, protocol)
    with pytest.raises(ValueError, match=r"(?:STACK_)?GLOBAL at byte \d+ could run code"):
        load_plain(raw)
    assert not trap.exists()
    pickle.loads(raw)["device_traces"][0].close()
    assert trap.exists()  # the trap is a real one


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "value",
    [len, collections.OrderedDict(a=1), Path("x"), complex(1, 2), Slotted, range(3), ValueError("x"), Planted(eval, "1")],
    ids=lambda value: type(value).__name__,
)
def test_a_pickle_that_names_a_class_or_a_function_is_refused(value: Any, protocol: int) -> None:
    with pytest.raises(ValueError, match="more than plain data"):
        load_plain(pickle.dumps([value], protocol))


def test_a_persistent_or_registered_object_is_refused() -> None:
    with pytest.raises(ValueError, match="BINPERSID"):
        load_plain(persistent(4))
    copyreg.add_extension("builtins", "dict", 0x7FFF)
    try:
        for raw in (HEAD + b"\x82\x01.", HEAD + b"\x83\xff\x7f.", HEAD + b"\x84\xff\x7f\x00\x00."):
            with pytest.raises(ValueError, match=r"EXT\d at byte 2 "):
                load_plain(raw)
    finally:
        copyreg.remove_extension("builtins", "dict", 0x7FFF)


ALLOWED = {
    "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE",
    "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
}  # fmt: skip


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_only_opcodes_of_plain_data_are_known(opcode: pickletools.OpcodeInfo) -> None:
    """Every other one is refused by name, whatever is on the stack and whatever its arguments are."""
    if opcode.name in ALLOWED:
        return
    prepared = HEAD + b"]\x94(]\x8c\x02os\x8c\x06system"
    with pytest.raises(ValueError, match=rf" {opcode.name} at byte {len(prepared)} "):
        load_plain(prepared + opcode.code.encode("latin1") + b"os\nsystem\n" + bytes(8) + b".")


def peak_bytes(raw: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"damaged|cut off"):
            load_plain(raw)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"\x8e" + struct.pack("<Q", 1 << 40) + b"x.",  # BINBYTES8
        HEAD + b"\x8d" + struct.pack("<Q", (1 << 63) - 1) + b"x.",  # BINUNICODE8
        HEAD + b"X" + struct.pack("<I", (1 << 32) - 1) + b"x.",  # BINUNICODE
        HEAD + b"\x8b" + struct.pack("<I", (1 << 31) - 1) + b"x.",  # LONG4
        HEAD + b"\x8b" + struct.pack("<I", 5000) + b"\x01" * 5000 + b".",
        HEAD + b"\x95" + struct.pack("<Q", (1 << 64) - 1) + b"N.",  # FRAME
        HEAD + b"\x96" + struct.pack("<Q", 1 << 40) + b"x.",  # BYTEARRAY8
        HEAD + b"]r" + struct.pack("<I", (1 << 32) - 1) + b".",  # LONG_BINPUT: 4.1 GB without the check
        HEAD + b"I" + b"9" * 100_000 + b"\n.",  # INT
        HEAD + b"(" * 1_000_000 + b".",  # MARK
    ],
    ids=["bytes", "text", "short text", "long", "long that is there", "frame", "bytearray", "memo", "int", "marks"],
)
def test_a_pickle_that_asks_for_more_memory_than_it_has_is_refused_without_it(raw: bytes) -> None:
    assert peak_bytes(raw) < 2_000_000 + 10 * len(raw)


def test_integer_keys_that_collide_are_refused() -> None:
    """All have the hash 0. As keys of one dictionary they take quadratic time, 1.9 s for these 280 kB."""
    keys = [(number * ((1 << 61) - 1)).to_bytes(11, "little") for number in range(512, 20_512)]
    raw = HEAD + b"}(" + b"".join(b"\x8a\x0b" + key + b"N" for key in keys) + b"u."
    assert len(raw) > 270_000
    with pytest.raises(ValueError, match="LONG1 at byte 4 could run code or exhaust memory"):
        load_plain(raw)


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1, 1 << 70])
def test_integers_beyond_64_bits_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="LONG1"):
        load_plain(pickle.dumps([number], 4))


def test_doubling_by_reference_costs_no_memory_or_time() -> None:
    """A billion laughs: sixty levels of a list that holds the one before twice."""
    found = load_plain(_nested_twice(60))
    depth = 0
    while found:
        assert len(found) == 2
        assert found[0] is found[1]
        found, depth = found[0], depth + 1
    assert depth == 60


def _nested_twice(levels: int) -> bytes:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return pickle.dumps(value, 4)


@pytest.mark.parametrize("levels", [2, 64])
def test_a_key_whose_hash_could_take_for_ever_is_refused(levels: int) -> None:
    """`hash` of a tuple walks all that is in it, each time, and goes as deep as it is."""
    value: tuple = ()
    for _ in range(levels):
        value = (value, value)
    raw = pickle.dumps(value, 4)[:-1]
    for keyed in (HEAD + b"}" + raw[2:] + b"Ns.", HEAD + b"\x8f(" + raw[2:] + b"\x90."):
        with pytest.raises(ValueError, match=r"TUPLE|EMPTY_SET"):
            load_plain(keyed)


def test_deep_nesting_is_read_or_refused_without_recursion() -> None:
    count = 300_000
    lists = load_plain(HEAD + b"]" * count + b"a" * (count - 1) + b".")
    assert len(lists) == 1
    for raw in (b")" + b"\x85" * count, b"K\x00K\x00" + b"\x86" * count, b"(" * count + b"t" * count):
        with pytest.raises(ValueError, match="TUPLE"):
            load_plain(HEAD + raw + b".")


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
        (HEAD + b"K\x00\x86.", "TUPLE2 at byte 4"),
        (HEAD + b"NN\x86.", "TUPLE2 at byte 4"),
        (HEAD + b"N(Ne.", "damaged"),
        (HEAD + b"](NNu.", "damaged"),
        (HEAD + b"}(Nu.", "damaged"),
        (HEAD + b"}]Ns.", "damaged: TypeError"),
        (HEAD + b"\x8c\x02\xff\xfe.", "damaged"),
    ],
)
def test_a_damaged_pickle_says_what_is_wrong(raw: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_plain(raw)


def _sample() -> bytes:
    frames = [{"name": f"f{number}", "filename": "a.py", "line": number} for number in range(40)]
    entries = [
        {"action": "alloc", "addr": 2**47 + number, "size": 512, "stream": 0, "frames": frames[number % 7 :], "p": (0, 7)}
        for number in range(60)
    ]
    return pickle.dumps({"device_traces": [entries], "segments": [], "x": {1: 1.5, None: True}}, 4)


def test_any_bytes_are_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded fuzzing: mutations of a real one, and random opcodes. Nothing but plain data or ValueError comes out."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"the reader imports {arguments[0]}")

    sample, random = _sample(), Random(20)
    alphabet = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]
    read = 0
    monkeypatch.setattr(builtins, "__import__", refuse)
    for turn in range(6000):
        if turn % 2:
            raw = HEAD + b"".join(
                random.choice(alphabet) + random.randbytes(random.choice((0, 0, 1, 4))) for _ in range(random.randint(1, 60))
            )
        else:
            damaged = bytearray(sample)
            for _ in range(random.randint(1, 6)):
                place = random.randrange(len(damaged))
                if random.random() < 0.3:
                    del damaged[place : place + random.randint(1, 9)]
                elif random.random() < 0.5:
                    damaged[place:place] = random.choice(alphabet)
                else:
                    damaged[place] = random.randrange(256)
            raw = bytes(damaged)
        try:
            found = load_plain(raw)
        except ValueError:
            continue
        assert type(found) in (dict, list, tuple, str, int, float, bool, type(None))
        read += 1
    monkeypatch.undo()
    assert read > 20
