"""The page's text: what stands on it without a browser. tests/system/test_page.py opens it in one."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.analysis.findings import Event
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.report.findings_view import Pictures
from bridge_profiling.report.run_view import NAMED_RANKS, ranks_to_show
from bridge_profiling.report.timeline import Timeline
from bridge_profiling.run import Run
from bridge_profiling.traces.types import RankInfo
from tests.analysis.simulated_runs import MS, SimulatedRun
from tests.cli.test_analyze import write
from tests.report.summaries import finding, row, summary
from tests.traces.kineto_files import call, complete, document, kernel, write_ranks_called

RunOf = Callable[..., Run]


def _data(text: str) -> dict[str, Any]:
    packed = re.search(r'id="packed-data">([^<]*)<', text)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def _page(run: Run, folder: Path) -> str:
    run.report(folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def _simulated(folder: Path, ranks: int, iterations: int = 4, **info: Any) -> Path:
    """Ranks in tensor-parallel pairs, of which the last is slow."""
    made = SimulatedRun(ranks)

    def step(_: int) -> None:
        for rank in range(ranks):
            made.compute(rank, (13 if rank == ranks - 1 else 10) * MS)
        for first in range(0, ranks, 2):
            made.meet([first, first + 1])
        made.meet(range(ranks), group="DP")

    made.iterate(iterations, step)
    made.write(folder, **info)
    return folder


def test_numbers_on_the_page_are_the_analysis(run_of: RunOf, captures: Path, tmp_path: Path) -> None:
    run = run_of(captures / "kineto" / "tp2_dp2")
    text = _page(run, tmp_path)
    figures = _data(text)["figures"]
    budget = {row["rank"]: row for row in run.attribution().to_pylist()}
    for trace in figures["budget"]["cause"]["data"]:
        if trace["name"] == "host launch delay":
            assert trace["x"] == [pytest.approx(budget[rank]["host_launch_us"] / 1e3, abs=1e-3) for rank in range(4)]
    kernels = run.kernels(by_rank=False).to_pylist()
    assert f">{kernels[0]['total_us'] / 1e3:,.2f}<" in text
    for found in run.findings():
        assert found.title.replace("'", "&#39;") in text
    (own,) = figures["iterations"]["own_us"]["data"]
    assert own["z"][3][1] == pytest.approx(249.0, abs=0.1)


def test_it_asks_no_network_for_anything(run_of: RunOf, captures: Path, tmp_path: Path) -> None:
    text = _page(run_of(captures / "kineto" / "pp2_dp2"), tmp_path)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert "default-src 'none'" in text
    assert "connect-src" not in text
    assert len(text) < 5_000_000


def test_names_of_kernels_ranges_and_files_are_text(run_of: RunOf, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>\u2028<img src=x onerror=alert(2)>"
    folder = tmp_path / "run <b>7"
    folder.mkdir()
    write_ranks_called(hostile, folder)
    text = _page(run_of(folder), tmp_path)
    assert text.count("<script") == text.count("</script>") == 3, "the data, Plotly, and the page's own"
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(2)&gt;" in text
    assert "<b>7" not in text
    assert hostile in _data(text)["timeline"]["names"]


def test_what_was_not_captured_is_said_in_place_of_an_empty_picture(run_of: RunOf, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank-0.json.gz", 0)
    text = _page(run_of(tmp_path / "run"), tmp_path)
    assert "Waiting between ranks needs captures of several ranks" in text
    assert "No communication was captured" in text
    assert "No memory was recorded" in text
    assert set(_data(text)["figures"]) >= {"budget", "iterations"}


def test_a_capture_without_iterations_has_a_page(run_of: RunOf, tmp_path: Path) -> None:
    events = [call("cudaLaunchKernel", 10, 2, 1), kernel("gemm", 100, 250, correlation=1)]
    (tmp_path / "run").mkdir()
    trace = document(events, distributedInfo={"rank": 0})
    (tmp_path / "run" / "rank-0.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    text = _page(run_of(tmp_path / "run"), tmp_path)
    assert "No iteration is marked in these captures" in text
    assert "capture" in _data(text)["timeline"]["pictures"]


def test_a_capture_with_nothing_to_draw_has_a_page(run_of: RunOf, tmp_path: Path) -> None:
    """What a loop of one's own leaves on a CPU that names no phases."""
    events = [complete("user_annotation", f"ProfilerStep#{step}", 1000 * step, 900) for step in (4, 5)]
    events += [complete("cpu_op", "aten::mm", 1000 * step + 100, 500) for step in (4, 5)]
    (tmp_path / "run").mkdir()
    trace = document(events, distributedInfo={"rank": 0})
    (tmp_path / "run" / "rank-0.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    text = _page(run_of(tmp_path / "run"), tmp_path)
    assert "No device work to draw was captured" in text
    assert _data(text)["timeline"] is None


def test_a_capture_that_cannot_be_read_is_named(run_of: RunOf, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank-0.json.gz", 0)
    write(tmp_path / "run" / "rank-1.json.gz", 1, cut=60)
    text = _page(run_of(tmp_path / "run"), tmp_path)
    assert "Captures that could not be read" in text
    assert "rank-1.json.gz" in text


def test_a_page_of_memory_alone_names_no_profiler_of_time(run_of: RunOf, captures: Path, tmp_path: Path) -> None:
    text = _page(run_of(captures / "memory" / "tp2_dp2"), tmp_path)
    facts = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text)
    assert facts[:2] == [("ranks", "1"), ("captured by", "memory snapshot")]
    assert "These captures hold memory only." in text


def test_ranks_in_a_picture_have_the_median_of_the_table(run_of: RunOf, tmp_path: Path) -> None:
    """Of an even number of iterations it is the mean of the middle two, so that rank 1 is the slower one here."""
    rows = [
        {"rank": rank, "compute_us": value * 1_000.0, "own_us": 0.0}
        for rank, values in ((0, (1, 9)), (1, (6, 6)))
        for value in values
    ]
    pictures = Pictures(summary([row(0), row(1)]), rows, [], [], [], Timeline({}, {}, None, {}, 0), {})
    drawn = pictures.of(finding(id="straggler_compute", ranks=[1]))
    assert drawn is not None
    assert drawn[0]["data"][0]["x"] == [5.0, 6.0]


@pytest.mark.system
def test_hundreds_of_ranks_are_aggregated_and_the_slow_one_has_a_row(run_of: RunOf, tmp_path: Path) -> None:
    folder = _simulated(tmp_path / "run", 96, coordinates=None, world_size=96)
    text = _page(run_of(folder), tmp_path)
    data = _data(text)
    bars = data["figures"]["budget"]["cause"]["data"][0]["y"]
    assert bars[0] == "all ranks, mean of 96"
    assert len(bars) == 1 + NAMED_RANKS
    assert any(label.startswith("rank 95") for label in bars)
    assert len(data["timeline"]["pictures"]["10"]) == NAMED_RANKS
    assert "5% of ranks below" in text
    assert len(data["figures"]["waits"]["waits"]["data"][0]["x"]) == 32
    assert re.search(r"The 32 ranks of 96 that wait", text)


def test_few_ranks_all_have_rows() -> None:
    infos = [RankInfo(rank=rank, rank_source="trace", source="kineto", files=[]) for rank in range(64)]
    assert ranks_to_show(summary([], infos=infos)) == list(range(64))


def test_of_many_ranks_the_blamed_the_slow_and_one_of_each_stage_are_shown() -> None:
    infos = [
        RankInfo(rank=rank, rank_source="trace", source="kineto", files=[], coordinates={"pp": (rank // 256, 4)})
        for rank in range(1024)
    ]
    stragglers = [{"rank": rank} for rank in (700, 701, *(each for each in range(1024) if each not in (700, 701)))]
    found = ranks_to_show(
        summary([], [finding(ranks=[333]), finding(ranks=list(range(1024)))], infos=infos, stragglers=stragglers)
    )
    assert {333, 700, 701, 0, 256, 512, 768} <= set(found)
    assert len(found) == NAMED_RANKS


def test_events_of_findings_lead_to_the_timeline(
    run_of: RunOf, captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(captures / "kineto" / "pp2_dp2")
    start = next(row for row in run.iterations().to_pylist() if row["rank"] == 2 and row["iteration"] == 10)["start_ns"]
    event = Event(2, "dataloader", 10, start + 30 * MS, 5_000.0)
    monkeypatch.setattr(run, "findings", lambda thresholds=None: [finding(ranks=[2], events=[event])])
    text = _page(run, tmp_path)
    (place,) = re.findall(r'data-rank="2" data-iteration="10" data-start="([\d.]+)" data-end="([\d.]+)"', text)
    assert float(place[1]) - float(place[0]) == pytest.approx(5)
    assert 29 < float(place[0]) < 32
    picture = _data(text)["figures"]["finding-1"]["finding"]
    (mark,) = (trace for trace in picture["data"] if trace.get("meta") == "highlight")
    assert mark["text"][0] == "dataloader"
    first, last = picture["layout"]["xaxis"]["range"]
    assert first <= mark["x"][0] <= last


def test_a_page_that_cannot_be_written_says_what_to_type(run_of: RunOf, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank-0.json.gz", 0)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ProfilingConfigError, match="Name another file with -o"):
        run_of(tmp_path / "run").report(tmp_path / "report.html")
    assert not list(tmp_path.glob(".report.html*"))
