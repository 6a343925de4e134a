"""A capture beside benchmarks in words, for the terminal and the page. The comparison is `analysis.compare.bench`'s."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bridge_profiling.analysis.compare.bench import AgainstBench
from bridge_profiling.report import wording
from bridge_profiling.report.page_parts import Table

#: Kinds of communication that are said on the terminal, and rows on the page, those with the most time.
_SAID, _SHOWN = 3, 24

#: From this on it is as fast as alone.
_AS_FAST = 0.95


def sentences(bench: AgainstBench) -> list[str]:
    """What the terminal says.

    Args:
        bench: the comparison.
    """
    lines = []
    communication = _by_time(bench)
    for row in [row for row in communication if row["reached_share"] is not None][:_SAID]:
        lines.append(f"{_called(row)} {_reached(row, 'this link', 'bus_bandwidth_gbs')}")
    reasons = dict.fromkeys(row["reason"] for row in communication if row["reached_share"] is None)
    lines += [f"not compared: {reason}" for reason in list(reasons)[:_SAID] if reason]
    for row in bench.copies.to_pylist():
        if row["reached_share"] is not None:
            lines.append(f"{row['direction']} of {row['host_memory']} memory {_reached(row, 'it', 'bandwidth_gbs')}")
    lines += _paces(bench)
    return [headline(bench), *(f"  {line}" for line in lines or ["nothing in it can be compared with these captures"])]


def headline(bench: AgainstBench) -> str:
    """Which file it is compared with.

    Args:
        bench: the comparison.
    """
    return f"Beside what was measured alone ({bench.path}{', found beside the captures' if bench.found else ''}):"


def page_section(bench: AgainstBench | None) -> dict[str, Any]:
    """What the page shows; empty without a benchmark.

    Args:
        bench: the comparison.
    """
    if bench is None:
        return {}
    communication, copies = _by_time(bench), bench.copies.to_pylist()
    return {
        "headline": headline(bench),
        "communication": _table(
            communication[:_SHOWN], ["operation", "group"], _operation_and_group, "bus_bandwidth_gbs", "transfer_us"
        ),
        "left_out": max(len(communication) - _SHOWN, 0),
        "copies": _table(
            copies, ["copies", "memory"], lambda row: [row["direction"], row["host_memory"]], "bandwidth_gbs", "copy_us"
        ),
        "not_compared": list(dict.fromkeys(row["reason"] for row in [*communication[:_SHOWN], *copies] if row["reason"])),
        "paces": list(_paces(bench)),
    }


def _table(rows: list[dict[str, Any]], headings: list[str], names: Any, bandwidth: str, taken: str) -> Table | None:
    if not rows:
        return None
    return Table(
        [*headings, "reached of alone", "GB/s", "alone, GB/s", "took", "alone", "compared"],
        [
            [
                *names(row),
                wording.percent(row["reached_share"]),
                *(wording.bandwidth(row[each]) for each in (bandwidth, f"alone_{bandwidth}")),
                *(wording.milliseconds(row[each]) for each in (taken, "alone_us")),
                f"{row['compared_count']:,} of {row['count']:,}",
            ]
            for row in rows
        ],
    )


def _paces(bench: AgainstBench) -> Iterator[str]:
    step, loader = bench.step, bench.data_loader
    if step is not None and step["reason"]:
        yield f"step {step['subject']} not compared: {step['reason']}"
    elif step is not None:
        yield (
            f"step {step['subject']} takes {wording.milliseconds(step['alone_us'])} alone; an iteration here "
            f"{wording.milliseconds(step['iteration_us'])} (median of {step['of']})"
        )
    if loader is not None and loader["reason"]:
        yield f"data loader {loader['subject']} not compared: {loader['reason']}"
    elif loader is not None:
        yield (
            f"data loader {loader['subject']} gives a batch every {wording.milliseconds(loader['batch_us'])} at its best; an "
            f"iteration here takes {wording.milliseconds(loader['iteration_us'])} (median of {loader['of']})"
        )


def _by_time(bench: AgainstBench) -> list[dict[str, Any]]:
    return sorted(bench.communication.to_pylist(), key=lambda row: -(row["transfer_us"] or 0.0))


def _operation_and_group(row: Mapping[str, Any]) -> list[str]:
    operation, _, group = _called(row).partition(" of ")
    return [operation, group.replace("_", " ").lower()]


def _called(row: Mapping[str, Any]) -> str:
    members = json.loads(row["group_ranks"]) if row["group_ranks"] else None
    ranks = f" {wording.ranks(members)}" if members and len(members) <= 8 else ""
    return f"{row['operation']} of {row['group'] or 'an unnamed group'}{f',{ranks}' if ranks else ''}"


def _reached(row: Mapping[str, Any], what: str, bandwidth: str) -> str:
    speeds = f"({wording.bandwidth(row[bandwidth])} of {wording.bandwidth(row[f'alone_{bandwidth}'])} GB/s)"
    share = wording.percent(row["reached_share"])
    if row["reached_share"] >= _AS_FAST:
        return f"was as fast as {what} is alone: {share} {speeds}"
    return f"reached {share} of what {what} gave alone {speeds}"
