"""Findings about device work that a change of the program makes faster or needless: precision, fusion, layouts, recomputation.

Each knows from `device_roles` how long the kernels of one role take, and which part of that a change saves at most. A kernel
counts for one role, so their potential savings add up. They are compute, and the ledger holds time without compute: only idle
time between a role's kernels is attributed there. An iteration does not get shorter than its hosts need, which bounds
each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import pyarrow as pa

from bridge_profiling.common.peaks import peaks
from bridge_profiling.facts.idle import Cause
from bridge_profiling.facts.names import FULL_PRECISIONS, STRIDED_COPY
from bridge_profiling.facts.roles import OUTSIDE
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.memory import free_at_peak
from bridge_profiling.findings.rule import Evidence, responsible
from bridge_profiling.findings.types import Confidence, Event, Grid, Thresholds, by_rank
from bridge_profiling.findings.unprofiled import shorter_by_ns

#: The time of bf16 as a share of that of a slower precision, where the device's peaks are unknown: those of an A100.
_OF_FP32, _OF_TF32 = 19.5 / 312, 156 / 312

#: Memory bounds element-wise kernels: half of the bytes take half of the time.
_OF_ELEMENTWISE = 0.5

#: Fused attention computes the same products, but writes no scores, and skips what a causal mask hides.
_OF_ATTENTION_PRODUCTS = 0.3

#: Batch norms in channels last, on an H100.
_OF_NORMS = 0.6

#: A fused optimizer reads and writes each value once: 7 times per parameter for Adam, where single operators do it 30 times.
_OF_SWEEP = 0.25

#: Causes of the device's idle time between kernels that the host launches one by one.
_BETWEEN = (Cause.small_kernels, Cause.host_launch, Cause.dependency_stalled)


def full_precision_matmul(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Matrix products and convolutions run in fp64, fp32 or TF32, where bf16 takes a fraction of the time.

    Element-wise kernels on fp32 get faster too: they count by the share of the products' time that is not in bf16. Those on
    fp64 count where products are in fp64.
    """
    roles = (*FULL_PRECISIONS, "reduced", "fp32_elementwise", "fp64_elementwise")
    rows = {role: grids.role(role) for role in roles}
    own = {role: grids.filled(rows[role], "own_ns") for role in rows}
    of_bf16 = _of_bf16(grids)
    slow_ns = own["fp64"] + own["fp32"] + own["tf32"]
    products_ns = sum((own[name] * (1 - of_bf16[name]) for name in FULL_PRECISIONS), np.zeros_like(slow_ns))
    if grids.share(_saving_ns(grids, products_ns)) < thresholds.device_work:
        return
    part = slow_ns / np.maximum(slow_ns + own["reduced"], 1e-9)
    elementwise_ns = own["fp32_elementwise"] * part * (1 - _OF_ELEMENTWISE)
    elementwise_ns += np.where(own["fp64"] > 0, own["fp64_elementwise"], 0.0) * (1 - _OF_ELEMENTWISE**2)
    saving_ns = _saving_ns(grids, products_ns + elementwise_ns)
    by_precision = {role.upper(): max(grids.mean_ns(own[role]).values(), default=0.0) for role in FULL_PRECISIONS}
    main = max(by_precision, key=lambda name: by_precision[name])
    device, known = _device(grids), bool(peaks(_device(grids)))
    half = _half(grids)
    slow = grids.mean_ns(slow_ns)
    share = _of_compute(grids, slow)
    least = {rank: slow[rank] - time for rank, time in grids.mean_ns(products_ns).items()}
    yield _evidence(
        grids,
        pa.concat_tables([rows[name] for name in FULL_PRECISIONS]),
        min(saving_ns, grids.room_ns),
        slow,
        {
            "matrix_products_ns": {name: round(time) for name, time in by_precision.items() if time},
            "share_of_compute": by_rank(share, 4),
            "in_bf16_ns": by_rank(least),
            "peak_ratio_to_bf16": {
                name: round(1 / of_bf16[name], 2) for name in FULL_PRECISIONS if name != "fp64" or np.nansum(own[name])
            },
        },
        advice=["fp16" if half == "fp16" else main.lower()],
        values={"main": main, "half": half, "time": slow, "device": device or "the device"},
        doubt="" if known else "peaks_unknown",
    )


