"""The page's text: what stands on it without a browser, also of a rule from outside. system/test_page.py opens it in one."""

import base64
import gzip
import html
import io
import json
import re

import pytest
from rich.console import Console

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings import RULES, Evidence, Occurrence, Rule, bounds
from bridge_profiling.report.answers import NAMED_RANKS, ranks_to_show
from bridge_profiling.report.run_view import screen_view
from bridge_profiling.report.terminal import print_report
from bridge_profiling.run import Run
from bridge_profiling.traces.types import RankInfo
from tests.findings.simulated_jobs import Here
from tests.planted.cases import CASES
from tests.report.known import Known, finding
from tests.traces.kineto_files import call, kernel, write_ranks_called


def _page(run, folder):
    """A run's page, and the data in it."""
    text = run.report(folder / "report.html").read_text(encoding="utf-8")
    (packed,) = re.findall(r'id="packed-data">([^<]*)<', text)
    return text, json.loads(gzip.decompress(base64.b64decode(packed)))


def test_numbers_on_the_page_are_the_analysis_and_it_asks_no_network_for_anything(planted, tmp_path):
    run = planted("straggler_compute_4")
    text, data = _page(run, tmp_path)
    budget = {row["rank"]: row["host_launch_ns"] / 1e6 for row in run.facts.attribution.to_pylist()}
    (delays,) = (each for each in data["figures"]["budget"]["by cause"]["data"] if each["name"] == "host launch delay")
    assert delays["x"] == [pytest.approx(budget[rank], abs=1e-3) for rank in range(4)]
    assert all(found.title.replace("'", "&#39;") in text for found in run.findings)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert ("default-src 'none'" in text, "connect-src" in text, len(text) < 5_000_000) == (True, False, True)


def test_the_python_line_of_each_table_returns_its_rows(made, tmp_path):
    text, _ = _page(made(ranks=2), tmp_path)
    lines = [html.unescape(line) for line in re.findall(r'data-copy="(from [^"]*)"', text)]
    assert len(lines) == text.count("<table") >= 8, "a line for each table"
    for line in lines:
        imported, _, expression = line.partition("; ")
        names = {}
        exec(imported, names)
        assert len(eval(expression, names)), line


def test_names_of_kernels_ranges_and_files_are_text(run_of, tmp_path):
    hostile = "</script><script>alert(1)</script>\u2028<img src=x onerror=alert(2)>"
    folder = tmp_path / "run <b>7"
    folder.mkdir()
    write_ranks_called(hostile, folder)
    text, data = _page(run_of(folder), tmp_path)
    assert text.count("<script") == text.count("</script>") == 3, "the data, Plotly, and the page's own"
    assert not [each for each in ("<img", "<b>7") if each in text]
    assert "&lt;img src=x onerror=alert(2)&gt;" in text
    assert hostile in data["timeline"]["names"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (None, ["No waiting between ranks was found", "No communication on a device", "No memory was recorded"]),
        ([call("cudaLaunchKernel", 10, 2, 1), kernel("gemm", 100, 250, correlation=1)], ["needs marked iterations"]),
    ],
)
def test_a_page_says_what_was_not_captured_in_place_of_an_empty_picture(made, tmp_path, events, said):
    text, _ = _page(made(events=events), tmp_path)
    assert [each for each in said if each not in text] == []


def test_few_ranks_all_have_rows_and_of_many_the_slow_and_one_of_each_stage():
    shared = {"rank_source": "trace", "source": "kineto", "files": []}
    infos = [RankInfo(rank=rank, coordinates={"pp": (rank // 256, 4)}, **shared) for rank in range(1024)]
    few = Known([], infos=infos[:64])
    assert ranks_to_show(few, few.conclusion) == list(range(64))
    stragglers = [{"rank": rank} for rank in sorted(range(1024), key=lambda rank: rank not in (700, 701))]
    findings = [finding(ranks=[333]), finding(ranks=list(range(1024)))]
    many = Known([], findings, infos=infos, stragglers=stragglers)
    found = ranks_to_show(many, many.conclusion)
    assert {333, 700, 701, 0, 256, 512, 768} <= set(found)
    assert len(found) == NAMED_RANKS


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


def test_a_rule_from_outside_appears_on_the_page_in_the_terminal_and_in_json(tmp_path):
    run = Run(CASES["data_loading_2"].folder, engine=Here(), parquet=tmp_path / "tables", rules=(STALLED, *RULES))
    (found,) = (each for each in run.findings if each.id == "stalled")
    assert found.title.startswith("Both ranks stall for ")
    assert 0 < found.recoverable_ns_per_iteration <= found.at_most_ns_per_iteration
    (row,) = (each for each in json.loads(run.to_json())["findings"] if each["id"] == "stalled")
    assert (row["title"], row["action"]) == (found.title, "Merge kernels that depend on each other.")
    assert found.title in run.report(tmp_path / "report.html").read_text(encoding="utf-8")
    console = Console(file=io.StringIO(), width=200)
    print_report(screen_view(run.facts, run.conclusion), console)
    assert found.title in console.file.getvalue()
