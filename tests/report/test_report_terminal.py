"""The answer on the terminal: one screen with bars, plain lines in a pipe."""

from __future__ import annotations

import io

from rich.console import Console

from bridge_profiling.report.run_view import summary_view
from bridge_profiling.report.terminal import print_report
from bridge_profiling.report.verdict import Summary
from tests.report.summaries import MS, finding, row, summary


def _printed(found: Summary, **options: object) -> str:
    out = io.StringIO()
    print_report(summary_view(found), Console(file=out, highlight=False, **options))  # type: ignore[arg-type]
    return out.getvalue()


def _two_ranks() -> Summary:
    rows = [row(0, data_loading_us=30 * MS), row(1, data_loading_us=30 * MS)]
    return summary(rows, [finding(), finding(id="host_sync", title="The host synchronises [red]")])


def test_piped_it_is_plain_lines_that_are_never_wrapped() -> None:
    text = _printed(_two_ranks(), width=80)
    assert "\x1b" not in text
    assert "█" not in text
    lines = text.splitlines()
    assert lines[0] == "Data loading holds all ranks for 30 ms of each iteration."
    assert lines[1] == "An iteration takes 100 ms (median of 10 on 2 ranks)."
    (numbers,) = (line for line in lines if line.startswith("rank 0"))
    assert numbers.split() == ["rank", "0", "100.00", "70.00", "30.00"]
    assert any(line.startswith("1. data_loading: Data loading holds") for line in lines)
    assert any("The host synchronises [red]" in line for line in lines), "markup in a title is text"


def test_a_terminal_shows_bars_as_long_as_their_iterations() -> None:
    rows = [row(0, duration_us=50 * MS), row(1, duration_us=100 * MS)]
    text = _printed(summary(rows), width=100, force_terminal=True, color_system="truecolor")
    short, long = (line.count("█") for line in text.splitlines() if "rank" in line and "█" in line)
    assert (short, long) == (20, 40)


def test_it_fits_one_screen_however_many_ranks_and_findings() -> None:
    rows = [row(rank, data_loading_us=30 * MS) for rank in range(1024)]
    many = summary(rows, [finding(ranks=[rank], id="straggler_host") for rank in range(20)])
    lines = _printed(many, width=120, force_terminal=True, color_system="truecolor").splitlines()
    assert len(lines) <= 50
    assert any("all ranks, mean of 1024" in line for line in lines)
    assert any("14 more findings are on the page" in line for line in lines)


def test_a_pipe_gets_every_finding() -> None:
    many = summary([row(0)], [finding(ranks=[0], title=f"Cause {place}") for place in range(20)])
    assert "20. data_loading: Cause 19" in _printed(many, width=80)


def test_advice_is_never_cut() -> None:
    """What to do first is a whole sentence, on a terminal too, however long it is."""
    advice = "Set " + ", ".join(f"setting_{number}=true" for number in range(30)) + "."
    found = summary([row(0)], [finding(ranks=[0], action=f"{advice} Then look at the disks.")])
    text = _printed(found, width=80, force_terminal=True, color_system=None)
    assert " ".join(text.split()).count(advice) == 2, "in the verdict and with the finding"
    assert "…" not in text
