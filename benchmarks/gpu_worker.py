"""A process that trains on demand: it receives requests over a socket, and answers with the duration of each iteration.

Started by the GPU benchmarks (gpu_processes.py), under nsys or not. One JSON object a line in each direction:
`{"do": NAME, …}` for a method of Worker with its arguments, answered by `{"result": …}` or `{"error": TRACEBACK}`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib.util
import json
import logging
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any

if __name__ == "__main__":
    # Started by its path, Python looks for modules in benchmarks/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.gpu_bare import BareTorch, bare
from benchmarks.gpu_sizes import Sizes
from benchmarks.gpu_training import TorchTraining, Training
from benchmarks.monitor_overhead import MeteredMonitor
from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ParallelLayout, ProfilingHook, start_under_nsys
from bridge_profiling.nsys.launch import report_exit_code

#: Later than any iteration of a benchmark, so a hook that waits for it is idle.
_NEVER = 10**12

#: Longer than any benchmark runs.
_LONG_SECONDS = 1e6


class Worker:
    """The requests that the process accepts.

    Args:
        training: the training.
        scratch: directory of captures; each is removed after it is measured.
    """

    def __init__(self, training: Training, scratch: Path) -> None:
        self._training, self._scratch = training, scratch
        self._hook: ProfilingHook | None = None

    def about(self) -> dict[str, object]:
        """Facts about this process."""
        return {
            "device": torch.cuda.get_device_name() if self._training.cuda else "cpu",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "training": type(self._training).__name__,
            "megatron-core": _version("megatron-core"),
            "python": sys.version.split()[0],
            "parameters": self._training.parameters,
            "step_ms": statistics.median(self._training.plain(20)) / 1e6,
        }

    # -- blocks: some iterations to settle, then those that count ----------------------------------------------------

    def plain(self, settle: int, count: int) -> dict[str, object]:
        """A block without profiling code."""
        return {"durations": self._training.plain(settle + count)}

    def bare(self, profiling: dict[str, Any], settle: int, count: int) -> dict[str, object]:
        """A block whose last `count` iterations are recorded by a bare profiler."""
        profiler = bare(ProfilingConfig(**profiling))
        profiler.open()
        durations = self._training.plain(settle - 1)
        profiler.arm()
        durations += self._training.plain(1)
        self._training.synchronize()
        profiler.start()
        durations += self._training.plain(count)
        self._training.synchronize()
        profiler.stop()
        if profiling.get("use_pytorch_profiler"):
            self._training.rest()
        return {"durations": durations}

    def hook(self, profiling: dict[str, Any], settle: int, count: int) -> dict[str, object]:
        """A block whose last `count` iterations are the window of a hook, and the files that it wrote."""
        self.open(profiling, window_in=settle, window=count)
        assert self._hook is not None
        try:
            durations = self._training.hooked(self._hook, settle + count)
            background = _seconds_until_written()
        finally:
            written = self.close()
        return {"durations": durations, "background_s": background, **written}

    def exported(self, profiling: dict[str, Any], settle: int, count: int) -> dict[str, object]:
        """A block like the hook's, recorded by torch's profiler and written by its own export to .json.gz.

        As in the hook's block, an iteration includes what happens at its end or begin: the last that is not in the window the
        arming, the window's first the start, and its last the stop and the export.
        """
        profiler = BareTorch(ProfilingConfig(**profiling))
        plain = self._training.plain

        def timed(act: Callable[[], object]) -> int:
            began = perf_counter_ns()
            act()
            return perf_counter_ns() - began

        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            durations = plain(settle - 1)
            durations.append(timed(lambda: (profiler.arm(), plain(1))))
            durations.append(timed(lambda: (self._training.synchronize(), profiler.start(), plain(1))))
            durations += plain(count - 2)
            durations.append(timed(lambda: (plain(1), profiler.stop_and_export(Path(folder, "trace.json.gz")))))
        self._training.rest()
        return {"durations": durations}

    def idle_pairs(self, swapped: list[bool]) -> dict[str, object]:
        """Pairs of an iteration without profiling code and one within a hook whose window is far away."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=_NEVER, profile_step_end=_NEVER + 2)
            with ProfilingHook(config, rank=0, output_dir=folder) as hook:
                self._training.pairs(hook, [True, False])
                plain, hooked = self._training.pairs(hook, swapped)
        return {"sides": {"plain": plain, "hook": hooked}}

    def window_pairs(self, profiling: dict[str, Any], settle: int, swapped: list[bool]) -> dict[str, object]:
        """Pairs like these within one window of a hook, so that the same profiler records both sides.

        The first and the last pair are left out: they contain the start and the stop of the profiler.
        """
        self.open(profiling, window_in=settle, window=len(swapped))
        assert self._hook is not None
        try:
            self._training.hooked(self._hook, settle)
            plain, hooked = self._training.pairs(self._hook, swapped)
        finally:
            self.close()
        return {"sides": {"plain": plain[1:-1], "hook": hooked[1:-1]}}

    def sampled_pairs(self, swapped: list[bool]) -> dict[str, object]:
        """Pairs of two iterations without the monitor and two during which it samples this process and its GPU."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if self._training.cuda else []
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            # It takes no samples itself: the interval is longer than any benchmark.
            monitor = MeteredMonitor(jsonl=Path(folder, "monitor.jsonl"), port=0, gpus=gpus, interval=_LONG_SECONDS)
            with monitor:
                self._training.pairs_disturbed(monitor._take_sample, [True, False])
                plain, sampled = self._training.pairs_disturbed(monitor._take_sample, swapped)
        assert monitor.sample is not None
        sides = {"plain": plain, "sampled": sampled}
        return {"sides": sides, "computed_s": statistics.median(monitor.computed), "unavailable": monitor.sample.unavailable}

    def stay_on(self, core: int) -> dict[str, object]:
        """From now on, compute only on this core."""
        self._training.stay_on(core)
        return {}

    # -- a hook that stays open over several requests ----------------------------------------------------------------

    def open(self, profiling: dict[str, Any], window_in: int, window: int) -> dict[str, object]:
        """Open a hook whose window of `window` iterations begins after `window_in` more."""
        first = self._training.next_iteration + window_in
        self._root = Path(tempfile.mkdtemp(dir=self._scratch))
        config = ProfilingConfig(**profiling, profile_step_start=first, profile_step_end=first + window)
        self._hook = ProfilingHook(config, rank=0, output_dir=self._root)
        self._hook.__enter__()
        return {}

    def run(self, count: int) -> dict[str, object]:
        """Iterations within the open hook, and the number of them during which its thread still wrote."""
        assert self._hook is not None
        durations, writing = [], 0
        for _ in range(count):
            durations += self._training.hooked(self._hook, 1)
            writing += _writer() is not None
        return {"durations": durations, "writing": writing}

    def written(self) -> dict[str, object]:
        """Wait until the open hook has written everything, and return the seconds."""
        return {"background_s": _seconds_until_written()}

    def close(self) -> dict[str, object]:
        """Close the hook, and return its files.

        Raises:
            RuntimeError: the capture is not complete.
        """
        assert self._hook is not None
        hook, self._hook = self._hook, None
        hook.__exit__(None, None, None)
        try:
            manifest = json.loads(next(self._root.glob("manifest/*/rank-0.json")).read_text())
            if manifest["status"] != "complete":
                raise RuntimeError(f"the capture is {manifest['status']}: {manifest['reason']}")
            artifacts = [one | {"raw_bytes": _raw_bytes(self._root / one["path"])} for one in _artifacts(manifest)]
            return {"artifacts": artifacts}
        finally:
            shutil.rmtree(self._root)


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _artifacts(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [artifact for profiler in manifest["profilers"] for artifact in profiler["artifacts"]]


def _raw_bytes(path: Path) -> int:
    """A file's bytes, unpacked."""
    if path.suffix != ".gz":
        return path.stat().st_size
    size = 0
    with gzip.open(path) as file:
        while piece := file.read(1 << 22):
            size += len(piece)
    return size


