"""Figures: Plotly's own JSON, with what cannot be read put together rather than drawn unreadably; and a run in a notebook."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from bridge_profiling.analysis.compare.statistics import Change
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.report.figures import (
    COLORS,
    MOST_RANKS,
    MOST_ROWS,
    PARTS,
    attribution_figure,
    by_group,
    change_figure,
    communication_figure,
    iterations_figure,
    wait_matrix,
    waits_figure,
)
from bridge_profiling.report.notebook import FIGURES, table_html
from bridge_profiling.run import Run
from tests.report.summaries import MS, row


def test_a_part_has_the_same_colour_in_every_figure() -> None:
    rows = [row(0, communication_us=20 * MS, waiting_us=10 * MS)]
    colours = {trace["name"]: trace["marker"]["color"] for trace in attribution_figure(rows)["data"]}
    assert colours == {PARTS[f"{part}_us"][0]: COLORS[part] for part in ("compute", "communication", "waiting")}
    bars = communication_figure([{"label": "x", "transfer_us": 1.0, "wait_us": 2.0}])["data"]
    assert [bar["marker"]["color"] for bar in bars] == [COLORS["communication"], COLORS["waiting"]]


def test_bars_of_the_budget_add_up_to_the_iteration() -> None:
    rows = [row(0, duration_us=80 * MS, data_loading_us=30 * MS), row(1, data_loading_us=10 * MS)]
    drawn = attribution_figure(rows)["data"]
    assert [sum(values) for values in zip(*(trace["x"] for trace in drawn), strict=True)] == [80.0, 100.0]


def test_many_ranks_share_rows_of_the_heat_map_which_name_the_highest() -> None:
    rows = [{"rank": rank, "iteration": 5, "own_us": 1000.0 + (rank == 777) * 500} for rank in range(1024)]
    (trace,) = iterations_figure(rows)["data"]
    assert len(trace["y"]) == MOST_ROWS
    place = trace["y"].index("ranks 776-779")
    assert (trace["z"][place], trace["text"][place]) == ([1.5], ["rank 777"])
    assert iterations_figure(rows)["layout"]["height"] <= 900


def test_a_rank_that_missed_an_iteration_has_a_hole() -> None:
    rows = [{"rank": 0, "iteration": 5, "own_us": 1.0}, {"rank": 0, "iteration": 6, "own_us": 1.0}]
    (trace,) = iterations_figure([*rows, {"rank": 1, "iteration": 6, "own_us": None}])["data"]
    assert trace["z"][1] == [None, None]


def test_the_wait_matrix_keeps_the_ranks_that_matter_and_says_how_much_that_is() -> None:
    waits = [{"rank": rank, "waits_for": 500, "wait_us": 10.0} for rank in range(100)]
    waits += [{"rank": 900, "waits_for": 901, "wait_us": 5_000.0}]
    found = wait_matrix(waits, iterations=2, everyone=range(1024))
    assert len(found.ranks) == MOST_RANKS
    assert {500, 900, 901} <= set(found.ranks)
    assert found.wait_us[found.ranks.index(900)][found.ranks.index(901)] == 2_500
    assert 0.85 < found.shown < 1
    assert waits_figure(found)["layout"]["height"] < 900


def _group(number: int, **known: Any) -> dict[str, Any]:
    return {
        "operation": "all_reduce",
        "group": "TENSOR_MODEL_PARALLEL_GROUP",
        "group_name": str(number),
        "group_ranks": f"[{2 * number},{2 * number + 1}]",
        "group_size": 2,
        "captured_ranks": 2,
        "count": 8,
        "bytes": 800,
        "transfer_us": 40.0,
        "wait_us": 20.0,
        "algorithm_bandwidth_gbs": 100.0 + number,
        "bus_bandwidth_gbs": 100.0 + number,
        **known,
    }


def test_communication_is_of_one_iteration_and_the_waiting_of_one_rank() -> None:
    (found,) = by_group([_group(0)], iterations=2)
    assert (found["count"], found["bytes"], found["transfer_us"], found["wait_us"]) == (4, 400, 20, 5)
    assert found["label"] == "all_reduce · tensor model parallel [0, 1]"


def test_hundreds_of_groups_of_one_name_are_one_row() -> None:
    (found,) = by_group([_group(number) for number in range(512)], iterations=2)
    assert (found["count"], found["transfer_us"], found["wait_us"]) == (4, 20, 5)
    assert found["bus_bandwidth_gbs"] == 355.5
    assert found["ranks"] == "512 groups of 2"


def test_communication_whose_transfer_is_unknown_has_no_bar() -> None:
    rows = by_group([_group(0, transfer_us=None, wait_us=None, bus_bandwidth_gbs=None)], iterations=1)
    assert communication_figure(rows)["data"][0]["y"] == []


def test_every_answer_shows_as_a_plotly_figure(run_of, captures: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    run: Run = run_of(captures / "kineto" / "pp2_dp2")
    for name in set(FIGURES) - {"memory", "timeline"}:
        # Plotly checks every property's name and type.
        assert isinstance(run.figure(name), graph_objects.Figure)
    timeline = run.figure("timeline", iteration=10, ranks=[2])
    assert "stream 7" in timeline.layout.yaxis.ticktext
    with pytest.raises(ProfilingConfigError, match="iteration 99 was not captured"):
        run.figure("timeline", iteration=99)
    with pytest.raises(ProfilingConfigError, match="Type one of attribution"):
        run.figure("pie")
    with pytest.raises(ProfilingConfigError, match="no memory"):
        run.figure("memory")


def test_memory_is_drawn_by_site_whose_areas_are_what_was_allocated(run_of, captures: Path) -> None:
    pytest.importorskip("plotly.graph_objects")
    run: Run = run_of(captures / "memory" / "tp2_dp2")
    drawn = run.figure("memory")
    areas = [trace for trace in drawn.data if trace.stackgroup]
    top = max(sum(values) for values in zip(*(trace.y for trace in areas), strict=True))
    assert top * 2**20 == pytest.approx(run.memory().to_pylist()[0]["peak_bytes"], rel=1e-4)
    assert any("/core/optimizer/" in trace.name for trace in areas)


def test_a_waterfall_shows_small_changes() -> None:
    """From zero, a change of 1% would be invisible."""
    parts = {"compute_us": _change(900.0, 905.0), "idle_us": _change(100.0, 105.0)}
    drawn = change_figure(parts, _change(1000.0, 1010.0), ("base", "other"), {"compute_us": "compute", "idle_us": "idle"})
    low, high = drawn["layout"]["xaxis"]["range"]
    assert 0.97 < low < 1.0
    assert 1.01 < high < 1.03
    (trace,) = drawn["data"]
    assert trace["x"] == [1.0, 0.005, 0.005, 1.01]


def _change(base: float, other: float) -> Change:
    return Change(base, other)


def test_names_in_a_notebooks_table_are_text() -> None:
    table = pa.table({"name": ["<script>alert(1)</script>"] * 30, "own_us": [1234.5] * 30})
    text = table_html(table)
    assert "<script>" not in text
    assert "1,234.50" in text
    assert "… 10 more rows" in text


def test_a_notebook_that_imports_run_shows_tables_as_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    class Formatter:
        type_printers: dict[type, Any] = {}

        def for_type(self, kind: type, show: Any) -> None:
            self.type_printers[kind] = show

    formatter = Formatter()
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.delitem(sys.modules, "bridge_profiling.run")
    importlib.import_module("bridge_profiling.run")
    assert formatter.type_printers == {pa.Table: table_html}
