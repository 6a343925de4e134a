"""The page's sections that have a row for each rank: the step's budget, ranks × iterations, who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from bridge_profiling.analysis.attribution.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.report import rank_choice, wording
from bridge_profiling.report.answers import Answers
from bridge_profiling.report.figures.budget import PARTS, VIEWS, budget_figure, parts_that_matter
from bridge_profiling.report.figures.iterations import MEASURES, MOST_ROWS, iterations_figure
from bridge_profiling.report.figures.waits import wait_matrix, waits_figure
from bridge_profiling.report.page_parts import Figures, Table

_TIMES = ("duration_us", *dict.fromkeys((*BY_CAUSE, *BY_ACTIVITY)))


def budget_section(answers: Answers, shown: Sequence[int], figures: Figures) -> dict[str, Any]:
    """A stacked bar per rank; of many ranks one per stage, and those worth a look by name.

    Args:
        answers: about the run.
        shown: ranks with a row of their own.
        figures: the section's are added.
    """
    rows = answers.summary.budget
    if not rows:
        return {}
    bars = budget_bars(answers, shown)
    figures["budget"] = {view: budget_figure(bars, view) for view in VIEWS}
    parts = ["duration_us", *parts_that_matter(bars), *(part for part in BY_ACTIVITY[1:])]
    table = Table(
        ["ms", *(_part_name(part) for part in parts)],
        [[bar["label"], *(wording.milliseconds(bar[part], 2).removesuffix(" ms") for part in parts)] for bar in bars],
    )
    return {
        "table": table,
        "aggregated": len(rows) > len(bars) or len(rows) > rank_choice.EVERY_RANK,
        "ranks": len(rows),
        "waiting_known": all(row["waiting_known"] for row in rows),
        "quantiles": _quantiles(rows) if len(rows) > rank_choice.EVERY_RANK else None,
    }


def budget_bars(answers: Answers, shown: Sequence[int]) -> list[dict[str, Any]]:
    """What the budget's bars show: the ranks shown, after the mean of each stage where not every rank is."""
    rows = answers.summary.budget
    by_rank = {row["rank"]: row for row in rows}
    slow = {row["rank"] for row in answers.stragglers if row["verdict"] == "stable"}
    bars = []
    if len(rows) > rank_choice.EVERY_RANK:
        for stage, members in rank_choice.stages(answers.summary.infos).items():
            mine = [by_rank[rank] for rank in members if rank in by_rank]
            if mine:
                means = {part: fmean(row[part] for row in mine) for part in _TIMES}
                bars.append({"label": f"{stage}, mean of {len(mine)}", **means})
    for rank in shown:
        if rank in by_rank:
            bars.append({**by_rank[rank], "label": f"rank {rank}{' (slow)' if rank in slow else ''}"})
    return bars


def iterations_section(answers: Answers, figures: Figures) -> dict[str, Any]:
    """Ranks × iterations.

    Args:
        answers: about the run.
        figures: the section's are added.
    """
    rows = answers.ranks
    if not rows:
        return {}
    measures = {name: words for name, words in MEASURES.items() if any(row[name] is not None for row in rows)}
    figures["iterations"] = {name: iterations_figure(rows, name) for name in measures}
    count = len({row["rank"] for row in rows})
    return {
        "measures": measures,
        "block": -(-count // MOST_ROWS) if count > MOST_ROWS else 1,
        "slowest": _slowest(rows),
    }


def waits_section(answers: Answers, figures: Figures) -> dict[str, Any]:
    """Who waits for whom, and the stragglers.

    Args:
        answers: about the run.
        figures: the section's are added.
    """
    iterations = len({row["iteration"] for row in answers.ranks}) or 1
    waits = [
        row for row in answers.waits if row["iteration"] is not None or all(each["iteration"] is None for each in answers.waits)
    ]
    ranks = answers.summary.ranks
    if len(ranks) < 2:
        return {"alone": True}
    matrix = wait_matrix(waits, iterations, ranks)
    if waits:
        figures["waits"] = {"waits": waits_figure(matrix)}
    pairs = sorted(
        (
            (matrix.wait_us[row][column], matrix.ranks[row], matrix.ranks[column])
            for row in range(len(matrix.ranks))
            for column in range(len(matrix.ranks))
            if matrix.wait_us[row][column] > 0
        ),
        reverse=True,
    )
    rows = answers.stragglers[: rank_choice.NAMED_RANKS]
    stragglers = Table(
        ["rank", "slow", "own time beyond the mean", "compute beyond the mean", "others waited for it", "slow iterations"],
        [
            [
                f"rank {row['rank']}",
                _verdict(row),
                *(wording.milliseconds(row[name]) for name in ("excess_own_us", "excess_compute_us", "waited_for_us")),
                f"{row['times_slow']} of {row['iterations']}",
            ]
            for row in rows
        ],
    )
    return {
        "pairs": [(wording.milliseconds(wait), rank, other) for wait, rank, other in pairs[:5]],
        "shown": matrix.shown,
        "ranks": len(matrix.ranks),
        "everyone": len(ranks),
        "stragglers": stragglers if stragglers.rows else None,
        "more": len(answers.stragglers) - len(rows),
    }


def _verdict(row: Mapping[str, Any]) -> str:
    words = {"stable": "always", "sometimes": "now and then", "no": "no"}.get(row["verdict"], row["verdict"])
    return f"{words} ({row['confidence']} confidence)" if row["confidence"] else words


def _slowest(rows: Sequence[Mapping[str, Any]]) -> str:
    """How often each rank was the slowest, in words."""
    times: dict[int, int] = {}
    for row in rows:
        if row["place"] == "slowest":
            times[row["rank"]] = times.get(row["rank"], 0) + 1
    total = sum(times.values())
    if not total:
        return ""
    often = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    words = [f"rank {rank} in {count} of {total}" for rank, count in often[:4]]
    more = f", and {len(often) - 4} other ranks in the rest" if len(often) > 4 else ""
    return f"Slowest of all by its own time: {', '.join(words)} iterations{more}."


def _quantiles(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How the ranks of a large job are spread."""

    def at(values: Sequence[float], share: float) -> float:
        return sorted(values)[min(int(share * len(values)), len(values) - 1)]

    lines = []
    for part in ("duration_us", *parts_that_matter(rows), *BY_ACTIVITY[1:]):
        values = [row[part] for row in rows]
        spread = (min(values), at(values, 0.05), median(values), at(values, 0.95), max(values))
        lines.append([_part_name(part), *(wording.milliseconds(value) for value in spread)])
    return Table(["", "least", "5% of the ranks below", "median", "5% above", "most"], lines)


def _part_name(part: str) -> str:
    return "iteration" if part == "duration_us" else PARTS[part][0]
