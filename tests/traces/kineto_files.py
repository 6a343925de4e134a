"""Events of small Kineto traces, written by hand."""

import gzip
import json
from pathlib import Path
from typing import Any


def complete(category: str, name: str, start_us: float, duration_us: float, **args: Any) -> dict[str, Any]:
    """A complete event on the host, on thread 1 of process 100 unless `pid` and `tid` say otherwise."""
    place = {"pid": args.pop("pid", 100), "tid": args.pop("tid", 1)}
    return {"ph": "X", "cat": category, "name": name, **place, "ts": start_us, "dur": duration_us, "args": args}


def kernel(name: str, start_us: float, duration_us: float, *, stream: int = 7, **args: Any) -> dict[str, Any]:
    """A kernel on device 0."""
    return complete("kernel", name, start_us, duration_us, pid=0, tid=stream, device=0, stream=stream, **args)


def call(name: str, start_us: float, duration_us: float, correlation: int, **args: Any) -> dict[str, Any]:
    """A runtime call that launches what has its correlation."""
    return complete("cuda_runtime", name, start_us, duration_us, correlation=correlation, **args)


def steps(*kernels_us: float | None, operators: bool = False) -> list[dict[str, Any]]:
    """Iterations of 900 us, one a millisecond, each with a kernel of that length; None for one without work on a device."""
    events = []
    for place, length in enumerate(kernels_us):
        begin = 1000 * place
        events.append(complete("user_annotation", f"ProfilerStep#{place}", begin, 900))
        events += [complete("cpu_op", "aten::mm", begin + 5, 20)] if operators else []
        if length is not None:
            launched = {"correlation": place + 1}
            events += [
                call("cudaLaunchKernel", begin + 10, 2, place + 1),
                kernel("my_gemm_kernel", begin + 100, length, **launched),
            ]
    return events


def document(events: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    """A whole trace, as torch writes it for rank 3 of 8."""
    return {"schemaVersion": 1, "distributedInfo": {"rank": 3, "world_size": 8}, "traceEvents": events, **keys}


def packed(events: list[dict[str, Any]], **keys: Any) -> bytes:
    """The file of such a trace."""
    return gzip.compress(json.dumps(document(events, **keys)).encode())


def write_capture(
    root: Path, events: list[dict[str, Any]], window: range, rank: int = 0, world_size: int = 1, /, **manifest: Any
) -> Path:
    """A rank's trace of a window and its manifest, as a job leaves them; gives the trace's path."""
    folder = f"iter-{window.start}-{window.stop}"
    trace, path = root / "torch" / folder / f"rank-{rank}.pt.trace.json.gz", root / "manifest" / folder / f"rank-{rank}.json"
    for each in (trace, path):
        each.parent.mkdir(parents=True, exist_ok=True)
    trace.write_bytes(packed(events, distributedInfo={"rank": rank, "world_size": world_size}))
    artifact = {"path": str(trace.relative_to(root)), "bytes": trace.stat().st_size}
    known: dict[str, Any] = {"status": "complete", "reason": None, "rank": rank, "world_size": world_size}
    known["profilers"] = [{"name": "torch", "status": "complete", "reason": None, "artifacts": [artifact]}]
    known["window"] = {"start": window.start, "end": window.stop}
    known["captured"] = {"first": window.start, "last": window.stop - 1, "iterations": [*window]}
    path.write_text(json.dumps(known | manifest))
    return trace


def write_ranks_called(name: str, folder: Path) -> None:
    """Two ranks of three iterations whose data loading, operators and kernels all bear a name."""
    for rank in (0, 1):
        events = []
        for step in range(3):
            begin = 10_000 * step
            events += [
                complete("user_annotation", f"ProfilerStep#{step}", begin, 9_000),
                complete("user_annotation", f"dataloader {name}", begin + 10, 4_000),
                complete("cpu_op", f"aten::{name}", begin + 4_100, 50),
                call("cudaLaunchKernel", begin + 4_110, 2, step + 1),
                kernel(name, begin + 4_200, 2_500, correlation=step + 1),
            ]
        (folder / f"rank-{rank}.json.gz").write_bytes(packed(events, distributedInfo={"rank": rank}))
