"""Kineto traces with damaged events or damaged text: each loss is counted, and the rank is not judged as if whole."""

import gzip
import json
from random import Random

import pytest

from bridge_profiling.common.errors import TraceError
from bridge_profiling.findings import Confidence
from bridge_profiling.run import Run
from bridge_profiling.traces import kineto
from bridge_profiling.traces.kineto.stream import Stream
from tests.findings.simulated_jobs import Here
from tests.traces.conftest import caveats, values
from tests.traces.kineto_files import call, complete, document, kernel, steps

STEPS = 15


def unlike(**fields):
    """An event with other fields; `...` removes one."""
    return lambda event: {name: value for name, value in (event | fields).items() if value is not ...}


EVENTS = {
    "no duration": unlike(dur=...),
    "a list as duration": unlike(dur=[500]),
    "true as duration": unlike(dur=True),
    "negative duration": unlike(dur=-500),
    "no start": unlike(ts=...),
    "an enormous start": unlike(ts=1e300),
    "a phase that nobody writes": unlike(ph="Y"),
}


def rank(number, damage=None, count=0, size=2):
    """A rank of 15 iterations with a kernel each, the last `count` of them damaged."""
    events = steps(*[500] * STEPS, operators=True)
    kernels = [place for place, event in enumerate(events) if event["cat"] == "kernel"]
    for place in kernels[STEPS - count :]:
        events[place] = damage(events[place])
    return document(events, distributedInfo={"rank": number, "world_size": size})


@pytest.mark.parametrize("count", [1, STEPS])
@pytest.mark.parametrize("damage", EVENTS.values(), ids=EVENTS)
def test_device_events_that_cannot_be_used_are_counted(write_trace, damage, count):
    path = write_trace(rank(3, damage, count))
    info = kineto.read(path).info
    assert (info.lost.device, info.lost.of_device, info.judged) == (count, STEPS, False)
    assert f"{path}: {count} of its 15 device events could not be used, so rank 3 is not judged" in info.error or (
        f"{path} holds {count} events that end before they start" in info.error
    )


def test_entries_that_are_no_events_are_counted(write_trace):
    strange = ["x", None, 5, True, [1], [[{"a": 1}]]]
    info = kineto.read(write_trace([strange[0], *steps(500), *strange[1:4], kernel("k", 2000, 5), *strange[4:]])).info
    assert (info.lost.total, info.lost.device, info.lost.of_device, info.judged) == (6, 0, 2, True)
    assert caveats(kineto.read(write_trace([*strange, *steps(500)])))["events_undecodable"].startswith("6 events could not")


IMPOSSIBLE = {
    "elements whose bytes exceed 64 bits": {"In msg nelems": 10**18},
    "elements that exceed 64 bits": {"Out msg nelems": 10**30},
    "elements as a large float": {"In msg nelems": 1e300},
    "a rank that exceeds 64 bits": {"Process Group Ranks": "[99999999999999999999, 1]"},
    "a rank that exceeds 32 bits": {"Process Group Ranks": "[4294967296, 1]"},
    "a negative rank": {"Process Group Ranks": "[-1, 1]"},
    "a group that exceeds 32 bits": {"Group size": 10**12},
    "bytes of a copy": {"bytes": 1 << 62},
}


