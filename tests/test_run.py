"""The public class: its tables by what a user asks for, the errors for what was not captured, and what it prints."""

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.findings import Confidence, Finding, Thresholds
from tests.facts.conftest import _cached_elsewhere, run_of, write_trace
from tests.facts.ranks_in_hand import values
from tests.traces.kineto_files import call, complete, kernel, steps

__all__ = ["_cached_elsewhere", "run_of", "write_trace"]


def _iterations(*begins):
    """Iterations from 5, each with two kernels and a copy, under an operator of a module that is called with two shapes."""
    for place, begin in enumerate(begins):
        yield complete("user_annotation", f"ProfilerStep#{5 + place}", begin, 900)
        yield complete("python_function", "nn.Module: Linear_0", begin + 1, 100)
        for number, size in enumerate((8, 16)):
            launched, at = 10 * place + number + 1, begin + 10 + 40 * number
            yield complete("cpu_op", "aten::mm", at, 30, **{"Input Dims": [[size, size], [size, size]]})
            yield call("cudaLaunchKernel", at + 5, 2, launched)
            yield kernel("gemm" if number else "elementwise_kernel", at + 200, 30 + number, correlation=launched)


@pytest.fixture
def run(run_of, write_trace):
    """A run of two ranks, the second with more time between its iterations."""
    for rank, distance in enumerate((1_000, 1_100)):
        events = [*_iterations(*(distance * place for place in range(4)))]
        write_trace(events, f"rank-{rank}.json.gz", distributedInfo={"rank": rank, "world_size": 2})
    return run_of()


def test_rows_are_those_of_the_ranks_and_iterations_that_are_named(run):
    assert run.ranks == [0, 1]
    every = run.iterations(steady=False)
    assert set(values(every, "rank")) == {(0,), (1,)}
    assert values(run.iterations(1, steady=False), "rank", "iteration") == [(1, number) for number in (5, 6, 7, 8)]
    assert not any(run.iterations()["boundary"].to_pylist())
    assert set(values(run.kernels(ranks=[1], iterations=range(6, 8)), "name", "count")) == {
        ("gemm", 2),
        ("elementwise_kernel", 2),
    }
    assert set(values(run.kernels(iterations=6), "count")) == {(2,)}
    for table in (run.operators(0), run.kernels(0, by="rank"), run.kernels(0, by="group")):
        assert set(table["rank"].to_pylist()) == {0}


def test_what_was_not_captured_is_refused_with_what_was(run):
    for asked, error in (
        (lambda: run.iterations(ranks=[0, 7]), "rank 7 was not captured. Type ranks from 0-1."),
        (lambda: run.operators(ranks=range(9)), "ranks 2-8 were not captured. Type ranks from 0-1."),
        (lambda: run.kernels(iterations=[5, 90]), "iteration 90 was not captured. Type iterations from 5-8."),
        (lambda: run.events(2), "rank 2 was not captured. Type ranks from 0-1."),
        (lambda: run.events(0, "devise"), "kind='devise' is unknown. Type device."),
        (lambda: run.events(0, iterations=4), "iteration 4 was not captured. Type iterations from 5-8."),
        (lambda: run.flame_graph(2), "rank 2 was not captured. Type ranks from 0-1."),
        (lambda: run.kernels(by="group_by"), "by='group_by' is unknown. Type group."),
        (lambda: run.memory("site"), "kind='site' is unknown. Type sites."),
        (lambda: run.figure("timelin"), "'timelin' is not a figure. Type timeline."),
    ):
        with pytest.raises(ProfilingConfigError) as raised:
            asked()
        assert str(raised.value) == error


def test_without_iterations_none_can_be_chosen(run_of, write_trace):
    write_trace([kernel("gemm", 10, 5)], distributedInfo={"rank": 0})
    with pytest.raises(ProfilingConfigError, match="Leave the iterations out: there are none"):
        run_of().kernels(iterations=3)


