"""Tables as `tables.toml` declares them."""

import pytest

from bridge_profiling.report import figures, tables, words


def test_every_declared_column_can_be_written_and_every_function_is_declared():
    columns = [tables._Column.of(each) for id in words.resource("tables") for each in tables.declared(id)["columns"]]
    called = {column.name[:-2] for column in columns if column.name.endswith("()")}
    assert called == set(tables.FUNCTIONS)
    assert {column.heading for column in columns if column.name == "exposed_communication_ns"} == {
        "exposed",
        "exposed communication",
    }


def test_rows_are_sorted_and_cut_and_columns_without_values_left_out():
    call = {"rank": 0, "calls": 2.0, "share": None, "longest_ns": 500_000, "iterations": 0}
    rows = [call | {"name": name, "time_ns": time_ns} for name, time_ns in (("poll", 2e6), ("read", 3e9), ("open", 1e6))]
    view = tables.view("system-calls", rows, 2)
    assert view.columns == ["rank", "calls", "ms", "longest ms", "name"]
    assert [[cell.text for cell in row] for row in view.rows] == [
        ["0", "2.0", "3,000.00", "0.50", "read"],
        ["0", "2.0", "2.00", "0.50", "poll"],
    ]
    assert (view.sorted_by, view.note) == (2, "1 more with less time: bridge-profiling analyze --json lists them.")
    marked = tables.view("system-calls", [row | {"iterations": 3, "share": 0.5} for row in rows], 2)
    assert ("of the iteration" in marked.columns, "in an iteration" in marked.title) == (True, True)


@pytest.mark.parametrize("groups", [1, 8])
def test_kernels_of_many_groups_have_a_color(groups):
    counters = {
        "sm_active": 0.5,
        "tensor_active": 0.4,
        "dram_read": 0.1,
        "dram_write": 0.1,
        "memory_tb_s": 3.0,
        "dram_tb_s": 0.6,
    }
    row = counters | {"count": 1, "device_ns": 10.0, "samples_per_call": 2.0}
    figure = figures.kernel_counters_figure([row | {"name": f"k{place}", "group": f"g{place}"} for place in range(groups)])
    assert figure is not None
    assert len(figure["data"]) == groups
