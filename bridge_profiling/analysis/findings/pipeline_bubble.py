"""Pipeline stages that wait for one another: because one has more to do than the others, or because microbatches are few.

A schedule's microbatches pass the longest stage one after the other, so the pipeline lasts as if every stage were as long:
(m + p - 1) / m times the longest stage's work, for m microbatches and p stages. Were the work split evenly, the longest stage
would be as long as the mean one, and what that saves is the cost of uneven stages. A stage is judged by the one of its ranks
that computes least, so that a slow rank is not mistaken for a long stage.

Work is moved between stages in whole layers, which helps only where two stages differ by more than one: a last stage that is
longer by its output layer alone, and by less than a layer, is as even as can be. How many layers a stage has is told from its
kernels: each runs a multiple of that many times in a microbatch, but for those of embeddings, output and optimizer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge_profiling.analysis.caveats import name_ranks
from bridge_profiling.analysis.findings.books import Grid
from bridge_profiling.analysis.findings.context import Context
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding

#: The kernels of layers are at least this part of a stage's compute.
_OF_LAYERS = 0.7

#: More layers than this has no stage; where their number cannot be told, a stage is taken to have this few.
_MOST_LAYERS, _FEW_LAYERS = 256, 4

#: A schedule that loses more than this at best has too few microbatches: less than three for every stage but one.
_SCHEDULE_WASTES = 0.25

_MORE_MICROBATCHES = (
    "More microbatches (a larger train.global_batch_size, or a smaller train.micro_batch_size if the GPU stays busy), an "
    "interleaved schedule (model.virtual_pipeline_model_parallel_size), or fewer pipeline stages."
)


def find(context: Context) -> list[Finding]:
    """One finding for the run's pipelines, if uneven stages or too few microbatches cost more than the threshold.

    Args:
        context: of one run.
    """
    stages = context.run.pipeline().to_pylist()
    if len(stages) < 2:
        return []
    compute = _compute_of_stages(context, [row["stage"] for row in stages])
    mean, longest = float(np.mean(list(compute.values()))), max(compute, key=lambda stage: compute[stage])
    count, microbatches = stages[0]["stages"], stages[0]["microbatches"]
    # Interleaved schedules fill and drain in less; of them only the longest stage's own time is certain.
    passes = (microbatches + count - 1) / microbatches if microbatches else 1.0
    uneven_us = (compute[longest] - mean) * passes if len(stages) == count else 0.0
    ideal = stages[0]["ideal_bubble_fraction"]
    shortest = min(compute, key=lambda stage: compute[stage])
    by_stage = {row["stage"]: row for row in stages}
    layers = _layers(context, by_stage[shortest]["ranks"][0], microbatches)
    layer_us = compute[shortest] / (layers or _FEW_LAYERS)
    movable = compute[longest] - compute[shortest] > layer_us
    uneven = movable and context.share(uneven_us) > context.thresholds.cause
    few = ideal is not None and ideal > _SCHEDULE_WASTES and _bubble_share(stages) > _SCHEDULE_WASTES
    if not uneven and not few:
        return []
    recoverable = context.claim(_lost(context, by_stage[longest]["ranks"], uneven_us if uneven else 0.0))
    if few:
        recoverable += context.claim(_bubbles(context), waited=True)
    confidence, reason = _confidence(context, stages, count)
    blamed = by_stage[longest]["ranks"] if uneven else sorted(rank for row in stages for rank in row["ranks"])
    return [
        Finding(
            id="pipeline_bubble",
            title=_title(context, by_stage, compute, mean, longest, uneven, microbatches),
            ranks=blamed,
            evidence={
                "stages": [_stage(row, compute[row["stage"]], mean) for row in stages],
                "longest_stage": longest if uneven else None,
                "uneven_stages_us": uneven_us,
                "layers_of_shortest_stage": layers,
                "microbatches": microbatches,
                "bubble_fraction": _bubble_share(stages),
                "ideal_bubble_fraction": ideal,
            },
            recoverable_us_per_iteration=recoverable,
            confidence=confidence,
            confidence_reason=reason,
            action=" ".join([*([_split(longest, count)] if uneven else []), *([_MORE_MICROBATCHES] if few else [])]),
            events=[
                Event(row["ranks"][0], f"bubble of stage {row['stage']}", duration_us=row["bubble_us"])
                for row in sorted(stages, key=lambda row: -row["bubble_us"])
            ],
        )
    ]


def _compute_of_stages(context: Context, stages: list[int]) -> dict[int, float]:
    """What each stage has to compute in a typical iteration, by the quickest of its ranks."""
    rows = context.run.pipeline(by_rank=True)
    typical = context.typical_us(context.grid(rows, "compute_us"))
    ranks = {stage: {row["rank"] for row in rows.to_pylist() if row["stage"] == stage} for stage in stages}
    return {stage: min((typical[rank] for rank in ranks[stage] if rank in typical), default=0.0) for stage in stages}


def _layers(context: Context, rank: int, microbatches: int | None) -> int | None:
    """How many layers a rank's stage has; None when its kernels do not tell."""
    if not microbatches:
        return None
    captured = max(context.iterations["rank"].to_pylist().count(rank), 1)
    counts, times = [], []
    for row in context.run.kernels().to_pylist():
        if row["source"] == context.source and row["rank"] == rank and row["kind"] == "compute":
            counts.append(row["count"] / captured / microbatches)
            times.append(row["total_us"])
    count, time = np.array(counts), np.array(times)
    enough = _OF_LAYERS * time.sum()
    dividing = (each for each in range(_MOST_LAYERS, 0, -1) if time[(count % each == 0) & (count > 0)].sum() >= enough)
    return next(dividing, None)


