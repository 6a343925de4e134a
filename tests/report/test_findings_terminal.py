"""The answer on the terminal: one screen with bars, plain lines in a pipe."""

from __future__ import annotations

import io

from rich.console import Console

from bridge_profiling.report.answers import Summary
from bridge_profiling.report.findings_terminal import print_verdict
from tests.report.summaries import MS, finding, row, summary


def _printed(found: Summary, **options: object) -> str:
    out = io.StringIO()
    print_verdict(found, Console(file=out, highlight=False, **options))  # type: ignore[arg-type]
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
    assert lines[1].startswith("An iteration takes 100 ms")
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
    assert any("and 14 more: the page has them" in line for line in lines)


def test_a_pipe_gets_every_finding() -> None:
    many = summary([row(0)], [finding(ranks=[0], title=f"Cause {place}") for place in range(20)])
    assert "20. data_loading: Cause 19" in _printed(many, width=80)
