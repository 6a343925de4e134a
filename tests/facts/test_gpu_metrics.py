"""Hardware counters that nsys sampled: their levels in the marked iterations, over time, and where they are shown."""

import json

import pytest

from bridge_profiling.report.run_view import run_tables
from tests.report.published import problems
from tests.traces.nsys_files import small_report

KIND, ACTIVE, READ = 1 << 56, "SMs Active [Throughput %]", "DRAM Read Bandwidth [Throughput %]"


def sample(report, names, level, begin=3000, gpu=0):
    """Sample counters every 100 ns up to 6900; the level follows from the counter and the time."""
    for number, name in enumerate(names):
        report.add("TARGET_INFO_GPU_METRICS", typeId=KIND + gpu, metricId=number, metricName=name)
        for time in range(begin, 7000, 100):
            report.add("GPU_METRICS", timestamp=time, typeId=KIND + gpu, metricId=number, value=level(name, time))


def test_levels_are_those_of_the_marked_iterations(tmp_path, run_of):
    """Iterations 4000 to 4900 and 5000 to 5900 ns, and a sample of two counters every 100 ns from 3000 to 6900."""
    report = small_report()

    def level(name, time):
        return 100 if time < 4000 or time > 5900 else 10 if name == READ else 80 if time < 5000 else 40

    sample(report, (ACTIVE, READ), level)
    report.write(tmp_path / "rank-0.sqlite")
    sampled = run_of()
    active, read = sampled.facts.gpu_metrics.to_pylist()
    assert (active["metric"], active["samples"], active["max"], active["p95"]) == (ACTIVE, 20, 80, 80)
    assert (active["rank"], active["source"], active["device"], active["mean"]) == (0, "nsys", 0, 60)
    assert (read["metric"], read["mean"], read["p95"]) == (READ, 10, 10)
    # Over time, means of equal intervals.
    found = sampled.facts.gpu_metrics_over_time(2).to_pylist()
    values = [(row["metric"], row["time_ns"], row["value"]) for row in found]
    assert values == [(READ, 475, 10), (READ, 1426, 10), (ACTIVE, 475, 80), (ACTIVE, 1426, 40)]
    # On the terminal and in JSON.
    (counters,) = [table for table in run_tables(sampled.facts, None) if table.id == "gpu-metrics-table"]
    assert [cell.text for cell in counters.rows[0]] == ["0", "0", "60.0", "80.0", "80.0", "20", ACTIVE]
    assert [row["metric"] for row in json.loads(sampled.to_json())["gpu_metrics"]] == [ACTIVE, READ]


def test_kernels_phases_and_products_have_the_counters_while_they_ran(tmp_path, run_of):
    """Kernels from 4400 to 4800 and from 5400 to 5800 ns; of the second one's samples, each is of the 100 ns before."""
    report = small_report().add("TARGET_INFO_GPU", id=0, name="NVIDIA H100 80GB HBM3", totalMemory=1 << 36)
    report.call("cudaLaunchKernel", 5060, 5070, correlation=9).kernel("short", 5200, 5250, correlation=9)
    report.rows["NVTX_EVENTS"][3]["text"] = "aten::mm, seq = 7, op_id = 3, sizes = [[1000, 1000], [1000, 1000]]"
    levels = {ACTIVE: 50, "Tensor Active [Throughput %]": 30, READ: 10, "DRAM Write Bandwidth [Throughput %]": 5}
    sample(report, levels, lambda name, time: levels[name] * (2 if time > 5600 else 1), begin=5000)
    report.write(tmp_path / "rank-0.sqlite")
    run = run_of()
    names = ("name", "count", "samples_per_call", "sm_active", "tensor_active", "dram_read", "dram_write", "dram_tb_s")
    found = {row["name"]: [row[name] for name in names[1:]] for row in run.facts.kernel_counters.to_pylist()}
    expected = [1, 4, 0.75, 0.45, 0.15, 0.075, 0.225 * 3.35]
    assert found == {"gemm": pytest.approx(expected), "short": [1, 0.5, None, None, None, None, None]}
    (product,) = run.facts.matrix_products.to_pylist()
    assert product["measured_flops_per_byte"] == pytest.approx(2e9 / 400e-9 / 1e12 / expected[-1])
    shown = {table.id: table for table in run_tables(run.facts, None)}
    assert "1 kernel is shorter than the time between two samples (11%" in shown["kernel-counters"].note
    assert problems("analyze", json.loads(run.to_json())) == []


@pytest.mark.parametrize(
    ("gpus", "levels"),
    [({0: 1}, [("gemm", 20)]), ({0: 5}, []), ({}, [("gemm", 10)])],
    ids=["the process' first device is the machine's second GPU", "its GPU was not sampled", "the report does not say"],
)
def test_counters_are_those_of_the_gpu_that_the_process_used(tmp_path, run_of, gpus, levels):
    report = small_report()
    for cuda, gpu in gpus.items():
        report.add("TARGET_INFO_CUDA_DEVICE", cudaId=cuda, gpuId=gpu, pid=report.process >> 24 & 0xFFFFFF)
    for gpu in range(2):
        sample(report, [ACTIVE], lambda *_, gpu=gpu: 10 * (gpu + 1), gpu=gpu)
    report.write(tmp_path / "rank-0.sqlite")
    found = run_of().facts.kernel_counters.to_pylist()
    assert [(row["name"], round(row["sm_active"] * 100)) for row in found] == levels


def test_system_calls_of_launching_threads_and_cudas_allocations_are_those_of_the_iterations(tmp_path, run_of):
    """Iterations 4000 to 4900 and 5000 to 5900 ns."""
    report = small_report()
    other = report.thread + 1
    spans = [("poll", 3900, 4100, None), ("read", 4000, 4050, None), ("poll", 5000, 5300, None), ("poll", 4950, 4960, None)]
    for name, start, end, thread in [*spans, ("futex", 4000, 4900, other)]:
        report.add("OSRT_API", start=start, end=end, globalTid=thread or report.thread, nameId=report.string(name))
    for start, amount, kind, operation in ((100, 64, 2, 0), (4100, 32, 2, 0), (4200, 32, 2, 1), (5000, 8, 1, 0)):
        place = {"globalPid": report.process, "deviceId": 0, "memKind": kind, "memoryOperationType": operation}
        report.add("CUDA_GPU_MEMORY_USAGE_EVENTS", start=start, bytes=amount, **place)
    report.write(tmp_path / "rank-0.sqlite")
    run = run_of()
    (call,) = run.facts.system_calls.to_pylist()  # the read is inside a poll
    assert [call[name] for name in ("name", "iterations", "calls", "longest_ns")] == ["poll", 2, 1.0, 300]
    assert (call["time_ns"], call["share"]) == (200, pytest.approx(400 / 1800))
    names = ("memory", "allocations", "frees", "in_iterations", "peak_bytes", "end_bytes")
    rows = [tuple(row[name] for name in names) for row in run.facts.cuda_memory.to_pylist()]
    assert rows == [("device", 2, 1, 2, 96, 64), ("pinned", 1, 0, 1, 8, 8)]
    document = json.loads(run.to_json())
    assert [(len(rank["system_calls"]), len(rank["cuda_memory"])) for rank in document["ranks"]] == [(1, 2)]
    assert problems("analyze", document) == []
