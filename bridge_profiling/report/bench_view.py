"""Benchmarks in words: a run compared with results of `bridge-profiling bench`, and such a result itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bridge_profiling.compare.bench import AgainstBench
from bridge_profiling.facts.words import named_ranks
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
    text = words.say("bench", path=bench.file, found=", found next to the captures" if bench.found_beside_captures else "")
    said = list(_sentences(bench)) or [words.say("bench_nothing")]
    return SectionView("bench", title, [text, *said], tables=alone_tables(bench))


def _sentences(bench: AgainstBench) -> Iterator[str]:
    communication, copies = _by_time(bench), bench.copies.to_pylist()
    for row in [row for row in communication if row["reached_share"] is not None][:_SAID]:
        yield _reached(f"{row['operation']} in group {_group(row, ' on ')}", row, "bus_bandwidth_gbs")
    for row in copies:
        if row["reached_share"] is not None:
            yield _reached(f"{row['direction']} of {row['host_memory']} memory", row, "bandwidth_gbs")
    alone = {name: found for name, found in (("step", bench.step), ("data loader", bench.data_loader)) if found is not None}
    yield from (words.say(f"bench {name}", found) for name, found in alone.items() if not found["reason"])
    yield from (
        f"Not compared: {name} {found['subject']}: {found['reason']}." for name, found in alone.items() if found["reason"]
    )
    reasons = dict.fromkeys(row["reason"] for row in [*communication, *copies] if row["reason"])
    yield from (f"Not compared: {reason}." for reason in list(reasons)[:_SAID])


def _reached(subject: str, row: Row, bandwidth: str) -> str:
    name = "bench_as_fast" if row["reached_share"] >= _AS_FAST else "bench_reached"
    return words.say(name, subject, share=row["reached_share"], speed=row[bandwidth], alone=row[f"alone_{bandwidth}"])


def alone_tables(bench: AgainstBench) -> list[TableView]:
    """Communication and copies compared with the benchmark."""
    communication = [row | {"group": _group(row, ", ")} for row in _by_time(bench)]
    found = [
        tables.view("bench-communication", communication, _SHOWN, path=bench.file),
        tables.view("bench-copies", bench.copies.to_pylist()),
    ]
    return [each for each in found if each.rows]


def _by_time(bench: AgainstBench) -> list[dict[str, Any]]:
    return sorted(bench.communication.to_pylist(), key=lambda row: -(row["transfer_ns"] or 0.0))


def _group(row: Row, separator: str) -> str:
    """A group, and its ranks if they are few."""
    members = json.loads(row["group_ranks"] or "[]")
    return separator.join(filter(None, (group_name(row["group"]), named_ranks(members) if 0 < len(members) <= 8 else "")))


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
