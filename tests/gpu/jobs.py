"""Runs trainings on this machine's GPUs, as many at a time as there is room for, with the commands that a user types.

A job is asked for by name and runs once a session; the tests that need it wait for it. Knows nothing of what a job should show.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run
from bridge_profiling.traces.types import RankTables
from tests.system.jobs import FOREIGN, ROOT, end_tree, manifests

#: With it set to 1, NCCL 2.30 and newer let the ranks of a communicator share a GPU.
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"

#: After the name of a machine's only GPU: the place of a second rank on it.
_SECOND_RANK = "+"

#: On PYTHONPATH, it plants a fault in a rank.
PLANTED = ROOT / "tests" / "system" / "planted"

#: Seconds after which a job is killed.
_LIMIT_S = 150

#: Jobs that run at once: starting takes most of a job's time, and hardly any of the GPU's. With 4, two H100s and 32 cores take
#: a third longer.
_AT_ONCE = 8


def devices() -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them; a single one twice where two ranks may share it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        found = [name for name in named.split(",") if name]
    else:
        import torch

        found = [str(index) for index in range(torch.cuda.device_count())]
    if len(found) == 1 and os.environ.get(SHARED_GPU) == "1":
        found.append(found[0] + _SECOND_RANK)
    return found


@dataclass(frozen=True)
class JobSpec:
    """One training.

    Args:
        recipe: what is trained.
        gpus: GPUs, and ranks.
        overrides: settings.
        profiler: none, torch or nsys.
        window: first iteration, and the first after it.
        selected: the ranks that are profiled.
        ranks: what `--ranks` is given for them, if not their numbers.
        options: further options of launch/experiment.py.
        direct: start launch/pretrain.py itself, one rank, without an experiment around it.
        environment: variables of the job.
        terminate_at: send SIGTERM to the launcher when this iteration is told; to the rank itself with `direct`.
        needs: a job that must have ended before.
        resumes_at: start from the checkpoint that job wrote after so many iterations.
        alone: no other job at the same time.
    """

    recipe: str
    gpus: int
    overrides: tuple[str, ...]
    profiler: str = "none"
    window: tuple[int, int] = (8, 12)
    selected: tuple[int, ...] = (0,)
    ranks: str = ""
    options: tuple[str, ...] = ()
    direct: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    terminate_at: int | None = None
    needs: str | None = None
    resumes_at: int | None = None
    alone: bool = False

    @property
    def sources(self) -> list[str]:
        """The captures that a selected rank should leave, in the words of the readers."""
        found = {"none": [], "torch": ["kineto"], "nsys": ["nsys"]}[self.profiler]
        return found + (["memory"] if "--memory" in self.options else [])

    def command(self, folder: Path) -> list[str]:
        """What a user types for it."""
        start, end = self.window
        settings = [text.replace("{folder}", str(folder)) for text in self.overrides]
        settings.append(f"logger.loss_file={folder / 'losses.jsonl'}")
        if self.direct:
            asked = [f"profiling.use_{'pytorch' if self.profiler == 'torch' else 'nsys'}_profiler=true"]
            asked += [f"profiling.profile_step_start={start}", f"profiling.profile_step_end={end}"]
            asked += ["profiling.nsys_export_sqlite=true"] if self.profiler == "nsys" else []
            return [sys.executable, str(ROOT / "launch" / "pretrain.py"), "--recipe", self.recipe, *settings, *asked]
        command = [sys.executable, str(ROOT / "launch" / "experiment.py"), "--recipe", self.recipe]
        where = ["local_torchrun", "--nproc", str(self.gpus)] if self.gpus > 1 else ["local", "--nproc", "1"]
        command += ["--executor", *where, "--profiler", self.profiler]
        if self.profiler != "none":
            named = "all" if len(self.selected) == self.gpus > 1 else ",".join(map(str, self.selected))
            command += ["--steps", f"{start}:{end}", "--ranks", self.ranks or named]
        if self.profiler == "nsys":
            command.append("--export-sqlite")
        return [*command, *self.options, *settings]


@dataclass(frozen=True)
class BridgeSpec(JobSpec):
    """A training in Megatron Bridge's own `pretrain`, by torchrun; `overrides` are fields of Bridge's config."""

    direct: bool = True

    def command(self, folder: Path) -> list[str]:
        """What a user types for it."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.gpus}"]
        options = [f"--profiler={self.profiler}", f"--window={self.window[0]}:{self.window[1]}", *self.options]
        return [*torchrun, str(ROOT / "tests" / "gpu" / "bridge_train.py"), str(folder), *options, *self.overrides]


