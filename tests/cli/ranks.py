"""Small traces of ranks, as commands read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.traces.kineto_files import document, steps


def write(path: Path, rank: int, cut: int | None = None, *, device: bool = True) -> None:
    """A trace of two iterations, cut off after some bytes; with a kernel in each, or on a CPU alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(
        json.dumps(document(steps(*([250] if device else [None]) * 2), distributedInfo={"rank": rank})).encode()
    )
    path.write_bytes(packed[:cut])
