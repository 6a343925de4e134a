"""Makes large ranks out of a real capture, by repeating it in time, as a longer window would have recorded it.

    python benchmarks/scaled_captures.py CAPTURE.json.gz OUT --copies 9 --ranks 8

Every copy is later by the capture's span and has iterations, correlations and ids of its own; the text is otherwise the
profiler's. 9 copies of an H200 rank of two iterations are 268 MB of JSON.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Callable
from pathlib import Path

#: Larger than any id in a capture of a few iterations.
_IDS = 10_000_000

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_TIME = re.compile(rb'("ts": )(\d+)(\.\d+)')
_ID = re.compile(rb'("(?:correlation|External id|id)": )([1-9]\d*)')
_ITERATION = re.compile(rb'("ProfilerStep#)(\d+)')
_RANK = re.compile(rb'("distributedInfo": \{"backend": "nccl", "rank": )(\d+)')


def scaled(trace: bytes, copies: int, rank: int | None = None) -> bytes:
    """A trace that repeats another one.

    Args:
        trace: the JSON of a Kineto trace of CUDA work, as torch 2.2 and later write it.
        copies: number of copies; 1 leaves it unchanged.
        rank: the new rank; None keeps its own.
    """
    begin = _START.search(trace).end()
    end = trace.rindex(b"],", begin) if b'"traceName"' in trace[-4096:] else trace.rindex(b"]", begin)
    head, events, tail = trace[:begin], trace[begin:end].rstrip(), trace[end:]
    times = [int(found[2]) for found in _TIME.finditer(events) if int(found[2])]
    span, steps = max(times) - min(times) + 1000, len(set(_ITERATION.findall(events)))
    if rank is not None:
        head = _RANK.sub(rb"\g<1>%d" % rank, head)
    pieces = [events]
    for copy in range(1, copies):
        later = _TIME.sub(_added(copy * span), events)
        later = _ID.sub(_added(copy * _IDS), later)
        pieces.append(_ITERATION.sub(_added(copy * steps), later))
    return head + b",".join(pieces) + b"\n  " + tail


def write_scaled(source: Path, target: Path, copies: int, rank: int | None = None) -> int:
    """Write a scaled trace, gzipped like the profiling hook's, and return the bytes of its JSON."""
    trace = scaled(gzip.decompress(source.read_bytes()), copies, rank)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(trace, compresslevel=1))
    return len(trace)


def _added(amount: int) -> Callable[[re.Match[bytes]], bytes]:
    def add(found: re.Match[bytes]) -> bytes:
        return found[1] + b"%d" % (int(found[2]) + amount) + (found[3] if found.re.groups > 2 else b"")

    return add


def main() -> None:
    """Write the requested ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capture", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--copies", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    for rank in range(options.ranks):
        target = options.out / f"rank-{rank}.json.gz"
        print(f"{target}: {write_scaled(options.capture, target, options.copies, rank) / 1e6:.0f} MB of JSON")


if __name__ == "__main__":
    main()
