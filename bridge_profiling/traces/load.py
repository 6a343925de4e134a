"""Loads one capture with the reader of its profiler, through the cache, and adds what the manifest knows."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from bridge_profiling.traces import cache
from bridge_profiling.traces.run_dir import Capture, RankCapture
from bridge_profiling.traces.types import Caveat, RankInfo, RankTables

#: Each reader has `read(path, *, rank, rank_source)`. It is imported when a capture needs it: no other desk pays for SQLite.
_READERS = {
    "kineto": "bridge_profiling.traces.kineto",
    "nsys": "bridge_profiling.traces.nsys",
    "memory": "bridge_profiling.traces.memory.snapshot",
}


def load(capture: Capture, *, cache_directory: Path | None = None, cached: bool = True) -> RankTables:
    """One capture's tables.

    Args:
        capture: which.
        cache_directory: where its Parquet lies; None for the default places of `cache.load`.
        cached: False reads the file itself, and keeps nothing.

    Raises:
        TraceError: nothing could be read. The message names the file.
        OSError: the file is gone.
    """
    reader = importlib.import_module(_READERS[capture.source])

    def read() -> RankTables:
        return reader.read(capture.path, rank=capture.rank, rank_source=capture.rank_source)

    if cached:
        variant = f"{capture.rank} {capture.rank_source}"
        tables = cache.load(capture.path, read, directory=cache_directory, variant=variant)
    else:
        tables = read()
    return tables if capture.manifest is None else replace(tables, info=_with_manifest(tables.info, capture.manifest))


def _with_manifest(info: RankInfo, capture: RankCapture) -> RankInfo:
    manifest = capture.manifest
    caveats = list(info.caveats)
    if info.rank != capture.rank:
        text = f"the trace says rank {info.rank}, its manifest {capture.rank}: the trace's is used"
        caveats.append(Caveat("rank_differs", text))
    if manifest.status != "complete":
        text = f"the capture is {manifest.status}: {manifest.reason or 'its manifest gives no reason'}"
        caveats.append(Caveat("capture_incomplete", text))
    coordinates = {name: (place[0], place[1]) for name, place in manifest.coordinates.items()}
    return replace(
        info,
        coordinates=coordinates or info.coordinates,
        world_size=info.world_size or manifest.world_size,
        host=manifest.host or info.host,
        versions=info.versions | {name: str(version) for name, version in manifest.versions.items() if version},
        partial=info.partial or manifest.status == "partial",
        caveats=caveats,
    )
