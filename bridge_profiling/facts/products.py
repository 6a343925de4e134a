"""Matrix products, convolutions and attention: floating-point operations, from the dimensions of their inputs, and speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.common.peaks import peaks
from bridge_profiling.facts.intervals import Ranged, coded, inside, judged, launched_inside, ranged, rows_of, totals
from bridge_profiling.facts.names import is_product_or_attention, product_precision
from bridge_profiling.facts.sampled import Counted, memory_tb_s, traffic
from bridge_profiling.facts.types import declared
from bridge_profiling.traces.tables import to_int64
from bridge_profiling.traces.types import RankInfo

Dimensions = Sequence[Sequence[int]]

#: Floating-point operations of a call, and elements that it reads and writes; None if the dimensions do not say.
Work = tuple[int, int]

#: Bytes of an element, by precision.
_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp64": 8}

_COLUMNS = ("operator", "shapes", "precision", "kernel", "count", "device_ns", "flops", "tflops", "flops_per_byte")


def matrix(m: int, k: int, n: int, batch: int = 1) -> Work:
    """A product of m x k and k x n: a multiplication and an addition for each pair of factors."""
    return 2 * batch * m * k * n, batch * (m * k + k * n + m * n)


def _product(first: int) -> Callable[[Dimensions], Work]:
    def work(shapes: Dimensions) -> Work:
        (*batch, m, k), (*_, n) = shapes[first], shapes[first + 1]
        return matrix(m, k, n, prod(batch))

    return work


def _attention(first: int, products: int) -> Callable[[Dimensions], Work]:
    """Of queries, keys and values of batch x heads x length x channels; every score counts, a causal mask's too."""

    def work(shapes: Dimensions) -> Work:
        (batch, heads, queries, channels), keys = shapes[first], shapes[first + 1][-2]
        elements = sum(prod(shape) for shape in shapes[first : first + 3]) + batch * heads * queries * channels
        return 2 * products * batch * heads * queries * keys * channels, elements

    return work


def _convolution_backward(shapes: Dimensions) -> Work:
    """Of the output's gradient, the input and the weight: products for the gradients of both."""
    output, inputs, weight = shapes[:3]
    return 4 * prod(output) * prod(weight[1:]), prod(output) + 2 * prod(inputs) + 2 * prod(weight)


#: Operators that launch the kernels, not those around them: `aten::linear` calls `aten::addmm`.
_WORK: dict[str, Callable[[Dimensions], Work]] = {
    "aten::mm": _product(0),
    "aten::_scaled_mm": _product(0),
    "aten::addmm": _product(1),
    "aten::bmm": _product(0),
    "aten::baddbmm": _product(1),
    **{f"aten::_scaled_dot_product_{kind}_attention": _attention(0, 2) for kind in ("flash", "efficient", "cudnn")},
    # Scores again, and the gradients of values, scores, queries and keys.
    **{f"aten::_scaled_dot_product_{kind}_attention_backward": _attention(1, 5) for kind in ("flash", "efficient", "cudnn")},
    "aten::convolution_backward": _convolution_backward,
}

#: Its dimensions do not say how large the output is; those of its backward pass do.
_CONVOLUTION = "aten::convolution"


