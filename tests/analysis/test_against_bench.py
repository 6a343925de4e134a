"""A capture beside benchmarks: which result fits, what lies between measured sizes, and what is not compared and why."""

from __future__ import annotations

import shutil

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.compare.bench import interpolated
from bridge_profiling.bench import results as bench_results
from bridge_profiling.errors import ProfilingConfigError
from tests.analysis.findings.simulated_jobs import Here
from tests.planted.cases import CASES

MIB = 1 << 20

#: A link of 100 GB/s and 20 microseconds, as the planted capture's would be if it were not slowed down.
LATENCY_US, GBS = 20.0, 100.0


def gbs_of(size):
    """The algorithm bandwidth that a link of that latency and bandwidth gives at a size."""
    return size / (LATENCY_US + size / GBS / 1e3) / 1e3


def collectives(world_size=2, *, hosts=1, device="NVIDIA H200", backend="nccl", sizes=(1024, MIB, 256 * MIB), correct=True):
    rows = [
        {"operation": operation, "message_bytes": size, "algorithm_bandwidth_gbs": gbs_of(size), "correct": correct}
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
        for size in sizes
    ]
    return {
        "kind": "collectives",
        "world_size": world_size,
        "hosts": hosts,
        "device": device,
        "backend": backend,
        "rows": rows,
    }


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """A job of 2 tensor-parallel by 2 data-parallel ranks over a link that was made slow."""
    path = tmp_path_factory.mktemp("bench") / "run"
    shutil.copytree(CASES["slow_link_4"].folder, path)
    return path


@pytest.fixture
def compared(captures, tmp_path):
    def compare(*results):
        path = tmp_path / "results.json"
        bench_results.write(path, list(results))
        with Run(captures, bench=path, engine=Here()) as run:
            return run.against_bench

    return compare


def rows_of(bench, group):
    return [row for row in bench.communication.to_pylist() if row["group"] == group]


def test_times_between_sizes_are_those_of_a_link_of_any_latency_and_bandwidth():
    points = [(size, gbs_of(size)) for size in (4 * MIB, 1024, MIB)]
    for size in (1024, 5000, 300_000, MIB, 3 * MIB, 4 * MIB):
        assert interpolated(points, size) == pytest.approx(LATENCY_US + size / GBS / 1e3)


def test_nothing_is_said_outside_of_what_was_measured():
    points = [(1024, gbs_of(1024)), (MIB, gbs_of(MIB))]
    assert interpolated(points, 1023) is None
    assert interpolated(points, MIB + 1) is None
    assert interpolated([], MIB) is None


def test_each_group_is_compared_with_as_many_ranks_at_its_own_sizes(compared):
    bench = compared(collectives(8), collectives(2))
    for row in rows_of(bench, "TENSOR_MODEL_PARALLEL_GROUP"):
        assert (row["count"], row["compared_count"], row["reason"]) == (36, 36, None)
        # The bytes of all of them over the link, and the latency of each.
        assert row["alone_us"] == pytest.approx(36 * LATENCY_US + 1_611_399_168 / GBS / 1e3)
        assert row["reached_share"] == pytest.approx(row["alone_us"] / row["transfer_us"])
        # The link was planted to be slow: 26 GB/s of bus bandwidth, which is algorithm bandwidth for two ranks.
        assert row["bus_bandwidth_gbs"] == pytest.approx(25.9, abs=0.1)
        assert row["alone_bus_bandwidth_gbs"] == pytest.approx(row["bus_bandwidth_gbs"] / row["reached_share"])


def test_the_bus_bandwidth_of_a_gather_is_half_of_what_two_ranks_gather(compared):
    gathers = [
        row for row in rows_of(compared(collectives(2)), "DATA_PARALLEL_GROUP_WITH_CP") if row["operation"] == "all_gather"
    ]
    assert gathers
    for row in gathers:
        assert row["alone_bus_bandwidth_gbs"] == pytest.approx(gbs_of(75_544_576) / 2)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (collectives(4), "4 ranks were measured, but the group has 2"),
        (collectives(2, hosts=2), "ranks on 2 hosts were measured, but the group is on one host"),
        (collectives(2, device="NVIDIA A100"), "NVIDIA A100 was measured, but NVIDIA H200 captured"),
        (collectives(2, backend="gloo"), "gloo was measured, but nccl captured"),
        (collectives(2, correct=False), "all_reduce was not measured"),
        (collectives(2, sizes=(1024, 2048)), "messages of 65,536 to 67,108,864 bytes were sent, but 1,024 to 2,048 bytes were"),
    ],
)
def test_what_ran_elsewhere_is_not_compared_and_says_why(compared, result, reason):
    for row in rows_of(compared(result), "TENSOR_MODEL_PARALLEL_GROUP"):
        assert row["reached_share"] is None
        assert row["compared_count"] == 0
        assert row["reason"].startswith(reason)


