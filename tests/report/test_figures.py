"""Figures: Plotly's own JSON, aggregated where it would be unreadable; and a run in a notebook."""

import json
import re
from pathlib import Path

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.report import figures, rows
from bridge_profiling.report.notebook import FIGURES
from tests.planted.cases import CASES
from tests.report.known import MS, row


def test_bars_of_the_budget_add_up_to_the_iteration():
    rows = [row(0, duration_ns=80 * MS, data_loading_ns=30 * MS), row(1, data_loading_ns=10 * MS)]
    bars = (trace["x"] for trace in figures.attribution_figure(rows)["data"])
    assert [sum(values) for values in zip(*bars, strict=True)] == [80.0, 100.0]


def test_many_ranks_share_rows_of_the_heat_map_which_name_the_highest():
    figure = figures.iterations_figure(
        [{"rank": rank, "iteration": 5, "own_ns": (1 + (rank == 777) * 0.5) * MS} for rank in range(1024)]
    )
    (trace,) = figure["data"]
    assert (len(trace["y"]), figure["layout"]["height"] <= 900) == (figures.MOST_ROWS, True)
    place = trace["y"].index("ranks 776-779")
    assert (trace["z"][place], trace["text"][place]) == ([1.5], ["rank 777"])


def test_the_wait_matrix_keeps_the_ranks_that_matter_and_says_how_much_that_is():
    waits = [{"rank": rank, "waits_for": 500, "wait_ns": 10.0} for rank in range(100)]
    waits += [{"rank": 900, "waits_for": 901, "wait_ns": 5_000.0}]
    found = rows.wait_matrix(waits, iterations=2, everyone=range(1024))
    assert len(found.ranks) == rows.MOST_RANKS
    assert {500, 900, 901} <= set(found.ranks)
    assert found.wait_ns[found.ranks.index(900)][found.ranks.index(901)] == 2_500
    assert 0.85 < found.shown < 1


def _group(number=0, **known):
    group = {"group": "TENSOR_MODEL_PARALLEL_GROUP", "group_name": str(number), "dimension": "tp"}
    group |= {"group_size": 2, "captured_ranks": 2, "group_ranks": f"[{2 * number},{2 * number + 1}]"}
    costs = {"operation": "all_reduce", "count": 8, "bytes": 800, "transfer_ns": 40.0, "wait_ns": 20.0}
    return group | costs | dict.fromkeys(("algorithm_bandwidth_gbs", "bus_bandwidth_gbs"), 100.0 + number) | known


def test_communication_is_of_one_iteration_and_the_waiting_of_one_rank_in_one_row_for_each_name():
    (found,) = rows.by_group([_group()], iterations=2)
    one = {"count": 4, "bytes": 400, "transfer_ns": 20, "wait_ns": 5}
    assert found.items() >= (one | {"label": "all_reduce · tp: tensor model parallel [0, 1]"}).items()
    (many,) = rows.by_group([_group(number) for number in range(512)], iterations=2)
    one.pop("bytes")
    assert many.items() >= (one | {"bus_bandwidth_gbs": 355.5, "ranks": "512 groups of 2"}).items()


def test_every_answer_shows_as_a_plotly_figure(planted):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    run = planted("pipeline_uneven_2")
    for name in set(FIGURES) - {"counters", "memory", "roofline", "timeline"}:
        # Plotly checks every property's name and type.
        assert isinstance(run.figure(name), graph_objects.Figure)
    assert "stream 7" in run.figure("timeline", iteration=6, ranks=[1]).layout.yaxis.ticktext
    for name, options, message in (
        ("timeline", {"iteration": 99}, "iteration 99 was not captured"),
        ("pie", {}, "Type one of attribution"),
    ):
        with pytest.raises(ProfilingConfigError, match=message):
            run.figure(name, **options)


def test_markup_in_a_figure_is_text_and_templates_hold_no_names():
    name = '<a href="http://x">&lt;b&gt;</a> $x$ %{x} \u202e\n'
    shown = '&lt;a href="http://x"&gt;&amp;lt;b&amp;gt;&lt;/a&gt; &#36;x&#36; %{x} \\u202e\\n'
    group = _group(group=name, operation=name, dimension=name)
    found = rows.by_group([group], iterations=1)
    made = [
        figures.communication_figure(found),
        figures.bars_figure([name], [1.0], name),
        figures.attribution_figure([row(0) | {"label": name}]),
        figures.memory_figure([{"time_ns": 0, "bytes": 1, "site": name}], []),
        figures.counters_figure([{"time_ns": 0.0, "value": 1.0, "metric": name}]),
    ]
    for each in made:
        text = json.dumps(figures.plain_texts(each))
        assert json.dumps(shown)[1:-1] in text
        assert json.dumps(name)[1:-1] not in text
        assert not [trace for trace in each["data"] if "http" in trace["hovertemplate"] + str(trace.get("texttemplate"))]


@pytest.mark.parametrize("groups", [1, 8])
def test_kernels_of_many_groups_have_a_color(groups):
    row = {"sm_active": 0.5, "tensor_active": 0.4, "dram_read": 0.1, "dram_write": 0.1, "memory_tb_s": 3.0, "dram_tb_s": 0.6}
    row |= {"count": 1, "device_ns": 10.0, "samples_per_call": 2.0}
    figure = figures.kernel_counters_figure([row | {"name": f"k{place}", "group": f"g{place}"} for place in range(groups)])
    assert len(figure["data"]) == groups


def test_the_lines_of_the_pages_notebook_show_tables_and_figures(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "first-hour" / "read-the-report.md"
    (block,) = re.findall(r"## In a notebook\n\n```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    (tmp_path / "profiles").symlink_to(CASES["clean_2"].folder)
    monkeypatch.chdir(tmp_path)
    names, shown = {}, {}
    for line in filter(
        None, block.replace("iteration=10", "iteration=7").replace("iterations=[10]", "iterations=[7]").splitlines()
    ):
        try:
            shown[line] = type(eval(line, names)).__name__
        except SyntaxError:
            exec(line, names)
    names["run"].close()
    assert {"Table", "Figure", "DataFrame"} <= set(shown.values())
