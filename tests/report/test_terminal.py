"""What a terminal shows: the first screen after a profile, and the answer, one screen with bars or plain lines in a pipe."""

import pytest
from rich.console import Console

from bridge_profiling.manifest import find_captures
from bridge_profiling.report.terminal import print_captures
from tests.report.known import MS, Known, finding, printed, row
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

    def printed(**durations):
        recorded = {"iteration": [0, 4], "duration_ns": [1, 90_000_000]} | durations
        write_capture(tmp_path, events, range(4, 5), durations_ns=recorded)
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


TERMINAL = {"force_terminal": True, "color_system": "truecolor"}


def test_piped_it_is_plain_lines_that_are_never_wrapped_with_every_finding():
    rows = [row(0, data_loading_ns=30 * MS), row(1, data_loading_ns=30 * MS)]
    more = [finding(id="host_sync", title=f"The host synchronises [red] {place}") for place in range(2, 21)]
    text = printed(Known(rows, [finding(), *more]))
    assert not {"\x1b", "█"} & set(text)
    lines = text.splitlines()
    assert lines[:2] == [f"{finding().title}.", "An iteration takes 100 ms (median of 10 on 2 ranks)."]
    assert [line.split() for line in lines if line.startswith("rank 0")] == [["rank", "0", "100.00", "70.00", "30.00"]]
    assert any(line.startswith("1. data_loading: Data loading holds") for line in lines)
    assert "20. host_sync: The host synchronises [red] 20" in text  # markup in a title is text


def test_a_terminal_shows_bars_as_long_as_their_iterations():
    text = printed(Known([row(0, duration_ns=50 * MS), row(1, duration_ns=100 * MS)]), width=100, **TERMINAL)
    assert [line.count("█") for line in text.splitlines() if "rank" in line and "█" in line] == [20, 40]


def test_it_fits_one_screen_however_many_ranks_and_findings():
    rows = [row(rank, data_loading_ns=30 * MS) for rank in range(1024)]
    many = Known(rows, [finding(ranks=[rank], id="straggler_host") for rank in range(20)])
    text = printed(many, width=120, **TERMINAL)
    assert len(text.splitlines()) <= 60  # with the checklist
    assert "all ranks, mean of 1024" in text
    assert "14 more findings are on the page" in text


def test_advice_is_never_cut():
    """What to do first is a whole sentence, on a terminal too, however long it is."""
    advice = "Set " + ", ".join(f"setting_{number}=true" for number in range(30)) + "."
    found = Known([row(0)], [finding(ranks=[0], action=f"{advice} Then look at the disks.")])
    text = printed(found, force_terminal=True, color_system=None)
    assert " ".join(text.split()).count(advice) == 2, "in the verdict and with the finding"
    assert "…" not in text
