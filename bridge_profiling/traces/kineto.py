"""Reads a torch profiler trace far enough to say which operators took the time. The whole document, in memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_profiling.errors import TraceError


@dataclass(frozen=True)
class OperatorTime:
    """One operator's share of a trace.

    Args:
        name: its name in the trace.
        count: how often it ran.
        self_us: microseconds in it and in no operator that it called, summed over threads.
    """

    name: str
    count: int
    self_us: float


def top_operators(path: Path, limit: int = 5) -> list[OperatorTime]:
    """The operators with the most self time on the host, largest first.

    Args:
        path: a trace that torch.profiler wrote, gzipped or not.
        limit: how many.

    Raises:
        TraceError: the file cannot be read.
    """
    by_thread: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for event in _events(path):
        if event.get("ph") == "X" and event.get("cat") == "cpu_op":
            by_thread[event.get("tid")].append(event)
    self_us: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for events in by_thread.values():
        _add_self_times(events, self_us, counts)
    largest = sorted(self_us, key=lambda name: -self_us[name])[:limit]
    return [OperatorTime(name, counts[name], self_us[name]) for name in largest]


def _add_self_times(events: list[dict[str, Any]], self_us: dict[str, float], counts: dict[str, int]) -> None:
    """Add the self times of one thread's events, which nest: a child's duration is taken from its parent."""
    parents: list[tuple[float, str]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while parents and parents[-1][0] <= event["ts"]:
            parents.pop()
        if parents:
            self_us[parents[-1][1]] -= event["dur"]
        self_us[event["name"]] += event["dur"]
        counts[event["name"]] += 1
        parents.append((event["ts"] + event["dur"], event["name"]))


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        document = json.loads(raw)
        return document["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no torch profiler trace: {error}") from error