def _bubble_share(stages: list[dict[str, Any]]) -> float:
    """The bubble of the mean stage as a share of the pipeline's time."""
    return float(np.mean([row["bubble_fraction"] or 0.0 for row in stages]))


def _lost(context: Context, ranks: list[int], uneven_us: float) -> Grid:
    """The longest stage holds all up by what it has beyond the mean stage."""
    chosen = np.array([rank in ranks for rank in context.ranks])
    return np.where(np.isnan(context.duration_us), np.nan, np.where(chosen, uneven_us, 0.0))


def _bubbles(context: Context) -> Grid:
    return context.grid(context.run.pipeline(by_rank=True), "bubble_us")


def _confidence(context: Context, stages: list[dict[str, Any]], count: int) -> tuple[Confidence, str]:
    if len(stages) < count:
        return Confidence.medium, f"only {len(stages)} of {count} stages are captured"
    if stages[0]["microbatches"] is None:
        return Confidence.medium, "the schedule is interleaved: what it costs at best is not known"
    return context.confidence()


def _title(
    context: Context,
    stages: dict[int, dict[str, Any]],
    compute: dict[int, float],
    mean: float,
    longest: int,
    uneven: bool,
    microbatches: int | None,
) -> str:
    if uneven:
        return (
            f"Pipeline stage {longest} ({name_ranks(stages[longest]['ranks'])}) computes "
            f"{(compute[longest] - mean) / 1e3:.1f} ms longer than the mean stage in each {context.per}: the others wait for it"
        )
    waits = _bubble_share(list(stages.values()))
    return f"Pipeline stages wait {waits:.0%} of the time: {microbatches} microbatches are few for {len(stages)} stages"


def _stage(row: dict[str, Any], compute_us: float, mean_us: float) -> dict[str, Any]:
    names = ("stage", "ranks", "pipeline_us", "bubble_us", "warm_up_us", "steady_us", "cool_down_us", "other_idle_us")
    return {name: row[name] for name in (*names, "bubble_fraction")} | {
        "compute_us": compute_us,
        "excess_compute_us": compute_us - mean_us,
    }


def _split(longest: int, count: int) -> str:
    """How to give the longest stage less to do."""
    if longest == 0:
        return (
            "Give the first stage less: model.account_for_embedding_in_pipeline_split=true, or a smaller "
            "model.num_layers_in_first_pipeline_stage (model.num_layers less those must divide among the other stages)."
        )
    if longest == count - 1:
        return (
            "Give the last stage less, which also has the output layer and the loss: "
            "model.account_for_loss_in_pipeline_split=true, or a smaller model.num_layers_in_last_pipeline_stage "
            "(model.num_layers less those must divide among the other stages)."
        )
    return (
        f"Give stage {longest} less: move layers to other stages (model.num_layers_in_first_pipeline_stage, "
        "model.num_layers_in_last_pipeline_stage, or model.pipeline_model_parallel_layout)."
    )
