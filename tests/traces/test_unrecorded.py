"""What a capture does not show, or shows with impossible times, is not idle: by both readers."""

import pytest

from bridge_profiling.run import Run
from tests.facts.ranks_in_hand import answer
from tests.traces.conftest import caveats, values
from tests.traces.kineto_files import call, kernel, steps
from tests.traces.test_consistency import STEPS, moved, report_of, waiting_steps

LAUNCHES = 50


def launched(*recorded):
    """Iterations of 50 launches, of which so many have a kernel."""
    events = steps(*[None] * len(recorded))
    for place, count in enumerate(recorded):
        for number in range(LAUNCHES):
            begin, correlation = 1000 * place + 10 * number, 1 + LAUNCHES * place + number
            events.append(call("cudaLaunchKernel", begin + 5, 2, correlation))
            if number < count:
                events.append(kernel("my_gemm_kernel", begin + 8, 8, correlation=correlation))
    return events


GRAPHED = [
    call("cudaStreamBeginCapture_v10000", 1, 1, 900),
    *(call("cudaLaunchKernel", 2 + number / 100, 0.005, 901 + number) for number in range(LAUNCHES)),
    call("cudaStreamEndCapture", 4, 1, 999),
]


@pytest.mark.parametrize("of", ["kineto", "nsys"])
@pytest.mark.parametrize(
    ("events", "numbers", "said", "judged"),
    [
        (launched(50, 50, 50), [0, 1, 2], None, True),
        (launched(0, 30, 50, 50), [2, 3], "iterations 0-1 are left out: 70 of the 100 kernels", True),
        (launched(50, 50, 0), [0, 1], "iterations 2 are left out: 50 of the 50 kernels", True),
        # None is whole: nothing can be said about the device.
        (launched(0, 0), [0, 1], None, False),
        (launched(40, 40), [0, 1], None, False),
        # Launches that a stream captures into a graph do not run.
        (launched(50, 50) + GRAPHED, [0, 1], None, True),
    ],
    ids=["all", "at first none", "at last none", "none", "too few everywhere", "captured into a graph"],
)
def test_iterations_with_unrecorded_kernels_are_left_out(read_trace, read_report, of, events, numbers, said, judged):
    tables = read_trace(events) if of == "kineto" else read_report(report_of(events))
    assert values(tables["iterations"], "iteration") == numbers
    assert caveats(tables).get("kernels_unrecorded", "")[: len(said or "")] == (said or "")
    assert tables.info.judged == judged


def test_a_rank_whose_kernels_were_not_recorded_is_no_training_on_cpus(write_trace):
    with Run(write_trace(launched(0, 0, 0))) as run:
        assert run.verdict.headline == "These captures lost too much of their device work to judge."
        assert "of 150 kernels and copies, 150 were launched and not recorded" in " ".join(run.verdict.caveats)
        assert run.findings == []
        assert run.conclusion.on_cpus == []


@pytest.mark.parametrize("of", ["kineto", "nsys"])
@pytest.mark.parametrize(
    ("stream", "duration_ns"), [(9, 10_000), (11, 0)], ids=["until the next of its stream", "its start alone"]
)
def test_an_end_long_after_everything_else_does_not_count(read_trace, read_report, of, stream, duration_ns):
    wrong = [call("cudaLaunchKernel", 35, 2, 900), kernel("k", 595, 5e6, correlation=900, stream=stream)]
    tables = read_trace(waiting_steps() + wrong) if of == "kineto" else read_report(report_of(waiting_steps() + wrong))
    events = dict(
        zip(values(tables["device_events"], "name"), values(tables["device_events"], "start_ns", "end_ns"), strict=True)
    )
    assert events["k"][1] - events["k"][0] == duration_ns
    assert "device_event_too_long" in caveats(tables)


@pytest.mark.parametrize("of", ["kineto", "nsys"])
def test_no_launch_is_judged_where_the_clocks_disagree(read_trace, read_report, of):
    tables = read_trace(moved(-4000)) if of == "kineto" else read_report(report_of(moved(-4000)))
    assert tables["device_events"]["launch_start_ns"].null_count == 2 * STEPS
    assert answer(tables, "iterations")["launch_starved_ns"].to_pylist() == [0] * STEPS
