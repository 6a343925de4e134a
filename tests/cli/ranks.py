"""Small traces of ranks, as commands read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.traces.kineto_files import call, complete, document, kernel


def write(path: Path, rank: int, cut: int | None = None, *, device: bool = True) -> None:
    """A trace of two iterations, cut off after some bytes; with a kernel in each, or on a CPU alone."""
    events = []
    for place in (0, 1):
        begin = 1000 * place
        events.append(complete("user_annotation", f"ProfilerStep#{place}", begin, 900))
        if device:
            events += [
                call("cudaLaunchKernel", begin + 10, 2, place + 1),
                kernel("my_gemm_kernel", begin + 100, 250, correlation=place + 1),
            ]
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(json.dumps(document(events, distributedInfo={"rank": rank})).encode())
    path.write_bytes(packed[:cut])
