"""Reading a rank of about 270 MB: ours, traceinsight (HolisticTraceAnalysis) in its fastest setup, and the floor.

    python benchmarks/analysis.py CAPTURE.json.gz [--copies 9] [--ranks 8] [--rounds 3]

Each side answers the same five questions (load; compute, communication and idle time; times by kernel; overlap; idle causes) in
a process of its own, and the sides take turns in rounds, so that all run under the same conditions. `all tables` also
keeps operators with shapes and call stacks, and writes everything as Parquet; `all findings` is `analyze --json`. The floor
answers nothing: it unpacks the file with isal and parses it with simdjson. CPU seconds are those of the work and of its worker
processes, without imports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from time import perf_counter, process_time

CHECKOUT = Path(__file__).resolve().parents[1]
PEER = CHECKOUT / ".cache" / "peer"
PEER_PACKAGES = ("traceinsight==0.6.1", "pandas==2.3.3", "ijson>=3.4")


def floor(path: str) -> dict[str, float]:
    """Unpack and parse, without any analysis."""
    import simdjson
    from isal import igzip

    simdjson.Parser().parse(igzip.decompress(Path(path).read_bytes()))
    return {}


def five_questions(path: str) -> dict[str, float]:
    """The peer's five questions, answered by our tables; milliseconds."""
    from bridge_profiling.traces import kineto

    return _answers(kineto.read(Path(path), operators=False))


def all_tables(path: str) -> dict[str, float]:
    """All tables of a capture as Parquet, and the same answers."""
    from bridge_profiling.traces import cache, kineto

    tables = kineto.read(Path(path))
    with tempfile.TemporaryDirectory() as folder:
        entry = Path(folder) / "rank-0"
        cache.write(tables, entry)
        kept = sum(file.stat().st_size for file in entry.iterdir())
    return _answers(tables) | {"parquet_mb": kept / 1e6}


def all_findings(path: str) -> dict[str, float]:
    """What `analyze --json` prints of a rank, with its Parquet written."""
    from bridge_profiling.run import Run

    with tempfile.TemporaryDirectory() as folder:
        run = Run(path, parquet=folder)
        return {"findings": len(run.findings), "json_kb": len(run.to_json()) / 1e3}


def _answers(tables) -> dict[str, float]:
    import numpy as np
    import pyarrow.compute as pc

    from bridge_profiling.facts.intervals import union, window

    events = tables["device_events"]
    kind = events["kind"].combine_chunks()
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    sets = {}
    for name in ("compute", "communication"):
        chosen = pc.equal(kind, name).to_numpy(zero_copy_only=False)
        sets[name] = union(start[chosen], end[chosen])
    busy = union(start, end)
    idle = window(int(start.min()), int(end.max())) - busy
    # A gap belongs to the host if the work that ends it was launched after the gap began.
    ends_gap = np.searchsorted(start, idle.end_ns)
    launch = events["launch_start_ns"].fill_null(0).to_numpy()[ends_gap]
    late = launch > idle.start_ns
    kernels = events.append_column("duration_ns", pc.subtract(events["end_ns"], events["start_ns"]))
    kernels = kernels.group_by(["name"]).aggregate([("duration_ns", name) for name in ("count", "sum", "min", "max", "mean")])
    return {
        "compute_ms": sets["compute"].total_ns / 1e6,
        "communication_ms": sets["communication"].total_ns / 1e6,
        "idle_ms": idle.total_ns / 1e6,
        "overlap_ms": (sets["compute"] & sets["communication"]).total_ns / 1e6,
        "host_late_ms": (idle.end_ns - idle.start_ns)[late].sum() / 1e6,
        "kernel_names": kernels.num_rows,
    }


def peer(paths: list[str]) -> list[dict[str, float]]:
    """The same with the peer, which takes all ranks at once and has its own process pool."""
    from hta.configs.parser_config import ParserBackend, ParserConfig
    from hta.trace_analysis import TraceAnalysis

    config = ParserConfig.get_default_cfg()
    config.set_parser_backend(ParserBackend.IJSON_BATCH_AND_COMPRESS)
    ParserConfig.set_default_cfg(config)
    analysis = TraceAnalysis(
        trace_files=dict(enumerate(paths)), trace_dir=str(Path(paths[0]).parent), include_last_profiler_step=True
    )
    times = analysis.get_temporal_breakdown(visualize=False)
    analysis.get_gpu_kernel_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    analysis.get_idle_time_breakdown(ranks=list(range(len(paths))), visualize=False)
    return [
        {"compute_ms": row["compute_time(us)"] / 1e3, "idle_ms": row["idle_time(us)"] / 1e3} for row in times.to_dict("records")
    ]


