"""Benchmarks in words: a run compared with results of `bridge-profiling bench`, and such a result itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bridge_profiling.compare.bench import AgainstBench
from bridge_profiling.report import tables, words
from bridge_profiling.report.rows import group_name
from bridge_profiling.report.views import Row, SectionView, TableView

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
        yield f"{row['operation']} in group {_group(row, ' on ')} {_reached(row, 'bus_bandwidth_gbs')}"
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
    communication = [row | {"group": _group(row, ", ")} for row in _by_time(bench)]
    found = [
        tables.view("bench-communication", communication, _SHOWN, path=str(bench.path)),
        tables.view("bench-copies", bench.copies.to_pylist()),
    ]
    return [each for each in found if each.rows]


def _by_time(bench: AgainstBench) -> list[dict[str, Any]]:
    return sorted(bench.communication.to_pylist(), key=lambda row: -(row["transfer_us"] or 0.0))


def _group(row: Row, separator: str) -> str:
    """A group, and its ranks if they are few."""
    members = json.loads(row["group_ranks"] or "[]")
    return separator.join(filter(None, (group_name(row["group"]), words.ranks(members) if 0 < len(members) <= 8 else "")))


def result_table(result: dict[str, Any]) -> TableView:
    """One result of `bridge-profiling bench`, as written to its document."""
    said: dict[str, Any] = {name: str(value) for name, value in result.items() if isinstance(value, (str, int))}
    declared = "bench-of-copies" if result["kind"] == "copies" else result["kind"]
    on_hosts = words.counted(result.get("hosts", 1), "host")
    return tables.view(declared, result["rows"], shown_as=result["kind"], on_hosts=on_hosts, **said)


def recommendation(result: dict[str, Any]) -> str:
    """Which data loader settings to use; "" for other results."""
    chosen = result.get("recommendation")
    if chosen is None:
        return ""
    prefetch = f", prefetch_factor={chosen['prefetch']}" if chosen["prefetch"] else ""
    return f"Use num_workers={chosen['workers']}, pin_memory={chosen['pin_memory']}{prefetch}: {chosen['reason']}"
