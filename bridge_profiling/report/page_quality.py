"""The page's sections about the captures themselves: what was captured, how good it is, and where the raw traces lie."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bridge_profiling.report import rank_choice, wording
from bridge_profiling.report.answers import Answers
from bridge_profiling.report.page_parts import Table
from bridge_profiling.traces.types import RankInfo


def facts(answers: Answers) -> list[tuple[str, str]]:
    """What was captured, in a few words each.

    Args:
        answers: about the run.
    """
    infos = answers.summary.infos
    world = max((info.world_size or 0 for info in infos), default=0)
    ranks = f"{len(infos):,}" + (f" of {world:,}" if world > len(infos) else "")
    devices = sorted({name for info in infos for name in info.devices.values()})
    numbers = sorted({row["iteration"] for row in answers.iterations if row["iteration"] is not None})
    iterations = f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]) if numbers else "none marked"
    first = min((row["start_ns"] for row in answers.iterations), default=None)
    known = all(info.clock == "unix" for info in infos) and first is not None
    return [
        pair
        for pair in (
            ("ranks", ranks),
            ("layout", _layout(infos)),
            ("devices", ", ".join(devices[:3])),
            ("iterations", iterations),
            ("captured by", {"kineto": "torch.profiler", "nsys": "nsys"}.get(answers.summary.source, "")),
            ("captured at", datetime.fromtimestamp(first / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC") if known and first else ""),
        )
        if pair[1]
    ]


def quality_section(answers: Answers) -> dict[str, Any]:
    """Each rank's capture, and what cannot be told; of many ranks, those with something to say.

    Args:
        answers: about the run.
    """
    infos = answers.summary.infos
    manifests = {manifest.rank: manifest for manifest in answers.summary.manifests}
    iterations: dict[int, list[bool]] = {}
    for row in answers.iterations:
        iterations.setdefault(row["rank"], []).append(row["boundary"])
    rows, uneventful = [], 0
    for info in infos:
        manifest = manifests.get(info.rank)
        status = manifest.manifest.status if manifest else ("partial" if info.partial else "no manifest")
        offset = answers.offsets.get(info.rank)
        if len(infos) > rank_choice.EVERY_RANK and status in ("complete", "no manifest") and not info.error:
            uneventful += 1
            if uneventful > rank_choice.NAMED_RANKS:
                continue
        boundary = iterations.get(info.rank, [])
        rows.append(
            [
                f"rank {info.rank}",
                f"{status}{', cut short' if info.error else ''}",
                f"{len(boundary)}" + (f", {sum(boundary)} at the profiler's edges" if any(boundary) else ""),
                _median_ms(manifest.durations_ns(profiled=True) if manifest else []),
                _median_ms(manifest.durations_ns(profiled=False) if manifest else []),
                "–" if offset is None else f"{offset['offset_ns'] / 1e3:,.1f} µs",
                "–" if offset is None or offset["residual_ns"] is None else f"{offset['residual_ns'] / 1e3:,.1f} µs",
                info.host or "–",
            ]
        )
    headings = ["", "status", "iterations", "profiled", "not profiled", "clock offset", "residual", "host"]
    versions = sorted({f"{name} {version}" for info in infos for name, version in info.versions.items()})
    return {
        "table": Table(headings, rows),
        "left_out": max(uneventful - rank_choice.NAMED_RANKS, 0),
        "versions": [version.replace("_", " ") for version in versions[:12]],
        "limitations": answers.summary.limitations,
        "errors": answers.summary.errors,
    }


def raw_traces(answers: Answers, shown: list[int], output: Path) -> dict[str, Any]:
    """Where the raw traces lie, as seen from the page.

    Args:
        answers: about the run.
        shown: ranks with a row of their own.
        output: the page.
    """
    folder = output.absolute().parent
    files = []
    for info in answers.summary.infos:
        if info.rank in set(shown):
            for file in info.files:
                files.append({"rank": info.rank, "path": file, "name": Path(file).name, "link": _link(Path(file), folder)})
    return {
        "files": files,
        "perfetto": answers.summary.source == "kineto",
        "left_out": len(answers.summary.infos) - len({file["rank"] for file in files}),
        "run": str(answers.summary.path),
    }


def _link(file: Path, folder: Path) -> str:
    """From the page to a file: it works wherever both are moved to together."""
    try:
        relative = os.path.relpath(file, folder)
    except ValueError:  # another drive
        return file.as_uri()
    # A leading dot: a folder whose name has a colon is no scheme.
    return "./" + Path(relative).as_posix().replace("%", "%25").replace("#", "%23").replace("?", "%3F")


def _layout(infos: list[RankInfo]) -> str:
    coordinates = next((info.coordinates for info in infos if info.coordinates), None)
    if coordinates:
        return " ".join(f"{name}={place[1]}" for name, place in coordinates.items() if place[1] > 1) or "one rank a group"
    sizes: dict[str, int] = {}
    words = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tp",
        "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
        "DATA_PARALLEL_GROUP": "dp",
        "CONTEXT_PARALLEL_GROUP": "cp",
        "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    }
    for info in infos[:1]:
        for group in info.groups:
            word = words.get(group.description)
            if word and len(group.ranks) > 1:
                sizes[word] = len(group.ranks)
    return " ".join(f"{name}={sizes[name]}" for name in words.values() if name in sizes)


def _median_ms(durations_ns: list[int]) -> str:
    return wording.milliseconds(median(durations_ns) / 1e3) if durations_ns else "–"
