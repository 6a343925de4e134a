"""A rule that is not ours is judged like any other, and its finding appears wherever findings do."""

import io
import json

from rich.console import Console

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings import RULES, Evidence, Occurrence, Rule, bounds
from bridge_profiling.report.run_view import screen_view
from bridge_profiling.report.terminal import print_report
from bridge_profiling.run import Run


def stalled(grids, thresholds, ledger):
    """Devices idle between kernels that are launched in time."""
    cause = Cause.dependency_stalled
    saving_ns = ledger.attribute(ledger.left_ns(cause), (cause,))
    if grids.share(saving_ns) > 0:
        struck = Occurrence(tuple(grids.numbers[:1]), len(grids.numbers), saving_ns * len(grids.numbers))
        measures = {"stalled_ns": grids.mean_ns(grids.idle_ns(cause))}
        yield Evidence(ranks=grids.ranks, measures=measures, saving_ns=saving_ns, occurrence=struck)


STALLED = Rule(
    "stalled",
    stalled,
    bounds.launching,
    texts={"title": "{Ranks} stall for {cost}", "default": "Merge kernels that depend on each other."},
)


def test_a_rule_from_outside_appears_on_the_page_in_the_terminal_and_in_json(captures, tmp_path):
    run = Run(captures / "kineto" / "tp2_dp2", parquet=tmp_path / "tables", rules=(STALLED, *RULES))
    (found,) = (each for each in run.findings if each.id == "stalled")
    assert found.title.startswith("All 4 ranks stall for ")
    assert 0 < found.recoverable_ns_per_iteration <= found.at_most_ns_per_iteration
    (row,) = (each for each in json.loads(run.to_json())["findings"] if each["id"] == "stalled")
    assert (row["title"], row["action"]) == (found.title, "Merge kernels that depend on each other.")
    assert found.title in run.report(tmp_path / "report.html").read_text(encoding="utf-8")
    console = Console(file=io.StringIO(), width=200)
    print_report(screen_view(run.facts, run.conclusion), console)
    assert found.title in console.file.getvalue()