EACH: dict[str, Callable[[str], dict[str, float]]] = {
    "floor": floor,
    "ours, five questions": five_questions,
    "ours, all tables and Parquet": all_tables,
    "ours, all findings": all_findings,
}
SIDES = (*EACH, "peer")


#: Imported before the clock starts.
_PACKAGES = {
    "floor": ("isal.igzip", "simdjson"),
    "peer": ("hta.trace_analysis",),
}
_OURS = (
    "pyarrow.compute",
    "bridge_profiling.run",
    "bridge_profiling.report.documents",
    "bridge_profiling.facts.intervals",
    "bridge_profiling.traces.cache",
    "bridge_profiling.traces.kineto",
)


def run_side(side: str, paths: list[str]) -> None:
    """Answer for all ranks, and print the cost."""
    for package in _PACKAGES.get(side, _OURS):
        importlib.import_module(package)
    imported_cpu, began_cpu, began = _children_cpu(), process_time(), perf_counter()
    if side == "peer":
        answers = peer(paths)
    elif len(paths) == 1:
        answers = [EACH[side](paths[0])]
    else:
        with ProcessPoolExecutor(min(len(paths), os.cpu_count() or 1)) as pool:
            answers = list(pool.map(EACH[side], paths))
    used = {
        "wall_s": perf_counter() - began,
        "cpu_s": process_time() - began_cpu + _children_cpu() - imported_cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "worker_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }
    print(json.dumps(used | {"answers": answers[0]}))


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peer_python() -> str:
    """The interpreter of an environment with the peer installed."""
    python = PEER / "bin" / "python"
    if not (PEER / ".installed").exists():
        venv.create(PEER, clear=True, with_pip=True)
        subprocess.run([python, CHECKOUT / "tools" / "install.py", *PEER_PACKAGES], check=True)
        (PEER / ".installed").touch()
    return str(python)


def main() -> None:
    """Take turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capture", type=Path, help="a real Kineto trace; it is repeated in time")
    parser.add_argument("--copies", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--peer-python", help="an interpreter that has traceinsight; by default an environment is made")
    options = parser.parse_args()
    sides = [side for side in SIDES if side != "peer" or not options.without_peer]
    interpreter = dict.fromkeys(sides, sys.executable)
    if "peer" in sides:
        interpreter["peer"] = options.peer_python or peer_python()
    with tempfile.TemporaryDirectory() as folder:
        # In a separate process, because a child's peak memory starts at its parent's.
        amounts = ["--copies", str(options.copies), "--ranks", str(options.ranks)]
        made = subprocess.run(
            [sys.executable, CHECKOUT / "benchmarks" / "scaled_captures.py", options.capture, folder, *amounts],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        size = sum(int(megabytes) for megabytes in re.findall(r": (\d+) MB of JSON", made.stdout)) * 10**6
        paths = sorted(Path(folder).iterdir())
        taken: dict[str, list[dict]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                command = [interpreter[side], __file__, "--side", side, *map(str, paths)]
                taken[side].append(
                    json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
                )
    _print(taken, size, options.ranks)


def _print(taken: dict[str, list[dict]], size: int, ranks: int) -> None:
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("msgspec", "isal", "numpy", "pyarrow", "pysimdjson"))
    print(f"{ranks} ranks, {size / ranks / 1e6:.0f} MB of JSON each; {platform.platform()}, {os.cpu_count()} CPUs")
    print(f"Python {platform.python_version()}, {versions}; peer: {', '.join(PEER_PACKAGES)}")
    print(f"{'':30}{'CPU s':>9}{'x floor':>9}{'wall s':>9}{'peak MB':>9}{'worker MB':>10}   answers of rank 0")
    medians = {
        side: {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "answers"}
        for side, runs in taken.items()
    }
    for side, found in medians.items():
        answers = ", ".join(f"{key} {value:.1f}" for key, value in taken[side][0]["answers"].items())
        print(
            f"{side:30}{found['cpu_s']:9.2f}{found['cpu_s'] / medians['floor']['cpu_s']:9.2f}{found['wall_s']:9.2f}"
            f"{found['peak_mb']:9.0f}{found['worker_peak_mb']:10.0f}   {answers}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        run_side(sys.argv[2], sys.argv[3:])
    else:
        main()