def test_sizes_outside_are_left_out_of_both_sides(compared):
    (row, _) = rows_of(compared(collectives(2, sizes=(1024, MIB))), "TENSOR_MODEL_PARALLEL_GROUP")
    assert 0 < row["compared_count"] < row["count"]
    assert row["alone_us"] == pytest.approx(row["compared_count"] * (LATENCY_US + 65536 / GBS / 1e3))
    assert "67,108,864 bytes were sent" in row["reason"]


def test_of_several_results_that_fit_the_newest_counts(compared):
    slow = collectives(2)
    slow["rows"] = [row | {"algorithm_bandwidth_gbs": 1.0} for row in slow["rows"]]
    steps = [
        {"kind": "step", "device": "NVIDIA H200", "subject": subject, "rows": [{"time_us": {"median": time_us}}]}
        for subject, time_us in (("train:old", 1.0), ("train:new", 2.0))
    ]
    bench = compared(slow | {"dtype": "float32"}, collectives(2) | {"dtype": "bfloat16"}, *steps)
    assert all(row["alone_bus_bandwidth_gbs"] > 1 for row in rows_of(bench, "TENSOR_MODEL_PARALLEL_GROUP"))
    assert (bench.step["subject"], bench.step["alone_us"]) == ("train:new", 2.0)


def test_the_reason_is_that_of_the_result_which_fits_best(compared):
    bench = compared(collectives(2, hosts=2), collectives(8), collectives(2, backend="gloo"))
    assert {row["reason"] for row in rows_of(bench, "TENSOR_MODEL_PARALLEL_GROUP")} == {
        "ranks on 2 hosts were measured, but the group is on one host"
    }


def test_a_file_beside_the_captures_is_taken_and_one_of_something_else_is_told(captures):
    path = captures / "bench.json"
    try:
        bench_results.write(path, [collectives(2)])
        with Run(captures, engine=Here()) as run:
            assert run.against_bench is not None
            assert run.against_bench.found
        path.write_text('{"results": "of another tool"}')
        with Run(captures, engine=Here()) as run:
            assert run.against_bench is None
            assert any("nothing is compared with a benchmark" in sentence for sentence in run.limitations)
        with pytest.raises(ProfilingConfigError, match="is not a result file of bridge-profiling bench"):
            Run(captures, bench=path)
    finally:
        path.unlink()
    with Run(captures, engine=Here()) as run:
        assert run.against_bench is None


def test_the_finding_about_a_slow_link_says_whether_it_is_slow_alone(captures, tmp_path):
    actions = {}
    for name, gbs in (("fast", 100.0), ("slow", 26.0)):
        rows = [
            {"operation": operation, "message_bytes": size, "algorithm_bandwidth_gbs": gbs, "correct": True}
            for operation in ("all_reduce", "all_gather", "reduce_scatter")
            for size in (1024, 256 * MIB)
        ]
        bench_results.write(tmp_path / name, [collectives(2) | {"rows": rows}])
        with Run(captures, bench=tmp_path / name, engine=Here()) as run:
            found = next(finding for finding in run.findings() if finding.id == "exposed_communication")
            actions[name] = found.action
            assert found.evidence["groups"][0]["reached_share_of_alone"] == pytest.approx(25.9 / gbs, abs=0.02)
    assert "The benchmark of this link is faster (26% of it reached)" in actions["fast"]
    assert "so the link itself is slow" in actions["slow"]


def test_copies_steps_and_loaders_are_compared_too(captures, tmp_path):
    copies = {
        "kind": "copies",
        "device": "NVIDIA H200",
        "rows": [
            {"direction": direction, "host_memory": memory, "bytes": size, "bandwidth_gbs": 50.0, "correct": True}
            for direction in ("HtoD", "DtoH")
            for memory in ("pinned", "pageable")
            for size in (1, 1 << 30)
        ],
    }
    step = {"kind": "step", "device": "cpu", "subject": "train:make", "rows": [{"time_us": {"median": 1000.0}}]}
    loader = {
        "kind": "data_loader",
        "subject": "train:data",
        "rows": [{"batches_per_s": {"mean": 50.0}}, {"batches_per_s": None}],
    }
    bench_results.write(tmp_path / "results.json", [copies, step, loader])
    with Run(captures, bench=tmp_path / "results.json", engine=Here()) as run:
        bench = run.against_bench
        captured = [row for row in run.copies().to_pylist() if row["direction"] in ("HtoD", "DtoH")]
    assert bench.communication.num_rows == 0
    found = bench.copies.to_pylist()
    assert sum(row["count"] for row in found) == sum(row["count"] for row in captured)
    for row in found:
        assert row["alone_bandwidth_gbs"] == pytest.approx(50.0)
        assert row["reached_share"] == pytest.approx(row["bandwidth_gbs"] / 50.0)
    assert bench.step["reason"] == "cpu was measured, but NVIDIA H200 captured"
    assert bench.data_loader["batch_us"] == pytest.approx(20_000)
    assert bench.data_loader["iteration_us"] > 20_000