class Job:
    """A training that has ended, and what it left.

    Args:
        name: its name.
        spec: what it was.
        folder: where it ran.
        returncode: of the command; None when it was killed for being late.
    """

    def __init__(self, name: str, spec: JobSpec, folder: Path, returncode: int | None) -> None:
        self.name, self.spec, self.folder, self.returncode = name, spec, folder, returncode
        self._tables: dict[tuple[int, str], RankTables] = {}

    @functools.cached_property
    def output(self) -> str:
        """All it said."""
        return (self.folder / "output.txt").read_text(errors="replace")

    @functools.cached_property
    def profiles(self) -> Path:
        """Its output directory."""
        found = sorted(path for path in self.folder.rglob("profiles") if (path / "manifest").is_dir())
        assert len(found) == 1, f"{self.name} left {len(found)} output directories: {found}\n{self.tail}"
        return found[0]

    @property
    def tail(self) -> str:
        """The end of what it said."""
        return self.output[-6000:]

    @functools.cached_property
    def manifests(self) -> dict[int, dict]:
        """Every rank's manifest."""
        return manifests(self.profiles)

    @functools.cached_property
    def losses(self) -> dict[int, str]:
        """Iteration to loss, as a hexadecimal float."""
        records = [json.loads(line) for line in (self.folder / "losses.jsonl").read_text().splitlines()]
        return {record["iteration"]: record["hex"] for record in records}

    def tables(self, rank: int, source: str) -> RankTables:
        """One rank's capture by one profiler, as tables."""
        if (rank, source) not in self._tables:
            captures = find_run(self.profiles).captures
            (found,) = [capture for capture in captures if (capture.rank, capture.source) == (rank, source)]
            self._tables[rank, source] = load(found, cached=False)
        return self._tables[rank, source]

    def traces(self) -> dict[int, RankTables]:
        """Each selected rank's trace."""
        (source,) = [source for source in self.spec.sources if source != "memory"]
        return {rank: self.tables(rank, source) for rank in self.spec.selected}


class Jobs:
    """Runs jobs at the same time on the same GPUs.

    Args:
        specs: every job by its name.
        folder: where they run.
        devices: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them.
    """

    def __init__(self, specs: Mapping[str, JobSpec], folder: Path, devices: Sequence[str]) -> None:
        self._specs, self._folder, self._devices = specs, folder, devices
        self._futures: dict[str, Future[Job]] = {}
        self._running: set[subprocess.Popen] = set()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="job")

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            end_tree(process)
        self._threads.shutdown()

    def start(self, names: Iterable[str]) -> None:
        """Start these and what they need: those that want to be alone, then the largest, so that the small fill the gaps."""
        wanted = {name for name in names if name in self._specs}
        wanted |= {needed for name in wanted if (needed := self._specs[name].needs)}
        # What others need comes before them in the table, and those of a size keep its order.
        for name, spec in sorted(self._specs.items(), key=lambda item: (not item[1].alone, -item[1].gpus)):
            if name in wanted - self._futures.keys():
                taken = [(len(self._futures) + place) % len(self._devices) for place in range(spec.gpus)]
                devices = [self._devices[place] for place in sorted(taken)]
                self._futures[name] = self._threads.submit(self._run, name, spec, devices)
                if spec.alone:
                    wait([self._futures[name]])

    def result(self, name: str) -> Job:
        """The job of that name, when it has ended."""
        self.start([name])
        return self._futures[name].result()

    def _run(self, name: str, spec: JobSpec, devices: Sequence[str]) -> Job:
        if spec.needs is not None:
            self._futures[spec.needs].result()
        folder = self._folder / name
        folder.mkdir(parents=True)
        if spec.resumes_at is not None:
            _as_it_was(self._folder / str(spec.needs) / "saved", folder / "saved", spec.resumes_at)
        kept = {key: value for key, value in os.environ.items() if not key.startswith((*FOREIGN, "PYTEST"))}
        visible = list(dict.fromkeys(device.removesuffix(_SECOND_RANK) for device in devices))
        if len(visible) < spec.gpus:
            # Each rank's first GPU is then the one that they share.
            kept["PLANTED_LOCAL_RANK"] = "0"
        environment = kept | {
            "CUDA_VISIBLE_DEVICES": ",".join(visible),
            "NEMORUN_HOME": str(folder / "nemo_run"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PLANTED), str(ROOT), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            # Each rank would start up to 32 processes that import torch, to compile the few small kernels which are fused.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # Transformer Engine's userbuffers would use NVLink multicast. A program that does and dies can leave the GPUs of a
            # whole server unusable, and these tests kill programs.
            "UB_SKIPMC": "1",
            **spec.environment,
        }
        with open(folder / "output.txt", "wb") as output:
            process = subprocess.Popen(
                spec.command(folder),
                env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._running.add(process)
        try:
            returncode = _await(process, spec, folder / "output.txt")
        finally:
            end_tree(process)
            self._running.discard(process)
        return Job(name, spec, folder, returncode)


def _as_it_was(saved: Path, root: Path, iteration: int) -> None:
    """A directory of checkpoints as a job that ended after `iteration` would have left it."""
    from recipes.megatron.checkpoint import checkpoint_folder

    at = checkpoint_folder(saved, iteration)
    assert at.is_dir(), f"the job before it left no checkpoint {at}"
    root.mkdir()
    (root / at.name).symlink_to(at)


def _await(process: subprocess.Popen, spec: JobSpec, output: Path) -> int | None:
    """Wait for its end, and send it its SIGTERM on the way; None when it is late."""
    deadline, terminated = time.monotonic() + _LIMIT_S, spec.terminate_at is None
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            pass
        if not terminated:
            told = re.findall(r"iteration +(\d+)/", output.read_text(errors="replace"))
            if told and int(told[-1]) >= spec.terminate_at:
                _launcher(process.pid, direct=spec.direct).send_signal(signal.SIGTERM)
                terminated = True
    return None


def _launcher(pid: int, *, direct: bool) -> psutil.Process:
    """The process that a cluster would signal: torchrun under an experiment, else the rank."""
    process = psutil.Process(pid)
    if direct:
        return process
    for child in process.children(recursive=True):
        if any(part.endswith("torchrun") or part == "torch.distributed.run" for part in child.cmdline()):
            return child
    raise AssertionError("no torchrun is running under the experiment")
