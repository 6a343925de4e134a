"""Times that cannot be are said, ranks of whom nothing is wrong are left alone, and every caveat has a sentence."""

import gzip
import json
import re
from pathlib import Path

import pytest

import bridge_profiling.traces
from bridge_profiling.common.errors import TraceError
from bridge_profiling.findings import Confidence
from bridge_profiling.run import Run
from bridge_profiling.traces.types import texts
from tests.findings.simulated_jobs import Here
from tests.traces.conftest import caveats
from tests.traces.kineto_files import call, complete, kernel, steps
from tests.traces.nsys_files import Report

STEPS = 15


def waiting_steps():
    """Iterations that launch two kernels and end when the device is done."""
    events = steps(*[500] * STEPS)
    for place in range(STEPS):
        begin, number = 1000 * place, 100 + place
        events.append(call("cudaLaunchKernel", begin + 20, 2, number))
        events.append(kernel("relu_kernel", begin + 605, 100, correlation=number, stream=9))
        events.append(call("cudaDeviceSynchronize", begin + 30, 700, 1000 + place))
    return events


def moved(by_us, which=lambda event: True, **changed):
    """Device events at other times, or with other arguments."""
    events = waiting_steps()
    for event in events:
        if event["cat"] == "kernel" and which(event):
            event["ts"] += by_us
            event["args"] |= changed
    return events


def report_of(events):
    """The same as an nsys report."""
    report = Report()
    for event in events:
        start, end = int(event["ts"] * 1000) + 10**9, int((event["ts"] + event["dur"]) * 1000) + 10**9
        args = event["args"]
        if event["cat"] == "kernel":
            report.kernel(event["name"], start, end, correlation=args["correlation"], stream=args["stream"])
        elif event["cat"] == "cuda_runtime":
            report.call(event["name"], start, end, args["correlation"])
        else:
            report.range(event["name"].replace("ProfilerStep#", "iteration_"), start, end)
    return report


def second_half(event):
    return event["ts"] > 1000 * STEPS / 2


