"""The page's text: what stands on it without a browser. tests/system/test_page.py opens it in one."""

import base64
import gzip
import html
import json
import re

import pytest

from bridge_profiling.report.answers import NAMED_RANKS, ranks_to_show
from bridge_profiling.report.findings_view import Pictures
from bridge_profiling.report.timeline import Timeline
from bridge_profiling.traces.types import RankInfo
from tests.report.known import Known, finding, row
from tests.traces.kineto_files import call, kernel, write_ranks_called


def _page(run, folder):
    """A run's page, and the data in it."""
    text = run.report(folder / "report.html").read_text(encoding="utf-8")
    (packed,) = re.findall(r'id="packed-data">([^<]*)<', text)
    return text, json.loads(gzip.decompress(base64.b64decode(packed)))


def test_numbers_on_the_page_are_the_analysis_and_it_asks_no_network_for_anything(real, tmp_path):
    run = real("kineto/tp2_dp2")
    text, data = _page(run, tmp_path)
    budget = {row["rank"]: row["host_launch_ns"] / 1e6 for row in run.facts.attribution.to_pylist()}
    (delays,) = (each for each in data["figures"]["budget"]["by cause"]["data"] if each["name"] == "host launch delay")
    assert delays["x"] == [pytest.approx(budget[rank], abs=1e-3) for rank in range(4)]
    assert all(found.title.replace("'", "&#39;") in text for found in run.findings)
    (own,) = data["figures"]["iterations"]["own time: the iteration without waiting for other ranks"]["data"]
    assert own["z"][3][1] == pytest.approx(249.0, abs=0.1)
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


def test_ranks_in_a_picture_have_the_median_of_the_table():
    """Of an even number of iterations it is the mean of the middle two, so that rank 1 is the slower one here."""
    values = [(0, 1), (0, 9), (1, 6), (1, 6)]
    rows = [{"rank": rank, "compute_ns": value * 1_000_000, "own_ns": 0} for rank, value in values]
    run = Known([row(0), row(1)], ranks=rows)
    pictures = Pictures(run, run.conclusion, Timeline({}, {}, None, {}, 0))
    drawn = pictures.of(finding(id="straggler_compute", ranks=[1]))
    assert drawn is not None
    assert drawn[0]["data"][0]["x"] == [5.0, 6.0]


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