def _writer() -> threading.Thread | None:
    return next((one for one in threading.enumerate() if one.name == "bridge_profiling writer"), None)


def _seconds_until_written() -> float:
    began, writer = perf_counter(), _writer()
    if writer is not None:
        writer.join()
    return perf_counter() - began


def serve(worker: Worker, path: str) -> None:
    """Answer requests until `quit`, or until the other side is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                request = json.loads(line)
                name = request.pop("do")
                if name == "quit":
                    return
                try:
                    answer = {"result": getattr(worker, name)(**request)}
                    gc.collect()
                except Exception:
                    answer = {"error": traceback.format_exc()}
                print(json.dumps(answer), file=lines, flush=True)


def training_of(sizes: Sizes) -> Training:
    """The project's own recipe, or torch's layers where megatron-core is missing or not wanted."""
    if not sizes.megatron or importlib.util.find_spec("megatron") is None:
        return TorchTraining(sizes)
    from benchmarks.gpu_megatron import MegatronTraining

    return MegatronTraining(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("socket")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("sizes", type=json.loads, help="JSON of the training's sizes")
    parser.add_argument("--own-nsys", type=json.loads, help="JSON of the profiling settings with which it starts its own nsys")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("bridge_profiling").setLevel(logging.WARNING)
    if arguments.own_nsys is not None:
        config = ProfilingConfig(**arguments.own_nsys)
        config.finalize()
        cuda = torch.cuda.is_available()
        start_under_nsys(config, rank=0, layout=ParallelLayout(), local_rank=0, cuda=cuda)
    with report_exit_code():
        training = training_of(Sizes(**arguments.sizes))
        serve(Worker(training, arguments.scratch), arguments.socket)
        training.rest()
        training.close()


if __name__ == "__main__":
    main()