def unfused_attention(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Softmax, mask and scale run as kernels of their own between the batched products of attention."""
    other, products = grids.role("attention_other"), grids.role("attention_product")
    other_ns, products_ns = grids.filled(other, "own_ns"), grids.filled(products, "own_ns")
    saving_ns = _saving_ns(grids, other_ns + products_ns * (1 - _OF_ATTENTION_PRODUCTS))
    if grids.share(saving_ns) < thresholds.device_work:
        return
    attention = grids.mean_ns(other_ns + grids.filled(products, "device_ns"))
    share = _of_compute(grids, attention)
    yield _evidence(
        grids,
        other,
        min(saving_ns, grids.room_ns),
        attention,
        {
            "attention_ns": by_rank(attention),
            "softmax_and_mask_ns": by_rank(grids.mean_ns(other_ns)),
            "share_of_compute": by_rank(share, 4),
            "kernels": _per_iteration(grids, other),
        },
    )


def unfused_optimizer(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """An optimizer, a moving average of weights or a clipping of gradients launches kernels for each parameter."""
    rows = grids.role("optimizer_sweep")
    own_ns, idle_ns = (grids.filled(rows, name) for name in ("own_ns", "idle_ns"))
    of_kernels, of_idle = _of_sweeps(grids, ledger)
    if grids.share(of_kernels + of_idle) < thresholds.device_work:
        return
    time_ns = grids.mean_ns(own_ns + idle_ns)
    names = {row["name"]: row["own_ns_sum"] for row in rows.group_by("name").aggregate([("own_ns", "sum")]).to_pylist()}
    name = max(names, key=lambda each: names[each])
    yield _evidence(
        grids,
        rows,
        of_idle + min(of_kernels, grids.room_ns),
        time_ns,
        {
            "kernels": _per_iteration(grids, rows),
            "kernels_ns": by_rank(grids.mean_ns(own_ns)),
            "idle_ns": by_rank(grids.mean_ns(idle_ns)),
        },
        title=["title", "outside_all" if name == OUTSIDE else "within", "take"],
        values={"range": name, "time": time_ns},
        advice=["outside" if name == OUTSIDE else "default"],
    )


def _of_sweeps(grids: Grids, ledger: Ledger) -> tuple[float, float]:
    """What fused kernels for all parameters save: of kernels, and of the idle time between them, which is attributed."""
    rows = grids.role("optimizer_sweep")
    own_ns, short_ns, idle_ns = (grids.filled(rows, name) for name in ("own_ns", "short_ns", "idle_ns"))
    of_kernels = _saving_ns(grids, short_ns + (own_ns - short_ns) * (1 - _OF_SWEEP))
    between_ns, after_ns = _between_ns(grids, ledger, idle_ns), _after_waits_ns(grids, ledger)
    of_launches = ledger.attribute(between_ns, _BETWEEN)
    return of_kernels, of_launches + ledger.attribute(after_ns, (Cause.host_sync,))


def after_waits_in_sweeps_ns(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Grid:
    """What `unfused_optimizer` takes of the idle time after a host's waits; 0 without such a finding."""
    saving_ns = sum(_of_sweeps(grids, copy(ledger)))
    after_ns = _after_waits_ns(grids, ledger)
    return after_ns if grids.share(saving_ns) >= thresholds.device_work else np.zeros_like(after_ns)


def _after_waits_ns(grids: Grids, ledger: Ledger) -> Grid:
    """Idle time after a host's waits, between kernels for single parameters, as far as late launches do not explain it.

    A host that has waited has no lead left. The next kernels of ordinary length restore it; these do not.
    """
    explained_ns = sum((grids.profiler.explained_ns[cause] for cause in _BETWEEN), ledger.left_ns(*_BETWEEN))
    idle_ns = _usual_ns(grids, grids.filled(grids.role("optimizer_sweep"), "idle_ns"))
    return np.clip(idle_ns - np.nan_to_num(explained_ns), 0.0, np.nan_to_num(ledger.left_ns(Cause.host_sync)))


def layout_conversion(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Convolutions copy their images between channels first and channels last."""
    rows = grids.role("layout")
    own_ns = grids.filled(rows, "own_ns")
    norms_ns = grids.filled(grids.role("layout_norm"), "device_ns") * (own_ns > 0)
    saving_ns = _saving_ns(grids, own_ns + norms_ns * (1 - _OF_NORMS))
    if grids.share(_saving_ns(grids, own_ns)) < thresholds.device_work:
        return
    copies = rows.filter(pa.array([bool(STRIDED_COPY.search(name)) for name in rows["name"].to_pylist()], pa.bool_()))
    yield _evidence(
        grids,
        rows,
        min(saving_ns, grids.room_ns),
        grids.mean_ns(own_ns),
        {
            "conversions_ns": by_rank(grids.mean_ns(own_ns)),
            "batch_norms_ns": by_rank(grids.mean_ns(norms_ns)),
            "kernels": _per_iteration(grids, rows),
        },
        doubt="strides" if copies.num_rows else "",
    )


def recomputation(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """The backward pass computes activations again, which is needless while memory is free."""
    rows = grids.role("recomputation")
    again_ns, own_ns = grids.filled(rows, "device_ns"), grids.filled(rows, "own_ns")
    free = min(free_at_peak(grids.facts.memory, grids.facts.every_info).values(), default=None)
    if free is not None and free < thresholds.free_for_activations:
        return
    idle_ns = _between_ns(grids, ledger, grids.filled(rows, "idle_ns"))
    saving_ns = min(_saving_ns(grids, own_ns), grids.room_ns) + ledger.attribute(idle_ns, _BETWEEN)
    if grids.share(saving_ns) < thresholds.device_work:
        return
    yield _evidence(
        grids,
        rows,
        saving_ns,
        grids.mean_ns(again_ns),
        {
            "recomputed_ns": by_rank(grids.mean_ns(again_ns)),
            "idle_ns": by_rank(grids.mean_ns(idle_ns)),
            "free_share": free,
            "kernels": _per_iteration(grids, rows),
        },
        title=["title", "" if free is None else "free"],
        confidence=Confidence.low if free is None else Confidence.medium,
        doubt="free_unknown" if free is None else "need_unknown",
    )


def _between_ns(grids: Grids, ledger: Ledger, idle_ns: Grid) -> Grid:
    """Idle time between kernels that is left of its causes. It is alike in all iterations: an excess has other reasons."""
    left_ns = np.maximum(np.nan_to_num(ledger.left_ns(*_BETWEEN)), 0.0)
    return np.minimum(_usual_ns(grids, idle_ns), left_ns)


def _usual_ns(grids: Grids, times_ns: Grid) -> Grid:
    """Times, each as far as it is in the median iteration as well."""
    return np.minimum(times_ns, grids.captured_row(grids.typical_ns(times_ns)))


def _per_iteration(grids: Grids, rows: pa.Table) -> dict[str, float]:
    return by_rank(grids.mean_ns(grids.filled(rows, "count")), 1)


def _saving_ns(grids: Grids, lost_ns: Grid) -> float:
    """How much shorter a mean iteration is without some compute: a rank that has less of it waits less for the others."""
    captured = ~np.isnan(grids.duration_ns).all(axis=1)
    shorter_ns = shorter_by_ns(np.clip(lost_ns, 0.0, grids.compute_ns), grids.waiting_ns)
    return float(shorter_ns[captured].mean()) if captured.any() else 0.0


def _of_compute(grids: Grids, time_ns: Mapping[int, float]) -> dict[int, float]:
    """A time of each rank as a share of its compute."""
    compute = grids.mean_ns(grids.compute_ns)
    return {rank: time / compute[rank] for rank, time in time_ns.items() if compute.get(rank)}


def _device(grids: Grids) -> str:
    return next((name for info in grids.facts.infos for name in info.devices.values()), "")


def _half(grids: Grids) -> str:
    """The 16-bit precision of the device: `fp16` on those before Ampere, whose tensor cores have no bf16."""
    known = peaks(_device(grids))
    return "fp16" if known and "bf16" not in known else "bf16"


def _of_bf16(grids: Grids) -> dict[str, float]:
    """The time of bf16, or fp16, as a share of that of fp64, fp32 and TF32, by the device's peaks.

    fp64 counts as fp32: tensor cores of an A100 and an H100 are as fast in it, all other GPUs slower.
    """
    known = peaks(_device(grids))
    if not known:
        return {"fp64": _OF_FP32, "fp32": _OF_FP32, "tf32": _OF_TF32}
    return {name: known.get(name, known["fp32"]) / known[_half(grids)] for name in FULL_PRECISIONS}


def _evidence(
    grids: Grids,
    rows: pa.Table,
    saving_ns: float,
    time_ns: Mapping[int, float],
    measures: Mapping[str, Any],
    *,
    confidence: Confidence | None = None,
    doubt: str = "",
    **known: Any,
) -> Evidence:
    """The evidence of a role."""
    # Ranks that run as many of these kernels are as responsible, also those that lose less because they wait for others.
    ranks = sorted({*responsible(time_ns), *responsible(grids.mean_ns(grids.filled(rows, "count")))})
    sure, reason = grids.confidence()
    if doubt and sure is Confidence.high:
        sure = Confidence.medium
    return Evidence(
        ranks=ranks,
        measures=measures,
        saving_ns=saving_ns,
        sure=(confidence or sure, reason),
        doubts=[doubt],
        events=_events(grids, rows, ranks),
        **known,
    )


def _events(grids: Grids, rows: pa.Table, ranks: Sequence[int]) -> list[Event]:
    """The names with most time in one iteration, each once."""
    counted = [row for row in rows.to_pylist() if row["rank"] in ranks and row["iteration"] in grids.lines]
    counted.sort(key=lambda row: (-row["device_ns"], row["rank"], row["iteration"] or 0))
    first: dict[str, dict[str, Any]] = {}
    for row in counted:
        first.setdefault(row["name"], row)
    names = ("rank", "name", "iteration", "start_ns", "device_ns", "count")
    return [Event(*(row[name] for name in names)) for row in list(first.values())[:5]]
