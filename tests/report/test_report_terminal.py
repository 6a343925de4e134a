"""The answer on the terminal: one screen with bars, plain lines in a pipe."""

from tests.report.summaries import MS, finding, printed, row, summary

TERMINAL = {"force_terminal": True, "color_system": "truecolor"}


def test_piped_it_is_plain_lines_that_are_never_wrapped_with_every_finding():
    rows = [row(0, data_loading_us=30 * MS), row(1, data_loading_us=30 * MS)]
    more = [finding(id="host_sync", title=f"The host synchronises [red] {place}") for place in range(2, 21)]
    text = printed(summary(rows, [finding(), *more]))
    assert not {"\x1b", "█"} & set(text)
    lines = text.splitlines()
    assert lines[0] == f"{finding().title}."
    assert lines[1] == "An iteration takes 100 ms (median of 10 on 2 ranks)."
    assert [line.split() for line in lines if line.startswith("rank 0")] == [["rank", "0", "100.00", "70.00", "30.00"]]
    assert any(line.startswith("1. data_loading: Data loading holds") for line in lines)
    assert "20. host_sync: The host synchronises [red] 20" in text  # markup in a title is text


def test_a_terminal_shows_bars_as_long_as_their_iterations():
    text = printed(summary([row(0, duration_us=50 * MS), row(1, duration_us=100 * MS)]), width=100, **TERMINAL)
    assert [line.count("█") for line in text.splitlines() if "rank" in line and "█" in line] == [20, 40]


def test_it_fits_one_screen_however_many_ranks_and_findings():
    rows = [row(rank, data_loading_us=30 * MS) for rank in range(1024)]
    many = summary(rows, [finding(ranks=[rank], id="straggler_host") for rank in range(20)])
    text = printed(many, width=120, **TERMINAL)
    assert len(text.splitlines()) <= 50
    assert "all ranks, mean of 1024" in text
    assert "14 more findings are on the page" in text


def test_advice_is_never_cut():
    """What to do first is a whole sentence, on a terminal too, however long it is."""
    advice = "Set " + ", ".join(f"setting_{number}=true" for number in range(30)) + "."
    found = summary([row(0)], [finding(ranks=[0], action=f"{advice} Then look at the disks.")])
    text = printed(found, force_terminal=True, color_system=None)
    assert " ".join(text.split()).count(advice) == 2, "in the verdict and with the finding"
    assert "…" not in text