CLOCKS = {
    "as recorded": (moved(0), {}),
    "a skew of microseconds": (moved(-150), {}),
    "behind by 4 ms": (moved(-4000), {"device_clock_apart": "by up to 3.91 ms: the device's clock is behind"}),
    "behind by a second": (moved(-1e6), {"device_clock_apart": "by up to 1,000 ms: the device's clock is behind"}),
    "behind from some time on": (moved(-50_000, second_half), {"device_clock_apart": "15 of 30 device events start before"}),
    "behind on one stream": (moved(-50_000, lambda event: event["tid"] == 9), {"device_clock_apart": "15 of 30 device events"}),
    "drifting": (
        [event | {"ts": event["ts"] * (0.9 if event["cat"] == "kernel" else 1)} for event in waiting_steps()],
        {"device_clock_apart": "is behind"},
    ),
    "ahead by 50 ms": (moved(50_000), {"device_clock_apart": "30 device events start after calls that waited for their end"}),
    "an end that is wrong": (
        [*waiting_steps(), kernel("k", 14_990, 5e6, correlation=1014)],
        {"device_event_too_long": "a device event of 5 s ends 5 s after everything else"},
    ),
    "two at once on a stream": (
        [*waiting_steps(), call("cudaLaunchKernel", 40, 2, 900), kernel("k", 101, 4000, correlation=900)],
        {"streams_overlap": "1 device events end after the two that follow them in their stream, by up to 1.5 ms"},
    ),
    "two at once on unknown streams": (
        [*moved(0, stream=None), call("cudaLaunchKernel", 40, 2, 900), kernel("k", 101, 4000, correlation=900, stream=None)],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("of", ["kineto", "nsys"])
@pytest.mark.parametrize(("events", "expected"), CLOCKS.values(), ids=CLOCKS)
def test_times_of_the_device_that_contradict_the_hosts_are_said(read_trace, read_report, of, events, expected):
    said = caveats(read_trace(events) if of == "kineto" else read_report(report_of(events)))
    codes = {"device_clock_apart", "device_event_too_long", "streams_overlap", "launched_later"}
    assert {code for code in said if code in codes} == set(expected)
    assert all(part in said[code] for code, part in expected.items())


@pytest.mark.parametrize(("others", "code", "doubtful"), [(0, "device_events_undated", True), (100, "events_undated", False)])
def test_device_events_without_a_time_are_left_out_and_said(read_trace, others, code, doubtful):
    more = [kernel("k", 200_000 + place, 1) for place in range(others)]
    tables = read_trace([*waiting_steps(), *more, call("cudaLaunchKernel", 40, 2, 900), kernel("k", 0, 0, correlation=900)])
    assert caveats(tables)[code].startswith("no time was recorded of 1 device events")
    assert (tables["device_events"].num_rows, tables.info.judged, bool(tables.info.doubts)) == (
        2 * STEPS + others,
        True,
        doubtful,
    )


def marked(*ranges):
    """Kernels of 15 ms of work, and iterations of these numbers, starts and lengths."""
    events = [event for event in waiting_steps() if event["cat"] != "user_annotation"]
    return [
        *events,
        *(complete("user_annotation", f"ProfilerStep#{number}", start, length) for number, start, length in ranges),
    ]


ITERATIONS = {
    "none has a length": ([(n, 1000 * n, 0) for n in range(5)], [], "iterations_unusable", "5 of 5 iterations"),
    "none has a length to speak of": ([(n, 1000 * n, 0.5) for n in range(5)], [], "iterations_unusable", "5 of 5 iterations"),
    "one has no length": ([(n, 1000 * n, 900 * (n != 2)) for n in range(5)], [0, 1, 3, 4], "iterations_unusable", "1 of 5"),
    "one overlaps the next": ([(0, 0, 900), (1, 1000, 1500), (2, 2000, 900)], [0, 1, 2], "iterations_overlap", "overlap"),
    "a number repeats": ([(0, 0, 900), (1, 1000, 900), (1, 2000, 900)], [0, 1], "iterations_repeated", "1 numbers of"),
    "whole": ([(n, 1000 * n, 900) for n in range(5)], [*range(5)], None, ""),
}  # fmt: skip


@pytest.mark.parametrize(("ranges", "numbers", "code", "part"), ITERATIONS.values(), ids=ITERATIONS)
def test_iterations_that_cannot_be_are_left_out_or_said(read_trace, read_report, ranges, numbers, code, part):
    for tables in (read_trace(marked(*ranges)), read_report(report_of(marked(*ranges)))):
        said = {each: text for each, text in caveats(tables).items() if each.startswith("iterations_")}
        assert tables["iterations"]["iteration"].to_pylist() == numbers
        assert ([*said], part in "".join(said.values())) == ([code] if code else [], True)
        assert bool(tables.info.doubts) == bool(code)


def opened(folder):
    return Run(folder, engine=Here(), parquet=folder / "tables")


def written(path, events, **keys):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, **keys}).encode()))


@pytest.mark.parametrize("us", [-50_000, 50_000])
def test_no_finding_is_sure_of_times_that_contradict_each_other(tmp_path, us):
    for rank in (0, 1):
        events = moved(us * rank, lambda event: event["cat"] == "kernel")
        written(tmp_path / f"rank-{rank}.json.gz", events, distributedInfo={"rank": rank, "world_size": 2})
    with opened(tmp_path) as run:
        assert {caveat.ranks for caveat in run.caveats if caveat.code == "device_clock_apart"} == {(1,)}
        assert run.findings
        for finding in run.findings:
            assert finding.confidence is Confidence.low
            assert finding.confidence_reason.endswith("the device's clock disagrees with the host's (rank 1)")


COPIES = {
    "named after ranks": (["rank-0.json.gz", "rank-1.json.gz"], {}, [0], (0, 1)),
    "of a trace that says its rank": (["rank-0.json.gz", "rank-1.json.gz"], {"distributedInfo": {"rank": 0}}, [0], ()),
    "two of three": (["rank-0.json.gz", "rank-2.json.gz"], {}, [0, 1], (0, 2)),
    "packed otherwise": (["rank-0.json.gz", "rank-1.json"], {}, [0], (0, 1)),
}