@pytest.mark.parametrize(
    ("table", "by", "columns"),
    [
        ("kernels", "name", {"name", "total_ns"}),
        ("kernels", "rank", {"rank", "name", "total_ns"}),
        ("kernels", "group", {"rank", "group", "share"}),
        ("operators", "name", {"rank", "name", "self_ns"}),
        ("operators", "shapes", {"shapes"}),
        ("operators", "stack", {"stack"}),
        ("operators", "module", {"module"}),
        ("counters", "metric", {"metric"}),
        ("counters", "kernel", {"name", "device_ns"}),
        ("communication", "group", {"group", "transfer_ns"}),
        ("communication", "rank", {"rank", "exposed_ns"}),
        ("communication", "size", {"message_bytes", "alone_bus_bandwidth_gbs"}),
        ("pipeline", "stage", {"stage", "bubble_ns"}),
        ("pipeline", "rank", {"rank", "iteration"}),
        ("pipeline", "wait", {"stage", "waits_for_stage"}),
    ],
)
def test_each_by_has_its_columns(run, table, by, columns):
    found = getattr(run, table)(by=by)
    assert columns <= set(found.column_names)
    rows = {("kernels", "name"): 2, ("kernels", "rank"): 4, ("kernels", "group"): 4, ("operators", "shapes"): 4}
    assert found.num_rows == rows.get((table, by), found.num_rows)


@pytest.mark.parametrize("kind", ["devices", "sites", "timeline", "peak", "growth", "out_of_memory"])
def test_each_kind_of_memory_is_a_table(run, kind):
    assert {"rank", "device"} & set(run.memory(kind, ranks=0).column_names)


def test_events_are_those_of_the_capture(run):
    assert values(run.events(1, iterations=[6, 8]), "iteration", "name") == [
        (number, name) for number in (6, 8) for name in ("elementwise_kernel", "gemm")
    ]
    # Of the host those that begin in the iteration.
    begin = run.events(1, "iterations", iterations=7)["start_ns"][0].as_py()
    host = run.events(1, "host", iterations=7)
    assert host.num_rows * 4 == run.events(1, "host_events").num_rows == 4 * 6
    assert all(begin <= start < begin + 900_000 for start in host["start_ns"].to_pylist())
    assert run.events(0, "host", iterations=[]).num_rows == run.events(0, "gpu_metrics").num_rows == 0


def test_stacks_are_those_of_the_rank(run):
    found = run.flame_graph(1)
    assert set(found["rank"].to_pylist()) == {1}
    assert any("aten::mm" in stack for stack in map(str, found["stack"].to_pylist()))


def test_a_run_says_what_was_found_and_nothing_is_read_for_that(run_of, write_trace, tmp_path, monkeypatch):
    for rank in range(2):
        write_trace(steps(100), f"run/rank-{rank}.json.gz", distributedInfo={"rank": rank})
    run = run_of(tmp_path / "run", parquet=tmp_path / "kept")
    assert repr(run) == f"Run('{tmp_path / 'run'}', 2 ranks, kineto)"
    assert not (tmp_path / "kept").exists()
    assert run.ranks == [0, 1]
    assert repr(run_of(tmp_path / "kept")) == f"Run('{tmp_path / 'kept'}', Parquet of 2 captures)"


def test_a_finding_is_a_line():
    found = Finding("data_loading", "Data loading stalls rank 1", [1], {}, Confidence.high, "Load ahead.", 3_100_000, 5_200_000)
    assert repr(found) == (
        "data_loading on rank 1: saves 3.1 ms per iteration (at most 5.2 ms), high confidence: Data loading stalls rank 1"
    )
    bounded = Finding("memory_growth", "Memory grows", [], {}, Confidence.low, "", None, 5_200_000)
    assert repr(bounded) == "memory_growth: at most 5.2 ms, low confidence: Memory grows"
    assert repr(Finding("memory_growth", "Memory grows", [0, 1], {}, Confidence.low, "")) == (
        "memory_growth on ranks 0-1: low confidence: Memory grows"
    )


def test_thresholds_are_those_of_the_run(run_of, write_trace):
    events = [
        *_iterations(*range(0, 9_000, 1_000)),
        *(complete("user_annotation", "fetch", 1_000 * place + 700, 190) for place in range(9)),
    ]
    write_trace(events, distributedInfo={"rank": 0})
    named = run_of(thresholds=Thresholds(data_loading_ranges="^fetch$"))
    lost = dict.fromkeys(values(named.facts.idle_causes, "cause"))
    assert ("data_loading",) in lost
    assert "data_loading" in {finding.id for finding in named.findings}
    assert "data_loading" not in {finding.id for finding in run_of(thresholds=Thresholds(data_loading=0.99)).findings}
