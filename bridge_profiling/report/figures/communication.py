"""Communication by operation and group: transfer and waiting beside each other, and the bandwidth of the transfer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bridge_profiling.report.figures.style import COLOURS, Figure, axis, figure

#: More groups than this are put together by name.
MOST_GROUPS = 24


def by_group(rows: Sequence[Mapping[str, Any]], iterations: int) -> list[dict[str, Any]]:
    """What each kind of communication takes of an iteration, the most first; of many groups, those of one name and size as one.

    Args:
        rows: of `Run.communication`.
        iterations: how many they are of; 1 for captures without any.

    Returns:
        label; operation, group, ranks in words; count and bytes of an iteration; transfer_us; wait_us of the mean rank;
        algorithm_bandwidth_gbs and bus_bandwidth_gbs; of several groups put together, means and, of bandwidths, medians.
    """
    together: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key: tuple[Any, ...] = (row["operation"], row["group"], row["group_size"])
        if len(rows) <= MOST_GROUPS:
            key = (*key, row["group_name"], row["group_ranks"])
        together.setdefault(key, []).append(row)
    found = [_together(mine, iterations) for mine in together.values()]
    return sorted(found, key=lambda row: -((row["transfer_us"] or 0.0) + (row["wait_us"] or 0.0)))


def _together(rows: Sequence[Mapping[str, Any]], iterations: int) -> dict[str, Any]:
    first, count = rows[0], len(rows)
    group, operation = first["group"] or "unknown group", first["operation"] or "?"
    if count > 1:
        members = f"{count} groups of {first['group_size']}"
    elif first["group_ranks"] is None:
        members = "?"
    else:
        members = _members(json.loads(first["group_ranks"]))
    participants = sum(row["captured_ranks"] or 0 for row in rows)
    wait = _sum(rows, "wait_us")
    return {
        "label": f"{operation} · {_short(group)} [{members}]",
        "operation": operation,
        "group": _short(group),
        "ranks": members,
        "count": sum(row["count"] for row in rows) / iterations / count,
        "bytes": _divided(_sum(rows, "bytes"), iterations * count),
        "transfer_us": _divided(_sum(rows, "transfer_us"), iterations * count),
        "wait_us": _divided(wait, iterations * max(participants, 1)),
        "algorithm_bandwidth_gbs": _median(rows, "algorithm_bandwidth_gbs"),
        "bus_bandwidth_gbs": _median(rows, "bus_bandwidth_gbs"),
    }


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return sum(known) if known else None


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return median(known) if known else None


def _divided(amount: float | None, by: int) -> float | None:
    return None if amount is None else amount / by


def _members(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} … {ranks[-1]}"


def _short(group: str) -> str:
    """Megatron's names of groups without what all have in common."""
    return group.removesuffix("_GROUP").replace("_", " ").lower()


def communication_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Transfer and waiting of each kind of communication in an iteration.

    Args:
        rows: of `by_group`; those of which transfer is unknown have no bar.
    """
    rows = [row for row in rows if row["transfer_us"] is not None]
    labels = [row["label"] for row in rows]
    bars = []
    for part, name, colour in (
        ("transfer_us", "transfer", "communication"),
        ("wait_us", "waiting for the last rank to come, mean of the ranks", "waiting"),
    ):
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": [None if row[part] is None else round(row[part] / 1e3, 4) for row in rows],
                "marker": {"color": COLOURS[colour]},
                "hovertemplate": "%{y}<br>%{x:.3f} ms of an iteration<extra>" + name.split(" ")[0] + "</extra>",
            }
        )
    return figure(
        bars,
        120 + max(len(rows), 2) * 30,
        barmode="stack",
        bargap=0.3,
        margin={"l": 240, "r": 20, "t": 40, "b": 50},
        xaxis=axis("ms of an iteration"),
        yaxis={**axis(""), "autorange": "reversed", "type": "category", "dtick": 1, "showgrid": False},
    )