@pytest.mark.parametrize(("names", "keys", "ranks", "same"), COPIES.values(), ids=COPIES)
def test_one_content_under_the_names_of_two_ranks_is_one_rank(tmp_path, names, keys, ranks, same):
    written(tmp_path / names[0], waiting_steps(), **keys)
    content = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[1]).write_bytes(content if names[1].endswith(".gz") else gzip.decompress(content))
    if 1 in ranks:
        written(tmp_path / "rank-1.json.gz", moved(3), **keys)
    with opened(tmp_path) as run:
        said = {caveat.code: caveat for caveat in run.caveats}
        assert [info.rank for info in run.facts.every_info] == ranks
        assert "the same content" in said["same_content" if same else "several_captures_of_a_rank"].text
        assert said["same_content"].ranks == same if same else "same_content" not in said
        assert not same or Confidence.high not in {finding.confidence for finding in run.findings}


PACKINGS = ("zst", "lz4", "br", "7z", "tar", "Z", "gz.gpg")

UNREADABLE = {
    "quotes of Python": ("rank-1.pt.trace.json", b"{'traceEvents': [{'ph': 'X'}]}" + b" " * 300_000),
    "empty": ("rank-1.pt.trace.json.gz", b""),
    "a page of an error": ("rank-1.pt.trace.json", b"<html><body>502 Bad Gateway</body></html>"),
    "UTF-16": ("rank-1.pt.trace.json", '{"traceEvents": []}'.encode("utf-16")),
    "binary": ("rank-1.pt.trace.json", b"\x80\0\1" * 9),
    "zeros": ("rank-1.sqlite", bytes(512)),
    "an empty report": ("rank-1.nsys-rep", b""),
    "cut off": ("rank-1.pt.trace.json.xz", b"\xfd7zXZ\0\0\4"),
    **{f"packed as {end}": (f"rank-1.pt.trace.json.{end}", b"\x28\xb5\x2f\xfd junk") for end in PACKINGS},
    "an archive": ("rank-1.tar.gz", b"\x1f\x8b"),
    "a folder": ("rank-1.pt.trace.json.gz/nothing", b""),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_rank_that_cannot_be_read_is_named_and_the_others_are_answered(tmp_path, name, content):
    for rank in (0, 2):
        written(tmp_path / f"rank-{rank}.pt.trace.json.gz", moved(rank), distributedInfo={"rank": rank})
        (tmp_path / f"rank-{rank}.log").write_text("every rank has one")
    (tmp_path / "rank-1.log").write_text("every rank has one")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with opened(tmp_path) as run:
        assert run.facts.breakdown["rank"].to_pylist() == [0, 2]
        (error,) = run.facts.errors
        assert str(tmp_path / name.partition("/")[0]) in error
        assert ("UTF-16" in error) == content.startswith(b"\xff\xfe")
        assert [(caveat.ranks, caveat.file) for caveat in run.caveats if caveat.code == "rank_unreadable"] or "rank 1" in error


def test_a_folder_of_packed_captures_alone_names_one(tmp_path):
    (tmp_path / "rank-1.pt.trace.json.7z").write_bytes(b"7z")
    with pytest.raises(TraceError, match=r"rank-1\.pt\.trace\.json\.7z is of no known format"):
        Run(tmp_path)


def test_every_caveat_has_a_sentence_and_every_sentence_a_caveat():
    code = "".join(path.read_text() for path in Path(bridge_profiling.traces.__file__).parent.rglob("*.py"))
    keys = {key for key, text in texts("bridge_profiling.traces", "caveats.toml").items() if isinstance(text, str)}
    said = set(re.findall(r'(?:caveat|say)\(\s*"(\w+(?:\.\w+)?)"', code))
    assert said <= keys
    assert not [key for key in keys if f'"{key}"' not in code and not key.startswith("links_not_followed.")]
