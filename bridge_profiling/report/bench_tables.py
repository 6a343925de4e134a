"""Results of `bridge-profiling bench` as tables on a terminal; plain aligned columns in a pipe. Formats, measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from bridge_profiling.report import wording
from bridge_profiling.report.run_tables import Section, print_sections


def print_result(result: dict[str, Any], console: Console) -> None:
    """Print one result.

    Args:
        result: as a benchmark gives it.
        console: where to.
    """
    print_sections([_SECTIONS[result["kind"]](result)], result["limitations"], console)
    chosen = result.get("recommendation")
    if chosen is not None:
        prefetch = f", prefetch_factor={chosen['prefetch']}" if chosen["prefetch"] else ""
        console.print(
            f"take num_workers={chosen['workers']}, pin_memory={chosen['pin_memory']}{prefetch}: {chosen['reason']}",
            soft_wrap=True,
        )


def binary_size(amount: int) -> str:
    """A size as it is typed: "64 KiB", "1.5 MiB", "1000 B".

    Args:
        amount: bytes.
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= factor:
            return f"{amount / factor:.4g} {unit}"
    return f"{amount} B"


def _collectives(result: dict[str, Any]) -> Section:
    hosts = "1 host" if result["hosts"] == 1 else f"{result['hosts']} hosts"
    title = (
        f"communication of {result['world_size']} ranks on {hosts}, {result['backend']}, {result['dtype']}, {result['device']}"
    )
    rows = [
        [
            binary_size(row["message_bytes"]),
            *_time(row["time_us"]),
            *(wording.bandwidth(row[name]) for name in ("algorithm_bandwidth_gbs", "bus_bandwidth_gbs")),
            "yes" if row["correct"] else "NO",
            row["operation"].replace("_", "-"),
        ]
        for row in result["rows"]
    ]
    return Section(title, ["message", "µs", "95% of medians", "algorithm GB/s", "bus GB/s", "correct", "operation"], rows)


def _copies(result: dict[str, Any]) -> Section:
    rows = [
        [
            binary_size(row["bytes"]),
            *_time(row["time_us"]),
            wording.bandwidth(row["bandwidth_gbs"]),
            "yes" if row["correct"] else "NO",
            f"{row['direction']} {row['host_memory']}",
        ]
        for row in result["rows"]
    ]
    return Section(f"copies, {result['device']}", ["size", "µs", "95% of medians", "GB/s", "correct", "kind"], rows)


def _data_loader(result: dict[str, Any]) -> Section:
    rows = [
        [
            str(row["workers"]),
            "yes" if row["pin_memory"] else "no",
            "–" if row["prefetch"] is None else str(row["prefetch"]),
            *_rates(row["batches_per_s"]),
            "–" if row["samples_per_s"] is None else wording.number(row["samples_per_s"]["mean"]),
            "–" if row["first_batch_s"] is None else f"{row['first_batch_s']:.2f}",
            row["status"],
        ]
        for row in result["rows"]
    ]
    # The mean, of all the time together, is what a training gets; bounds are those of the median, which pauses hardly move.
    headings = ["workers", "pinned", "prefetch", "batches/s", "median", "95% of medians", "samples/s", "first batch, s", ""]
    return Section(f"data loader {result['subject']} alone", headings, rows)


def _step(result: dict[str, Any]) -> Section:
    rows = []
    for row in result["rows"]:
        time, rate = row["time_us"], row["iterations_per_s"]
        samples = "–" if row["samples_per_s"] is None else wording.number(row["samples_per_s"]["median"])
        rows.append(
            [
                f"{time['median'] / 1e3:.4g}",
                _bounds(time, lambda value: f"{value / 1e3:.4g}"),
                f"{time['mean'] / 1e3:.4g}",
                wording.number(rate["median"]),
                samples,
                f"{row['iterations']} after {row['warmup']} to warm up",
            ]
        )
    headings = ["ms", "95% of medians", "mean ms", "iterations/s", "samples/s", "iterations"]
    return Section(f"step {result['subject']}, {result['device']}", headings, rows)


_SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    "collectives": _collectives,
    "copies": _copies,
    "data_loader": _data_loader,
    "step": _step,
}


def _time(time_us: dict[str, Any]) -> list[str]:
    return [_digits(time_us["median"]), _bounds(time_us, _digits)]


def _rates(rate: dict[str, Any] | None) -> list[str]:
    if rate is None:
        return ["–", "–", "–"]
    return [wording.number(rate["mean"]), wording.number(rate["median"]), _bounds(rate, wording.number)]


def _bounds(estimate: dict[str, Any], shown: Callable[[float], str]) -> str:
    if estimate["low"] is None or estimate["high"] is None:
        return f"– of {estimate['count']}"
    return f"{shown(estimate['low'])}–{shown(estimate['high'])}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
