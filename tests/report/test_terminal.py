"""The first screen after a profile: what each rank captured, and which operators took the host's time."""

import pytest
from rich.console import Console

from bridge_profiling.manifest import find_captures
from bridge_profiling.report.terminal import print_captures
from tests.traces.kineto_files import complete, write_capture


@pytest.fixture
def screen(tmp_path):
    """The screen for an output directory of one rank, with operators that nest, and durations of iterations in its manifest."""
    events = [
        complete("cpu_op", "aten::linear", 0, 9000),
        complete("cpu_op", "aten::addmm", 1000, 6000),
        complete("cpu_op", "aten::addmm", 20000, 2000, tid=2),
        complete("user_annotation", "ProfilerStep#4", 0, 90000),
    ]

    def printed(damage=False, **durations):
        recorded = {"iteration": [0, 4], "duration_ns": [1, 90_000_000]} | durations
        trace = write_capture(tmp_path, events, range(4, 5), durations_ns=recorded)
        if damage:
            trace.write_bytes(b"")
        console = Console(record=True, width=300)
        print_captures(find_captures(tmp_path), console)
        return console.export_text()

    return printed


def test_operators_are_shown_by_the_time_that_is_their_own(screen):
    lines = [line.replace("│", "").split() for line in screen().splitlines() if "aten::" in line]
    assert lines == [["0", "8.00", "ms", "2", "aten::addmm"], ["0", "3.00", "ms", "1", "aten::linear"]]


@pytest.mark.parametrize(("mfu", "shown"), [([0.1, 0.4, 0.5, 0.2, 0.41], True), (None, False)])
def test_mfu_is_shown_where_it_is_known_and_nothing_where_it_is_not(screen, mfu, shown):
    text = screen(iteration=[0, 1, 2, 4, 7], duration_ns=[9, 2, 2, 4, 2], mfu=mfu)
    # The profiled iteration, and the median of the others but the run's first: the profiler's own cost is no share.
    assert ["MFU" in text, "20.0%" in text, "41.0%" in text] == [shown] * 3


def test_a_damaged_trace_is_named_with_its_rank(screen):
    assert "is empty: it holds no trace" in screen(damage=True)
