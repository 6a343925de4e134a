"""A capture compared with benchmarks: which result fits, what is between measured sizes, what is not compared and why.

Each answer is followed to the sentence about it.
"""

import json
import shutil

import pytest

from bridge_profiling.bench import results as bench_results
from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.compare.bench import interpolated
from bridge_profiling.report.comparison_view import bench_section
from bridge_profiling.run import Run
from tests.planted.cases import CASES
from tests.report.published import problems

MIB = 1 << 20
DEVICE = "NVIDIA H200"
TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"

#: A link of 100 GB/s and 20 microseconds, as that of the capture with a slow link would be if it were not slowed down.
LATENCY_NS, GBS = 20_000.0, 100.0


def gbs_of(size):
    """The algorithm bandwidth that a link of that latency and bandwidth gives at a size."""
    return size / (LATENCY_NS + size / GBS)


def collectives(world_size=2, *, sizes=(1024, MIB, 256 * MIB), gbs=None, correct=True, **known):
    rows = [
        {"operation": operation, "message_bytes": size, "algorithm_bandwidth_gbs": gbs or gbs_of(size), "correct": correct}
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
        for size in sizes
    ]
    ran = {"kind": "collectives", "world_size": world_size, "hosts": 1, "device": DEVICE, "backend": "nccl"}
    return ran | {"rows": rows} | known


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A job of 2 tensor-parallel by 2 data-parallel ranks over a link that was made slow."""
    return shutil.copytree(CASES["slow_link_4"].folder, tmp_path_factory.mktemp("bench") / "run")


@pytest.fixture
def compared(folder, run_of, tmp_path):
    """Opens the run to compare it with results."""

    def compare(*results):
        bench_results.write(tmp_path / "results.json", list(results))
        return run_of(folder, bench=tmp_path / "results.json")

    return compare


def rows_of(run, group=TENSOR):
    return [row for row in run.bench.communication.to_pylist() if row["group"] == group]


def test_times_between_measured_sizes_are_those_of_a_link_of_any_latency_and_bandwidth():
    points = [(size, gbs_of(size)) for size in (4 * MIB, 1024, MIB)]
    for size in (1024, 5000, 300_000, MIB, 3 * MIB, 4 * MIB):
        assert interpolated(points, size) == pytest.approx(LATENCY_NS + size / GBS)
    assert [interpolated(points, 1023), interpolated(points, 4 * MIB + 1), interpolated([], MIB)] == [None] * 3


def test_each_group_is_compared_with_as_many_ranks_at_its_own_sizes(compared):
    run = compared(collectives(8), collectives(2))
    for row in rows_of(run):
        assert (row["count"], row["compared_count"], row["reason"]) == (36, 36, None)
        # The bytes of all of them over the link, and the latency of each.
        assert row["alone_ns"] == pytest.approx(36 * LATENCY_NS + 1_611_399_168 / GBS)
        assert row["reached_share"] == pytest.approx(row["alone_ns"] / row["transfer_ns"])
        # The link was made slow: 26 GB/s of bus bandwidth, which is algorithm bandwidth for two ranks.
        assert row["bus_bandwidth_gbs"] == pytest.approx(25.9, abs=0.1)
        assert row["alone_bus_bandwidth_gbs"] == pytest.approx(row["bus_bandwidth_gbs"] / row["reached_share"])
    sized = [row for row in run.communication(by="size").to_pylist() if row["group"] == TENSOR]
    assert [row["alone_bus_bandwidth_gbs"] for row in sized] == [pytest.approx(gbs_of(row["message_bytes"])) for row in sized]
    # The bus bandwidth of a gather is half of what two ranks gather.
    gathers = [row for row in rows_of(run, "DATA_PARALLEL_GROUP_WITH_CP") if row["operation"] == "all_gather"]
    assert [row["alone_bus_bandwidth_gbs"] for row in gathers] == [pytest.approx(gbs_of(75_544_576) / 2)] * 2
    fell_short = "all_reduce in group tensor model parallel on ranks 0-1 reached 27% of the benchmark's bandwidth (26 of "
    assert [sentence.startswith(fell_short) for sentence in bench_section(run.bench).paragraphs].count(True) == 1


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([collectives(4)], "4 ranks were measured, but the group has 2"),
        ([collectives(correct=False)], "all_reduce was not measured"),
        ([collectives(sizes=(1024, 2048))], "messages of 65,536 to 67,108,864 bytes were sent, but 1,024 to 2,048 bytes were"),
        # The reason of the one that fits best.
        ([collectives(hosts=2), collectives(8), collectives(backend="gloo")], "ranks on 2 hosts were measured, but the group"),
    ],
)
def test_what_ran_elsewhere_is_not_compared_and_says_why(compared, results, reason):
    for row in rows_of(compared(*results)):
        assert (row["reached_share"], row["compared_count"]) == (None, 0)
        assert row["reason"].startswith(reason)


def test_a_file_next_to_the_captures_is_taken_and_one_of_something_else_is_reported(folder, run_of):
    assert run_of(folder).bench is None
    path = folder / "bench.json"
    try:
        bench_results.write(path, [collectives()])
        assert "bench.json, found next to the captures" in bench_section(run_of(folder).bench).paragraphs[0]
        path.write_text('{"results": "of another tool"}')
        run = run_of(folder)
        assert run.bench is None
        assert any("nothing is compared with a benchmark" in sentence for sentence in run.facts.limitations)
        with pytest.raises(ProfilingConfigError, match="is not a result file of bridge-profiling bench"):
            Run(folder, bench=path)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("gbs", "conclusion"),
    [(100.0, "The benchmark of this link is faster (26% of it reached)"), (26.0, "so the link itself is slow")],
)
def test_the_finding_about_a_slow_link_says_whether_it_is_slow_alone(compared, gbs, conclusion):
    found = next(each for each in compared(collectives(gbs=gbs)).findings if each.id == "exposed_communication")
    assert conclusion in found.action
    assert found.evidence["groups"][0]["reached_share_of_alone"] == pytest.approx(25.9 / gbs, abs=0.02)


def test_a_data_loader_is_compared_with_an_iteration(compared):
    batches = [{"batches_per_s": {"mean": 50.0}}, {"batches_per_s": None}]
    run = compared({"kind": "data_loader", "subject": "train:data", "rows": batches})
    assert run.bench.data_loader["batch_ns"] == pytest.approx(20_000_000)
    assert any("train:data returns a batch every 20 ms" in text for text in bench_section(run.bench).paragraphs)
    assert problems("analyze", json.loads(run.to_json())) == []
