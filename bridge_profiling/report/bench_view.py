"""Benchmarks in words: a run compared with results of `bridge-profiling bench`, and such a result itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from bridge_profiling.compare.bench import AgainstBench
from bridge_profiling.report import words
from bridge_profiling.report.rows import group_name
from bridge_profiling.report.tables import most
from bridge_profiling.report.views import Row, SectionView, TableView, ms, of, table

#: Kinds of communication in sentences, and rows in tables: those with the most time.
_SAID, _SHOWN = 3, 24

#: From this share on, the run is as fast as the benchmark.
_AS_FAST = 0.95


def section(bench: AgainstBench | None) -> SectionView:
    """A run compared with a benchmark, in sentences and tables; empty without one."""
    title = "Comparison with benchmarks"
    if bench is None:
        return SectionView("bench", title)
    where = f"{bench.path}, found next to the captures" if bench.found else bench.path
    text = f"The benchmarks ({where}) ran the same operations at the same sizes on as many ranks, with nothing else running."
    said = list(_sentences(bench)) or ["Nothing in it can be compared with these captures."]
    return SectionView("bench", title, [text, *said], tables=alone_tables(bench))


def _sentences(bench: AgainstBench) -> Iterator[str]:
    communication = _by_time(bench)
    for row in [row for row in communication if row["reached_share"] is not None][:_SAID]:
        group = " on ".join(filter(None, (group_name(row["group"]), _ranks(row))))
        yield f"{row['operation']} in group {group} {_reached(row, 'bus_bandwidth_gbs')}"
    for row in bench.copies.to_pylist():
        if row["reached_share"] is not None:
            yield f"{row['direction']} of {row['host_memory']} memory {_reached(row, 'bandwidth_gbs')}"
    step, loader = bench.step, bench.data_loader
    if step is not None and not step["reason"]:
        yield (
            f"Step {step['subject']} takes {words.milliseconds(step['alone_us'])} in the benchmark; an iteration here takes "
            f"{words.milliseconds(step['iteration_us'])} (median of {step['of']})."
        )
    if loader is not None and not loader["reason"]:
        yield (
            f"Data loader {loader['subject']} returns a batch every {words.milliseconds(loader['batch_us'])} at best; an "
            f"iteration here takes {words.milliseconds(loader['iteration_us'])} (median of {loader['of']})."
        )
    for name, other in (("step", step), ("data loader", loader)):
        if other is not None and other["reason"]:
            yield f"Not compared: {name} {other['subject']}: {other['reason']}."
    reasons = dict.fromkeys(row["reason"] for row in [*communication, *bench.copies.to_pylist()] if row["reason"])
    yield from (f"Not compared: {reason}." for reason in list(reasons)[:_SAID])


def _reached(row: Row, bandwidth: str) -> str:
    share = words.percent(row["reached_share"])
    speeds = f"({words.bandwidth(row[bandwidth])} of {words.bandwidth(row[f'alone_{bandwidth}'])} GB/s)"
    if row["reached_share"] >= _AS_FAST:
        return f"is as fast as in the benchmark: {share} {speeds}."
    return f"reached {share} of the benchmark's bandwidth {speeds}."


def alone_tables(bench: AgainstBench) -> list[TableView]:
    """Communication and copies compared with the benchmark."""
    shown, note = most(_by_time(bench), _SHOWN)
    operation: dict[str, Any] = {"operation": itemgetter("operation"), "group": _group}
    kind = {"copies": itemgetter("direction"), "memory": itemgetter("host_memory")}
    title = f"Communication compared with the benchmark ({bench.path})"
    communication = operation | _reached_columns("bus_bandwidth_gbs", "transfer_us")
    copies = kind | _reached_columns("bandwidth_gbs", "copy_us")
    found = [
        table("bench-communication", title, shown, communication, note=note, python="against_bench.communication"),
        table(
            "bench-copies",
            "Copies compared with the benchmark",
            bench.copies.to_pylist(),
            copies,
            python="against_bench.copies",
        ),
    ]
    return [each for each in found if each.rows]


def _reached_columns(bandwidth: str, duration: str) -> dict[str, Any]:
    return {
        "share of benchmark": of("reached_share", words.percent),
        "GB/s": of(bandwidth, words.bandwidth),
        "benchmark GB/s": of(f"alone_{bandwidth}", words.bandwidth),
        "ms": ms(duration),
        "benchmark ms": ms("alone_us"),
        "compared": lambda row: f"{row['compared_count']:,} of {row['count']:,}",
    }


def _by_time(bench: AgainstBench) -> list[dict[str, Any]]:
    return sorted(bench.communication.to_pylist(), key=lambda row: -(row["transfer_us"] or 0.0))


def _ranks(row: Row) -> str:
    """The ranks of a group, if they are few."""
    members = json.loads(row["group_ranks"] or "[]")
    return words.ranks(members) if 0 < len(members) <= 8 else ""


def _group(row: Row) -> str:
    return ", ".join(filter(None, (group_name(row["group"]), _ranks(row))))


def result_table(result: dict[str, Any]) -> TableView:
    """One result of `bridge-profiling bench`, as written to its document."""
    title, columns = _RESULTS[result["kind"]](result)
    return table(result["kind"], title, result["rows"], columns)


def recommendation(result: dict[str, Any]) -> str:
    """Which data loader settings to use; "" for other results."""
    chosen = result.get("recommendation")
    if chosen is None:
        return ""
    prefetch = f", prefetch_factor={chosen['prefetch']}" if chosen["prefetch"] else ""
    return f"Use num_workers={chosen['workers']}, pin_memory={chosen['pin_memory']}{prefetch}: {chosen['reason']}"


_Columns = tuple[str, dict[str, Callable[[Any], Any]]]


def _correct(row: Row) -> str:
    return "yes" if row["correct"] else "NO"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _bounds(name: str, text: Callable[[float], str]) -> Callable[[Row], str]:
    def bounds(row: Row) -> str:
        estimate = row[name]
        if estimate is None:
            return words.UNKNOWN
        if estimate["low"] is None or estimate["high"] is None:
            return f"{words.UNKNOWN} of {estimate['count']}"
        return f"{text(estimate['low'])}–{text(estimate['high'])}"

    return bounds


def _estimate(name: str, part: str, text: Callable[[float], str] = words.number) -> Callable[[Row], str]:
    return lambda row: words.UNKNOWN if row[name] is None else text(row[name][part])


_TIME = {
    "µs": _estimate("time_us", "median", _digits),
    "95% of medians": _bounds("time_us", _digits),
}


def _collectives(result: dict[str, Any]) -> _Columns:
    where = f"{result['world_size']} ranks on {words.counted(result['hosts'], 'host')}"
    return f"communication of {where}, {result['backend']}, {result['dtype']}, {result['device']}", {
        "operation": lambda row: row["operation"].replace("_", "-"),
        "message": of("message_bytes", words.binary_size),
        **_TIME,
        "algorithm GB/s": of("algorithm_bandwidth_gbs", words.bandwidth),
        "bus GB/s": of("bus_bandwidth_gbs", words.bandwidth),
        "correct": _correct,
    }


def _copies(result: dict[str, Any]) -> _Columns:
    return f"copies, {result['device']}", {
        "kind": lambda row: f"{row['direction']} {row['host_memory']}",
        "size": of("bytes", words.binary_size),
        **_TIME,
        "GB/s": of("bandwidth_gbs", words.bandwidth),
        "correct": _correct,
    }


def _data_loader(result: dict[str, Any]) -> _Columns:
    # The mean over the whole time is what training gets; the bounds are those of the median, which pauses hardly affect.
    return f"data loader {result['subject']} alone", {
        "workers": of("workers", str),
        "pinned": lambda row: "yes" if row["pin_memory"] else "no",
        "prefetch": of("prefetch"),
        "batches/s": _estimate("batches_per_s", "mean"),
        "median": _estimate("batches_per_s", "median"),
        "95% of medians": _bounds("batches_per_s", words.number),
        "samples/s": _estimate("samples_per_s", "mean"),
        "first batch, s": of("first_batch_s", lambda value: words.UNKNOWN if value is None else f"{value:.2f}"),
        "status": lambda row: row["status"],
    }


def _step(result: dict[str, Any]) -> _Columns:
    def in_ms(value: float) -> str:
        return f"{value / 1e3:.4g}"

    return f"step {result['subject']}, {result['device']}", {
        "iterations": lambda row: f"{row['iterations']} after {row['warmup']} to warm up",
        "ms": _estimate("time_us", "median", in_ms),
        "95% of medians": _bounds("time_us", in_ms),
        "mean ms": _estimate("time_us", "mean", in_ms),
        "iterations/s": _estimate("iterations_per_s", "median"),
        "samples/s": _estimate("samples_per_s", "median"),
    }


_RESULTS = {"collectives": _collectives, "copies": _copies, "data_loader": _data_loader, "step": _step}
