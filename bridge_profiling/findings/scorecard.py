"""The checklist of a fast training: nine questions, each answered with yes, no or unknown, and the number that says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.facts.intervals import summed
from bridge_profiling.facts.names import FULL_PRECISIONS, FUSED_ATTENTION
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import declared
from bridge_profiling.findings.memory import free_at_peak
from bridge_profiling.traces.types import RankInfo

Rows = Sequence[dict[str, Any]]

#: Of each check: the limit of its value, whether the value must be at least or at most that, and why the answer is unknown.
CHECKS: dict[str, tuple[float, bool, str]] = {
    "device_busy": (0.80, True, "no iteration with device work is marked"),
    "memory_headroom": (0.10, True, "no memory was recorded, or the size of the device is unknown"),
    "data_loading": (0.10, False, "no iteration is marked"),
    "mixed_precision": (0.80, True, "no matrix product was recognized"),
    "fused_attention": (0.50, True, "no attention was recognized"),
    "fused_optimizer": (0.50, True, "no optimizer was recognized"),
    "compiled_or_graphed": (0.10, True, "no kernel was captured"),
    "overlapped_communication": (0.50, True, "no communication on a device was captured"),
    "gradient_accumulation": (0.10, False, "no optimizer was recognized in a marked iteration"),
}

#: Ranges of torch.compile around what it has compiled: of the whole program, and of each graph.
_COMPILED = (re.compile("Torch-Compiled Region|CompiledFunctionBackward"), re.compile("## Call CompiledFxGraph"))

#: Exposed communication that is a smaller share of an iteration counts as hidden.
_NEGLIGIBLE = 0.01


def scorecard(facts: RunFacts) -> pa.Table:
    """One row per check of `CHECKS`; of a training on CPUs, data loading alone."""
    infos, judged = facts.infos, {info.rank for info in facts.infos if info.judged}

    def rows(table: pa.Table) -> Rows:
        if not table.num_rows:  # an empty table need not have the columns
            return []
        return [row for row in table.filter(pc.equal(table["source"], facts.source)).to_pylist() if row["rank"] in judged]

    kernels = rows(facts.kernels_by_rank.select(["rank", "source", "kind", "name", "group", "total_ns"]))
    attribution, iterations = rows(facts.attribution), rows(facts.iterations)
    # Rank by rank, and without threads: a sum in another order has another last digit.
    roles = facts.device_roles
    of_roles = roles.filter(pc.equal(roles["source"], facts.source)).group_by(["rank", "role"], use_threads=False)
    role_ns = summed((row["role"], row["device_ns_sum"]) for row in of_roles.aggregate([("device_ns", "sum")]).to_pylist())
    hosts = facts.host_iterations.to_pylist()
    if hosts and not kernels:
        found = _row("data_loading", _worst("data_loading", _shares(hosts, "data_loading_ns")))
        return pa.Table.from_pylist([found], schema=declared("Check").schema())
    working = [row for row in attribution if row["idle_ns"] < row["duration_ns"]]
    # Of a process with several devices, the one that is busy least counts.
    alone = {row["rank"]: row["least_busy_ns"] / row["busy_ns"] for row in rows(facts.breakdown) if row["busy_ns"]}
    compute = [row for row in kernels if row["kind"] == "compute"]
    # Each distinct name is searched once: every rank has the same ones.
    fused = {name for name in {row["name"] for row in compute} if FUSED_ATTENTION.search(name or "")}
    by_rank = {
        "device_busy": {
            row["rank"]: alone.get(row["rank"], 1.0) * (1 - row["idle_ns"] / row["duration_ns"])
            for row in working
            if row["duration_ns"]
        },
        "memory_headroom": free_at_peak(facts.memory, infos),
        "data_loading": _shares(working, "data_loading_ns"),
        "overlapped_communication": dict(_overlapped(working, iterations)),
    }
    fused_ns = _time(compute, lambda row: row["group"] == "optimizer")
    of_run = {
        "mixed_precision": _part(role_ns.get("reduced", 0.0), sum(role_ns.get(name, 0.0) for name in FULL_PRECISIONS)),
        "fused_attention": _part(
            _time(compute, lambda row: row["name"] in fused),
            role_ns.get("attention_other", 0.0) + role_ns.get("attention_product", 0.0),
        ),
        "fused_optimizer": _part(fused_ns, role_ns.get("optimizer_sweep", 0.0)),
        "compiled_or_graphed": _compiled(compute, rows(facts.launch_statistics), rows(facts.operators)),
        "gradient_accumulation": _once_a_step(
            fused_ns + role_ns.get("optimizer_sweep", 0.0), iterations, working if _only_data_parallel(infos) else []
        ),
    }
    products = any(row["group"] in ("matrix product", "convolution") for row in compute)
    unknown = {"mixed_precision": "the names of the matrix products do not tell their precision"} if products else {}
    answers = {check: (value, None) for check, value in of_run.items()} | {
        check: _worst(check, values) for check, values in by_rank.items()
    }
    return pa.Table.from_pylist(
        [_row(check, answers[check], unknown.get(check)) for check in CHECKS], schema=declared("Check").schema()
    )


def _row(check: str, worst: tuple[float | None, int | None], why: str | None = None) -> dict[str, Any]:
    (value, rank), (limit, at_least, unknown) = worst, CHECKS[check]
    known = {"check": check, "value": value, "limit": limit, "rank": rank}
    if value is None:
        return known | {"answer": "unknown", "reason": why or unknown}
    return known | {"answer": "yes" if (value >= limit if at_least else value < limit) else "no", "reason": ""}


def _worst(check: str, by_rank: dict[int, float]) -> tuple[float | None, int | None]:
    """The value of the rank that does worst, and that rank; of several, the first."""
    sign = 1 if CHECKS[check][1] else -1
    rank = min(by_rank, key=lambda rank: (sign * by_rank[rank], rank), default=None)
    return (None, None) if rank is None else (by_rank[rank], rank)


def _part(wanted: float, other: float) -> float | None:
    return wanted / (wanted + other) if wanted + other else None


def _time(kernels: Rows, judge: Callable[[dict[str, Any]], bool]) -> float:
    return sum(row["total_ns"] for row in kernels if judge(row))


def _shares(rows: Rows, column: str) -> dict[int, float]:
    """A time as a share of the duration, by rank, over all its rows."""
    times: dict[int, list[float]] = {}
    for row in rows:
        sums = times.setdefault(row["rank"], [0.0, 0.0])
        sums[0] += row[column]
        sums[1] += row["duration_ns"]
    return {rank: time / whole for rank, (time, whole) in times.items() if whole}


def _once_a_step(optimizer_ns: float, iterations: Rows, communicating: Rows) -> float | None:
    """The share of the iterations that accumulation pays once for several micro-batches: the optimizer, exposed reductions."""
    whole_ns = sum(row["duration_ns"] for row in iterations)
    if not optimizer_ns or not whole_ns:
        return None
    exposed = _shares(communicating, "communication_ns").values()
    return min(optimizer_ns / whole_ns + (sum(exposed) / len(exposed) if exposed else 0.0), 1.0)


def _only_data_parallel(infos: Sequence[RankInfo]) -> bool:
    """Whether all communication is of gradients and parameters; other dimensions communicate in each micro-batch."""
    return all(size == 1 for info in infos for name, (_, size) in (info.coordinates or {}).items() if name != "dp")


def _compiled(compute: Rows, launches: Rows, operators: Rows) -> float | None:
    """The largest of three shares: kernels that CUDA graphs launch, compute in generated kernels, and in compiled regions."""
    count, graphed = (sum(row[name] for row in launches) for name in ("kernel_count", "graph_kernel_count"))
    whole_ns = _time(compute, lambda row: True)
    if not whole_ns:
        return None
    generated_ns = _time(compute, lambda row: (row["name"] or "").startswith("triton_"))
    regions_ns = [sum(row["device_total_ns"] for row in operators if region.match(row["name"] or "")) for region in _COMPILED]
    return min(max(generated_ns / whole_ns, *(each_ns / whole_ns for each_ns in regions_ns), graphed / max(count, 1)), 1.0)


def _overlapped(working: Rows, iterations: Rows) -> Iterator[tuple[int, float]]:
    """The share of communication that compute hides, by rank; waiting for other ranks is not communication."""
    hidden = _shares(iterations, "overlapped_communication_ns")
    for row in working:
        if row["duration_ns"] and row["rank"] in hidden:
            exposed = row["communication_ns"] / row["duration_ns"]
            if exposed < _NEGLIGIBLE:
                exposed = 0.0
            if exposed + hidden[row["rank"]]:
                yield row["rank"], hidden[row["rank"]] / (exposed + hidden[row["rank"]])