@pytest.mark.parametrize("numbers", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_numbers_that_no_training_has_count_as_unknown_and_every_rank_is_answered(write_trace, tmp_path, numbers):
    described = {"Collective name": "allreduce", "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    described |= {"In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2}
    for number in (0, 1):
        events = steps(500, 500, 500)
        for begin in (700, 1700, 2700):
            events.append(kernel("ncclDevKernel_AllReduce", begin, 50, **described))
            copied = {"device": 0, "stream": 7, "bytes": 4096}
            events.append(complete("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin + 60, 5, pid=0, tid=7, **copied))
            for event in events[-2:] if number else ():
                event["args"] |= {name: value for name, value in numbers.items() if name in event["args"]}
        write_trace(events, f"rank-{number}.json", distributedInfo={"rank": number, "world_size": 2})
    with Run(tmp_path, engine=Here()) as run:
        found = json.loads(run.to_json())
        assert (run.facts.errors, [each["rank"] for each in found["ranks"]]) == ([], [0, 1])
        assert run.communication(by="size").num_rows
    assert caveats(kineto.read(tmp_path / "rank-1.json"))["numbers_impossible"].startswith("3 sizes or ranks")


@pytest.mark.parametrize("who", ["launches", "kernels"])
def test_a_correlation_that_is_not_one_event_s_alone_says_nothing(write_trace, who):
    events = []
    for place in range(4):
        shared = {"launches": (7, 7), "kernels": (place + 7, 7)}[who]
        events += [
            complete("user_annotation", f"ProfilerStep#{place}", 1000 * place, 900),
            call("cudaLaunchKernel", 1000 * place + 10, 2, shared[0]),
            kernel("gemm", 1000 * place + 100, 700, correlation=shared[1]),
        ]
    graph = [call("cudaGraphLaunch", 20, 2, 9), *(kernel("k", 30 + n, 1, correlation=9) for n in range(3))]
    tables = kineto.read(write_trace([*events, *graph]))
    assert [row for row in values(tables["device_events"], "name", "iteration") if row[0] == "gemm"] == [
        ("gemm", place) for place in range(4)
    ]
    assert (tables.info.lost.device, tables.info.judged) == (4, False)
    assert "4 device events have a correlation" in caveats(tables)["correlations_repeated"]


#: A character in the text of the middle kernel, where it stands, and how many events it costs.
TEXTS = {
    "a quote in a name": (b'my_gemm"_kernel', b"my_gemm_kernel", 1),
    "a backslash before the closing quote": (b'my_gemm_kernel\\"', b'my_gemm_kernel"', 1),
    "an opening brace": (b'"cat": {"kernel", "name": "my', b'"cat": "kernel", "name": "my', 1),
    "a control character": (b"my_gemm\x00_kernel", b"my_gemm_kernel", 0),
    "a bracket after an event": (b'}}], {"ph": "X", "cat": "user', b'}}, {"ph": "X", "cat": "user', 0),
    "an event too few braces": (b'}, {"ph": "X", "cat": "user', b'}}, {"ph": "X", "cat": "user', 1),
}


@pytest.mark.parametrize("piece_bytes", [300, 5000, 1 << 20])
@pytest.mark.parametrize(("written", "instead_of", "lost"), TEXTS.values(), ids=TEXTS)
def test_a_damaged_character_costs_the_event_that_it_is_in(write_trace, monkeypatch, written, instead_of, lost, piece_bytes):
    monkeypatch.setattr("bridge_profiling.traces.kineto.stream.PIECE_BYTES", piece_bytes)
    text = json.dumps(rank(3), separators=(", ", ": ")).encode()
    place = text.index(instead_of, len(text) // 2)
    text = text[:place] + written + text[place + len(instead_of) :]
    tables = kineto.read(write_trace(text))
    assert (tables.info.lost.device, tables.info.lost.total, tables["device_events"].num_rows) == (lost, lost, STEPS - lost)
    assert (tables["iterations"].num_rows, tables.info.rank) == (STEPS, 3)
    assert ("is damaged: at least 1 events" in (tables.info.error or "")) == bool(lost)


def test_damage_in_the_last_event_costs_no_more_and_the_keys_after_it_are_read(write_trace):
    """`make fuzz` found it: each argument of the damaged event counted as an event of its own."""
    whole = json.dumps(document(steps(500, 500), distributedInfo={"rank": 4}) | {"later": [{"name": "x"}], "world_version": 7})
    before, args, after = whole.rpartition('"args": {"device"')
    tables = kineto.read(write_trace(before + args.replace("{", "}") + after))
    assert (tables.info.lost.total, tables.info.lost.device, tables["device_events"].num_rows) == (1, 1, 1)
    assert (tables.info.rank, tables.info.versions["world"]) == (4, "7")


def test_the_text_of_a_large_trace_with_one_bad_character_is_read_once(write_trace, monkeypatch):
    """One quote made 28 MB take 44 s: the text after it was searched again with each piece."""
    text = json.dumps(document([kernel(f"k{number % 9}", number, 1) for number in range(40_000)])).encode()
    place = text.index(b'"k5"') + 2
    searched, recut = [], Stream.recut

    def counted(stream, *arguments, **options):
        searched.append(len(stream.rest))
        return recut(stream, *arguments, **options)

    monkeypatch.setattr(Stream, "recut", counted)
    tables = kineto.read(write_trace(text[:place] + b'"' + text[place:], "rank-3.json"))
    assert (tables["device_events"].num_rows, tables.info.lost.device) == (39_999, 1)
    assert sum(searched) < 3 << 20


@pytest.mark.parametrize(
    ("name", "damage", "rows", "said"),
    [
        ("rank-3.json.gz", lambda raw: raw[: len(raw) // 2], range(500, 1500), "is cut off"),
        ("rank-3.json.gz", lambda raw: raw[:-1] + bytes([raw[-1] ^ 0xFF]), [2000], "is damaged"),
        ("rank-3.json", lambda raw: raw[: len(raw) // 2], range(900, 1100), "is cut off"),
    ],
    ids=["gzip cut off", "wrong checksum", "JSON cut off"],
)
def test_a_damaged_trace_keeps_what_comes_before_the_damage(write_trace, name, damage, rows, said):
    random = Random(0)
    path = write_trace([kernel(f"k{random.random()}", 10 * number, 5) for number in range(2000)], name)
    path.write_bytes(damage(path.read_bytes()))
    tables = kineto.read(path)
    assert tables["device_events"].num_rows in rows
    assert f"{path} {said}" in tables.info.error
    assert (tables.info.partial, tables.info.rank) == (True, 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1, 2", b'{"traceEvents": [1, "x", null]}', b'[{"ph": "C"}]', b"\x1f\x8b\x08\x00junk", b"\xfd7zXZ\0junk",
     b"not json", b'{"traceEvents": 5}', b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": null, "dur": 1}]',
     b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e300, "dur": 1}]', b"[" * 100_000, b"[" + b'{"a":' * 100_000],
)  # fmt: skip
def test_what_holds_no_event_is_one_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=str(path)):
        kineto.read(path)


def test_iterations_that_go_back_in_time_are_an_error(write_trace):
    path = write_trace([complete("user_annotation", f"ProfilerStep#{step}", 1000 - 100 * step, 90) for step in (1, 2)])
    with pytest.raises(TraceError, match=rf"{path}.*backwards"):
        kineto.read(path)


# What a run says of a rank that is not judged.


def test_a_rank_that_lost_too_much_is_not_judged(folder, typed):
    for number, damage, count in ((0, EVENTS["a list as duration"], 3), (1, None, 0)):
        (folder / "run" / f"rank-{number}.json.gz").write_bytes(gzip.compress(json.dumps(rank(number, damage, count)).encode()))
    said = "rank-0.json.gz: 3 of its 15 device events could not be used, so rank 0 is not judged"
    for command in (["analyze", "run"], ["report", "run", "-o", "page.html"]):
        shown, as_json = typed(*command), typed(*command, "--json")
        assert [(done.returncode, said in done.stderr) for done in (shown, as_json)] == [(1, True)] * 2
    assert said in (folder / "page.html").read_text()
    assert "Rank 0 is not judged: 3 of 15 device events could not be used." in shown.stdout
    answer = json.loads(as_json.stdout)
    assert [(each["judged"], each["lost"]["device"]) for each in answer["ranks"]] == [(False, 3), (True, 0)]
    assert {tuple(finding["ranks"]) for finding in answer["findings"]} == {(1,)}
    assert Confidence.high not in {finding["confidence"] for finding in answer["findings"]}
    assert all("rank 0 lost too many device events" in each["confidence_reason"] for each in answer["findings"])
    assert [row["rank"] for row in answer["budget"]["ranks"]] == [1]


def test_a_run_of_unjudged_ranks_has_no_verdict(folder, typed):
    trace = json.dumps(rank(0, EVENTS["no duration"], STEPS, size=1)).encode()
    (folder / "run" / "rank-0.json.gz").write_bytes(gzip.compress(trace))
    done = typed("report", "run", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]["outcome"], answer["findings"]) == (1, "not_judged", [])
    assert "lost too much" in typed("report", "run", "--no-page").stdout
