"""What ran on a rank's GPU in each iteration of a capture, by the kernels' names."""

import re
from collections import Counter
from collections.abc import Mapping

import pyarrow.compute as pc

from bridge_profiling.traces.types import RankTables
from tests.gpu.jobs import Job

#: Matrix products by any library's name for them, and not what sums up their parts.
_MATRIX_PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma", re.IGNORECASE)
_SUMS_UP = re.compile(r"splitk_?reduce|reduce_kernel", re.IGNORECASE)

COMPUTE, COMMUNICATION = "compute", "communication"

#: The window of most jobs.
WINDOW = [8, 9, 10, 11]


def kernels_of(tables: RankTables, *kinds: str, phase: str | None = None) -> dict[int | None, Counter[str]]:
    """Iteration to how often each kernel ran in it; None for what belongs to no iteration.

    With a phase, only kernels that were launched inside a range of that name.
    """
    host = tables["host_events"].select(["category", "name", "start_ns", "end_ns"]).to_pylist() if phase else []
    ranges = [(row["start_ns"], row["end_ns"]) for row in host if (row["category"], row["name"]) == ("annotation", phase)]
    found: dict[int | None, Counter[str]] = {}
    for row in tables["device_events"].select(["kind", "name", "iteration", "launch_start_ns"]).to_pylist():
        launch = row["launch_start_ns"]
        inside = phase is None or any(launch is not None and start <= launch <= end for start, end in ranges)
        if inside and row["kind"] in (kinds or (COMPUTE, COMMUNICATION)):
            found.setdefault(row["iteration"], Counter())[row["name"]] += 1
    return found


def matrix_products(kernels: Mapping[str, int]) -> int:
    """How many of these kernels are matrix products."""
    return sum(count for name, count in kernels.items() if _MATRIX_PRODUCT.search(name) and not _SUMS_UP.search(name))


def from_inductor(kernels: Mapping[str, int]) -> int:
    """How many of these kernels `torch.compile` has made."""
    return sum(count for name, count in kernels.items() if name.startswith("triton_"))


def launched_outside(tables: RankTables) -> list[str]:
    """Kernels and copies whose launch is unknown, or lies before the first or after the last iteration's range."""
    events, iterations = tables["device_events"], tables["iterations"]
    start, end = pc.min(iterations["start_ns"]).as_py(), pc.max(iterations["end_ns"]).as_py()
    launches = events["launch_start_ns"]
    inside = pc.and_(pc.greater_equal(launches, start), pc.less_equal(launches, end))
    return events.filter(pc.invert(pc.fill_null(inside, False)))["name"].to_pylist()


def launched_by(tables: RankTables, call: str) -> list[str]:
    """Kernels that this call of the CUDA runtime launched, whatever is behind its name: `cudaGraphLaunch_v10000` too."""
    host = tables["host_events"].select(["name", "correlation"])
    calls = host.filter(pc.starts_with(host["name"].cast("string"), call))["correlation"].drop_null()
    events = tables["device_events"]
    of_call = pc.is_in(events["correlation"], value_set=calls.combine_chunks())
    return events.filter(pc.and_(of_call, pc.equal(events["kind"].cast("string"), COMPUTE)))["name"].to_pylist()


def check_window(job: Job, wanted: list[int] = WINDOW, *, status: str = "complete") -> None:
    """The selected ranks, and no others, captured exactly these iterations, and nothing was launched outside of them."""
    assert sorted(job.manifests) == sorted(job.spec.selected), job.tail
    for rank, tables in job.traces().items():
        manifest = job.manifests[rank]
        assert manifest["status"] == status, manifest["reason"]
        assert manifest["captured"]["iterations"] == wanted
        assert tables.info.error is None
        assert tables["iterations"]["iteration"].to_pylist() == wanted, f"rank {rank}"
        assert launched_outside(tables) == [], f"rank {rank}"


def ended_by_sigterm(job: Job) -> list[int]:
    """The ranks that ended by themselves after their launcher got a SIGTERM: one at least.

    A rank that waits in NCCL for one that has left does not react to the signal: its launcher kills it after 30 s.
    """
    reasons = {rank: job.manifests[rank]["reason"] for rank in job.spec.selected}
    found = [rank for rank, reason in reasons.items() if "the process exited (code 143)" in reason]
    assert found, reasons
    for rank in reasons.keys() - set(found):
        assert "the process died inside the window" in reasons[rank] or job.spec.profiler == "nsys", reasons
    return found


def check_losses(job: Job, reference: Job) -> None:
    """Both trained to their end, and profiling changed no bit of a loss."""
    for one in (job, reference):
        assert one.returncode == 0, one.tail
        assert max(one.losses) == 19
    first = job.spec.resumes_at or 0
    assert job.losses == {iteration: reference.losses[iteration] for iteration in range(first, 20)}


def check_same_kernels(job: Job, wanted: list[int] = WINDOW, *kinds: str) -> None:
    """Every kernel belongs to one of these iterations, and each iteration has the same ones."""
    for rank, tables in job.traces().items():
        kernels = kernels_of(tables, *kinds)
        assert set(kernels) == set(wanted), f"rank {rank}"
        last = kernels[wanted[-1]]
        for iteration in wanted:
            assert kernels[iteration] == last, (rank, iteration, kernels[iteration] - last, last - kernels[iteration])


def check_libraries(job: Job, *parts: str) -> None:
    """Every iteration of every rank has matrix products, and kernels of these libraries by parts of their names."""
    for rank, tables in job.traces().items():
        kernels = kernels_of(tables)
        for iteration in WINDOW:
            missing = [part for part in parts if not any(part in name.lower() for name in kernels[iteration])]
            assert missing == [], (rank, iteration, sorted(kernels[iteration]))
            assert matrix_products(kernels[iteration]) > 0
