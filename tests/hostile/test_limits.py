"""Files made to take time, memory or the process itself: each is refused, or read within limits."""

import functools
import gzip
import json
import lzma
import os
import pickle
import tracemalloc
import zlib
from random import Random

import pytest

from bridge_profiling.bench import results
from bridge_profiling.common.errors import ProfilingConfigError, TraceError
from bridge_profiling.manifest import read_manifest
from bridge_profiling.traces import bounds, kineto, nsys
from bridge_profiling.traces import memory as snapshot
from bridge_profiling.traces.kineto import stream
from tests.traces.conftest import values
from tests.traces.kineto_files import call, complete, document, kernel, steps

READERS = {
    "rank-0.json": kineto.read,
    "rank-0.json.gz": kineto.read,
    "rank-0.json.xz": kineto.read,
    "rank-0.sqlite": nsys.read,
    "rank-0.sqlite.xz": nsys.read,
    "rank-0.nsys-rep": nsys.read,
    "rank-0.pickle": snapshot.read,
    "rank-0.pickle.xz": snapshot.read,
    "manifest.json": read_manifest,
    "bench.json": results.read,
}


@pytest.mark.parametrize("kind", ["a pipe", "a link to a device"])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_opened(tmp_path, name, kind):
    path = tmp_path / name
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to("/dev/zero")
    with pytest.raises((TraceError, ProfilingConfigError), match=f"{path}.* is not a regular file"):
        READERS[name](path)


@pytest.mark.parametrize("name", ["rank-0.json.gz", "rank-0.json.xz", "rank-0.sqlite.xz", "rank-0.pickle", "rank-0.pickle.xz"])
@pytest.mark.parametrize("pack", map(functools.cache, (gzip.compress, lzma.compress)), ids=["gzip", "xz"])
def test_one_ratio_for_every_reader_and_packing(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(b'{"traceEvents": [' + b" " * (33 << 20)))
    with pytest.raises(TraceError, match=f"{name} is refused: it unpacks to more than 200 times its size"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", ["rank-0.json.xz", "rank-0.sqlite.xz", "rank-0.pickle.xz"])
def test_a_packed_file_that_is_cut_off_is_one_error_that_names_it(tmp_path, name):
    (tmp_path / name).write_bytes(lzma.compress(bytes(100))[:-20])
    with pytest.raises(TraceError, match=f"{name} is cut off"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"KINETO": 1000}, "is refused"),
        ({"PIECE_BYTES": 1 << 10, "MAX_PART_BYTES": 1 << 14}, "is not a trace: one event is larger"),
    ],
)
def test_a_trace_and_an_event_larger_than_the_limit_are_refused(write_trace, monkeypatch, limits, why):
    for name, limit in limits.items():
        monkeypatch.setattr(stream, name, limit)
    path = write_trace([kernel("k", 1, 1, text="x" * (1 << 16))], "rank-0.json")
    with pytest.raises(TraceError, match=f"{path} {why}"):
        kineto.read(path)


def test_an_xz_file_that_asks_for_gigabytes_of_memory_is_refused(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    packed = bytearray(lzma.compress(b'{"traceEvents": [', format=lzma.FORMAT_XZ, filters=filters))
    place = packed.index(b"\x21\x01") + 2  # the filter, the size of its properties, and the size of its dictionary
    packed[place] = 40  # 4 GB
    packed[20:24] = zlib.crc32(packed[12:20]).to_bytes(4, "little")
    (tmp_path / "rank-0.json.xz").write_bytes(packed)
    with pytest.raises(TraceError, match=r"rank-0.json.xz is damaged: Memory usage limit exceeded"):
        kineto.read(tmp_path / "rank-0.json.xz")


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("piece_bytes", [1 << 10, 1 << 20])
def test_xz_in_any_pieces(tmp_path, streams, piece_bytes):
    raw = Random(0).randbytes(100_000) + bytes(100_000)
    path = tmp_path / "x.xz"
    path.write_bytes(b"".join(lzma.compress(raw) + bytes(4) for _ in range(streams)))
    assert b"".join(bounds.unpack(path, bounds.KINETO, piece_bytes)) == raw * streams


#: Text in place of the kernel's marked number, and whether its event can still be used.
NUMBERS = {
    "a bare number with a million zeros": ('"dur": 4242', '"dur": 1e999990', False),
    "a correlation of a million hexadecimal digits": ('"correlation": 99', f'"correlation": "0x{"f" * 1_000_000}"', True),
}


@pytest.mark.parametrize(("written", "instead", "usable"), NUMBERS.values(), ids=NUMBERS)
def test_enormous_numbers_cost_their_event_at_most(write_trace, written, instead, usable):
    text = json.dumps(document([kernel("k", 2000, 4242, correlation=99), *steps(500)])).replace(written, instead, 1)
    tables = kineto.read(write_trace(text))
    assert (tables["device_events"].num_rows, tables.info.lost.device) == ((2, 0) if usable else (1, 1))


@pytest.mark.parametrize("name", ["ncclDev" + "x" * (1 << 20), "void " * 200_000, "(anonymous namespace)::" * 50_000])
def test_long_names_are_cut(write_trace, name):
    events = [*steps(500), kernel(name, 2000, 5), call(name, 1990, 1, 7), complete(name, "odd", 1, 1)]
    tables = kineto.read(write_trace(events))
    named = [*tables["device_events"]["name"].to_pylist(), *tables["host_events"]["name"].to_pylist()]
    assert max(map(len, named)) == bounds.MAX_NAME
    assert max(len(caveat.text) for caveat in tables.info.caveats) < 300


@pytest.mark.parametrize(("where", "closing"), [("event", "]"), ("header", "]"), ("end", "]"), ("event", "")])
def test_deeply_nested_json_costs_its_event_at_most(write_trace, where, closing):
    nested = "[" * 200_000 + closing * 200_000
    odd = kernel("odd", 2000, 5, deep="DEEP" if where == "event" else 0)
    events = json.dumps([*steps(500), odd, kernel("k", 3000, 5)]).replace('"DEEP"', nested)
    header, end = (f'"deep": {nested}, ' if where == place else "" for place in ("header", "end"))
    tables = kineto.read(write_trace(f'{{{header}"traceEvents": {events}, {end}"x": 1}}'))
    names = values(tables["device_events"], "name")
    assert names[-1] == "k"
    assert ("odd" in names) == (tables.info.lost.device == 0)


def test_a_snapshot_of_millions_of_empty_things_is_refused_before_it_is_loaded(tmp_path):
    path = tmp_path / "rank-0.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[{} for _ in range(2_000_000)]]}, 4))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=f"{path} cannot be read .* it needs memory far beyond its size"):
            snapshot.read(path)
        assert tracemalloc.get_traced_memory()[1] < 5 * path.stat().st_size
    finally:
        tracemalloc.stop()