def host_rows(host_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events `products` reads."""
    rows = rows_of(host_events["name"], *_WORK, _CONVOLUTION) & rows_of(host_events["category"], "operator")
    found: NDArray[np.bool_] = rows & host_events["shapes"].is_valid().to_numpy()
    return found


def products(host_events: pa.Table, device_events: pa.Table, kernel_names: pa.Table, counted: Counted) -> pa.Table:
    """One row per operator, input shapes and precision, over the whole capture, most device time first.

    Returns:
        `count` of calls that launched compute, `device_ns` of all of it, `flops` of a call, `tflops` (10¹² per second of
        device time), `flops_per_byte`: arithmetic intensity, if each input is read once and the output written once.
        `precision` (fp8, bf16, fp16, tf32, fp32, fp64) is that of `kernel`, the first product that the operator launches; null
        if its name does not say. `flops` is null where the dimensions do not say. The columns of `sampled.MEASURES`: means of
        hardware counters while its compute ran; null unless nsys sampled them, and where a call takes less than a sample.
    """
    calls = host_events.filter(pa.array(host_rows(host_events)))
    compute = pa.array(rows_of(device_events["kind"], "compute"))
    events, names = device_events.filter(compute), kernel_names.filter(compute)
    at_work = counted.amounts[compute.to_numpy(zero_copy_only=False)]
    launched, device_ns, *measured = launched_inside(ranged(calls), events, at_work)
    amounts = {f"amount_{place}": column for place, column in enumerate(measured)}
    table = pa.table(
        {
            "operator": calls["name"],
            "shapes": calls["shapes"],
            "kernel": _first_products(ranged(calls), events, names["name"]),
            "device_ns": device_ns,
            **amounts,
        }
    ).filter(pa.array(launched > 0))
    table = table.append_column(
        "precision", pa.array([name and product_precision(name) for name in table["kernel"].to_pylist()], pa.string())
    )
    keys = ("operator", "shapes", "precision")
    sums = {name: (name, "sum") for name in ("device_ns", *amounts)}
    found = totals(table, keys, count=("device_ns", "count"), kernel=("kernel", "first"), **sums).sort_by(
        [("device_ns", "descending"), *((key, "ascending") for key in keys)]
    )
    rows = found.to_pylist()
    outputs = _outputs(rows)
    for row in rows:
        work, size = _work(row["operator"], row["shapes"], outputs), _BYTES.get(row["precision"] or "")
        flops, elements = work or (None, None)
        row["flops"] = flops
        row["tflops"] = flops * row["count"] / row["device_ns"] / 1e3 if flops and row["device_ns"] else None
        row["flops_per_byte"] = flops / elements / size if flops and elements and size else None
    table = pa.Table.from_pylist(rows, schema=declared("MatrixProduct").schema(*_COLUMNS))
    return pa.table(dict(zip(_COLUMNS, table.columns, strict=True)) | counted.means_of_calls(found, list(amounts)))


def matrix_products(products: pa.Table, infos: list[RankInfo]) -> pa.Table:
    """The rows of `products`, with what the device could do at most, and what its memory did; null where that is unknown.

    Needs recorded shapes (`record_shapes`).

    Returns:
        `peak_tflops`: its dense peak for the precision, and `share_of_peak`. `memory_tb_s`: bandwidth of its memory.
        `roof_tflops`: the lower of the peak and of `flops_per_byte` times the bandwidth (Williams, Waterman and Patterson:
        Roofline, 2009), and `share_of_roof`. `dram_tb_s`: bytes read from its memory and written to it, by hardware counters,
        and `measured_flops_per_byte`: arithmetic intensity with these bytes.
    """
    names = {info.rank: next(iter(info.devices.values()), "") for info in infos}
    peaks_of = {rank: peaks(name) for rank, name in names.items()}
    bandwidth_of = memory_tb_s(products["rank"], infos)
    dram = traffic(products, bandwidth_of)
    kinds = zip(products["rank"].to_pylist(), products["precision"].to_pylist(), strict=True)
    known = [peaks_of.get(rank, {}).get("bf16" if precision == "fp16" else precision or "") for rank, precision in kinds]
    peak = pa.array(known, pa.float64())
    roof = pc.min_element_wise(peak, pc.multiply(products["flops_per_byte"], bandwidth_of), skip_nulls=False)
    for name, column in {
        "peak_tflops": peak,
        "share_of_peak": pc.divide(products["tflops"], peak),
        "memory_tb_s": bandwidth_of,
        "roof_tflops": roof,
        "share_of_roof": pc.divide(products["tflops"], roof),
    }.items():
        products = products.append_column(name, column)
    measured = pc.divide(products["tflops"], pc.if_else(pc.greater(dram, 0), dram, None))
    return products.append_column("dram_tb_s", dram).append_column("measured_flops_per_byte", measured)


def _first_products(calls: Ranged, events: pa.Table, kernels: pa.ChunkedArray) -> pa.Array:
    """For each call, the name of the first matrix product or fused attention launched in it; null if there is none."""
    code, names = coded(kernels)
    rows = np.flatnonzero(judged(code, names, is_product_or_attention))
    at, at_thread = (to_int64(events[name])[rows] for name in ("launch_start_ns", "launch_thread"))
    order, first, last = inside(calls, (at_thread, at))
    found = np.append(code[rows[order]], -1)[np.where(first < last, first, -1)]
    return pa.array(names, pa.string()).take(pa.array(found, mask=found < 0))


def _dimensions(shapes: str) -> Dimensions:
    try:
        found = json.loads(shapes)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(each, list) for each in found) else []


def _outputs(rows: Sequence[dict[str, str]]) -> dict[str, list[int]]:
    """Dimensions of convolutions' outputs by those of input and weight, from the backward pass; without ambiguous ones."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row["operator"] == "aten::convolution_backward":
            shapes = _dimensions(row["shapes"])[:3]
            if len(shapes) == 3 and found.setdefault(str(shapes[1:]), list(shapes[0])) != shapes[0]:
                found[str(shapes[1:])] = []
    return found


def _work(operator: str, shapes: str, outputs: dict[str, list[int]]) -> tuple[float, float] | None:
    """Floating-point operations and elements of a call; None if its dimensions do not say."""
    try:
        dimensions = _dimensions(shapes)
        if operator != _CONVOLUTION:
            flops, elements = _WORK[operator](dimensions)
        else:
            inputs, weight = dimensions[:2]
            output = outputs.get(str([inputs, weight]))
            if not output:
                return None
            flops, elements = 2 * prod(output) * prod(weight[1:]), prod(output) + prod(inputs) + prod(weight)
        return (float(flops), float(elements)) if flops > 0 and elements > 0 else None
    # An operator of another version has other inputs, and a damaged file has any.
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
