"""Device memory of one run, or of two, in words, tables and figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.memory import difference
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import sentences
from bridge_profiling.facts.words import written
from bridge_profiling.report import tables, words
from bridge_profiling.report.rows import Rows
from bridge_profiling.report.run_view import memory_over_time_view
from bridge_profiling.report.views import PageView, SectionView, Verdict

SCHEMA_VERSION = 1

#: Rows of a table of allocation sites.
_SHOWN = 12

#: Devices that are drawn.
_DRAWN = 8

#: Ids of the figures of one run, and of a second one.
_FIGURES = ("over-time", "over-time-after")

#: Columns of a picture on a terminal, and its levels.
_WIDTH, _LEVELS = 72, "▁▂▃▄▅▆▇█"

#: Smaller changes of a site come from the allocator's rounding.
_LEAST_BYTES = 1 << 20


def dumps(runs: Sequence[RunFacts]) -> str:
    """The document that `bridge-profiling memory --json` prints about one run or two."""
    documents = [
        {
            "path": str(facts.path),
            "devices": facts.memory.to_pylist(),
            "sites": facts.memory_sites.to_pylist(),
            "growth": facts.memory_growth.to_pylist(),
            "limitations": _limitations(facts),
        }
        for facts in runs
    ]
    return json.dumps({"schema_version": SCHEMA_VERSION, "runs": documents, "difference": _difference(runs)}, indent=1)


def memory_view(runs: Sequence[RunFacts]) -> PageView:
    """The view of one run's memory, or of two runs'; each has recorded some."""
    sections = []
    difference = _difference(runs)
    if difference:
        sections.append(SectionView("difference", "Difference", tables=[tables.view("difference", _differing(difference))]))
    for facts, side, id in zip(runs, ("Before: ", "After: ") if len(runs) > 1 else ("",), _FIGURES, strict=False):
        drawn = memory_over_time_view(facts, {rank for rank, _ in _drawn(facts)}, id)
        if drawn:
            sections.append(SectionView(id, f"{side}memory over time".capitalize(), figures=drawn))
        sections += tables.sections(_rows(facts), side)
    headline, *sentences = _sentences(runs, difference)
    limitations = list(dict.fromkeys(sentence for facts in runs for sentence in _limitations(facts)))
    title = " → ".join(facts.path.absolute().name for facts in runs)
    return PageView("memory", title, Verdict(headline, sentences), sections, caveats=limitations)


def picture_lines(runs: Sequence[RunFacts]) -> list[str]:
    """Memory over time as a line of a terminal for each device."""
    lines = []
    for facts, side in zip(runs, ("", "after: "), strict=False):
        drawn = _drawn(facts)
        timeline = [row for row in facts.memory_timeline.to_pylist() if (row["rank"], row["device"]) in drawn]
        highest = max(facts.memory["peak_bytes"].to_pylist()) or 1
        for (rank, device), rows in sorted(grouped(timeline, "rank", "device").items()):
            amounts = _sampled(rows)
            bar = "".join(_LEVELS[min(int(amount / highest * len(_LEVELS)), len(_LEVELS) - 1)] for amount in amounts)
            seconds = (rows[-1]["time_ns"] - rows[0]["time_ns"]) / 1e9
            lines.append(f"{side}{words.device(rank, device)} {bar} {seconds:.2f} s, peak {words.memory(max(amounts))}")
    return lines


def _difference(runs: Sequence[RunFacts]) -> Rows:
    """Rows of `facts.memory.difference` of two runs, if both have allocation sites."""
    known = len(runs) > 1 and all(facts.memory_sites.num_rows for facts in runs)
    return difference(runs[0].memory_sites, runs[1].memory_sites).to_pylist() if known else []


def _limitations(facts: RunFacts) -> list[str]:
    return sentences([*facts.capture_caveats, *facts.caveats("memory")])


def _drawn(facts: RunFacts) -> set[tuple[int, int]]:
    """Rank and device of the devices that are drawn: those with the highest peaks."""
    devices = sorted(facts.memory.to_pylist(), key=lambda row: -row["peak_bytes"])
    return {(row["rank"], row["device"]) for row in devices[:_DRAWN]}


def _sampled(rows: Rows) -> list[int]:
    """The maximum in each of `_WIDTH` equal intervals."""
    first, last = rows[0]["time_ns"], rows[-1]["time_ns"]
    width = max(last - first, 1) / _WIDTH
    highest: dict[int, int] = {}
    for row in rows:
        place = min(int((row["time_ns"] - first) / width), _WIDTH - 1)
        highest[place] = max(highest.get(place, 0), row["allocated_bytes"])
    # Memory stays as it was where nothing is recorded.
    return list(accumulate(range(_WIDTH), lambda last, place: highest.get(place, last), initial=rows[0]["allocated_bytes"]))[1:]


def _sentences(runs: Sequence[RunFacts], difference: Rows) -> list[str]:
    """The answer, the most important sentence first."""
    of_runs = [facts.memory.to_pylist() for facts in runs]
    first, last = of_runs[0], of_runs[-1]
    found = [_peak(first)]
    if len(runs) > 1:
        found = [_change(first, last), f"Before: {found[0]}", f"After: {_peak(last)}"]
    sites = [] if len(runs) > 1 else runs[0].memory_sites.to_pylist()
    if difference and abs(difference[0]["change_bytes_at_peak"]) >= _LEAST_BYTES:
        found.insert(1, words.say("most_of_memory_change", difference[0]))
    elif sites:
        row = max(sites, key=lambda row: row["bytes_at_peak"])
        found.append(words.say("largest_site", row, share=row["bytes_at_peak"] / max(row["peak_bytes"] for row in first)))
    found.append(_growing(last))
    if any(row["source"] == "snapshot" for devices in of_runs for row in devices):
        found.append(words.say("memory_viewer"))
    return found


def _peak(devices: Rows) -> str:
    highest = max(devices, key=lambda row: row["peak_bytes"])
    more = words.say("reserved", highest) if highest["peak_reserved_bytes"] else ""
    of = f", the highest of {len(devices)} devices" if len(devices) > 1 else ""
    return words.sentence(words.say("peak", highest, device=words.device(highest["rank"], highest["device"]), of=of, more=more))


def _change(before: Rows, after: Rows) -> str:
    first, second = (max(row["peak_bytes"] for row in devices) for devices in (before, after))
    share = f" ({written('signed percent', second / first - 1)})" if first else ""
    name = "same_peak" if first == second else "other_peak"
    return words.say(name, before=first, after=second, change=second - first, share=share)


def _growing(devices: Rows) -> str:
    known = [row for row in devices if row["growth_bytes_per_iteration"] is not None]
    highest = max(known, key=lambda row: row["growth_bytes_per_iteration"], default=None)
    if highest is None or highest["growth_bytes_per_iteration"] <= 0:
        return words.say("growth_unknown" if highest is None else "no_growth")
    return words.say("growth", highest, device=words.device(highest["rank"], highest["device"]))


def _rows(facts: RunFacts) -> dict[str, Rows]:
    """The rows of each table of one run."""
    devices = facts.memory.to_pylist()
    peak = max(row["peak_bytes"] for row in devices) or 1
    at_peak = facts.memory_at_peak.select(["rank", "bytes", "site"]).slice(0, 1000).to_pylist()
    alike = Counter(tuple(row.values()) for row in at_peak)
    largest = sorted(alike.items(), key=lambda item: (-item[0][1], -item[1], item[0][2]))
    return {
        "devices": devices,
        "sites": [row | {"share": row["bytes_at_peak"] / peak} for row in facts.memory_sites.to_pylist()],
        "largest": [{"rank": rank, "bytes": size, "count": count, "site": site} for (rank, size, site), count in largest],
        "growth": facts.memory_growth.to_pylist(),
    }


def _differing(difference: Rows) -> Rows:
    changes = ("change_bytes_at_peak", "change_end_bytes")
    found = [row for row in difference if max(abs(row[name]) for name in changes) >= _LEAST_BYTES] or difference
    shown = [row for row in found[:_SHOWN] if any(row[name] for name in changes)]
    return [row | {"changed": len(found)} for row in shown]
