"""Starts the trainings that the GPU benchmarks measure (gpu_worker.py), plain or under nsys, and talks to them.

Imports no torch. A training never outlives its `with` block.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.gpu_sizes import Sizes
from bridge_profiling import ProfilingConfig
from bridge_profiling.capture.nsys_profiler import nsys_request
from bridge_profiling.nsys.channel import CHANNEL_VARIABLE, Channel, Spec
from bridge_profiling.nsys.command import find_nsys, profile_command
from bridge_profiling.nsys.supervisor import one_start_at_a_time
from bridge_profiling.processes import command_of, find_by_variable

_WORKER = Path(__file__).with_name("gpu_worker.py")

#: Until a training has imported, built and compiled everything.
_START_SECONDS = 180.0
_END_SECONDS = 60.0

#: Until nsys has started its application.
_NSYS_START_SECONDS = 15.0

#: Until nsys has written its recording.
_NSYS_WINDOW_SECONDS = 3.0

#: Windows that one nsys may record; more than any case has time for.
_MOST_WINDOWS = 1000


#: The trainings that run now.
_running: set[Worker] = set()


class WorkerError(RuntimeError):
    """A training did not start, died, took too long, or reported an error."""


@dataclass(frozen=True)
class Lane:
    """Resources that one benchmark at a time has for itself.

    Attributes:
        gpu: the GPU's name in CUDA_VISIBLE_DEVICES; None on a machine without.
        cores: CPU cores.
    """

    gpu: str | None
    cores: frozenset[int]

    def take(self) -> None:
        """Bind the calling thread, and with it every process that it starts, to the lane's cores."""
        os.sched_setaffinity(0, self.cores)


def lanes(gpus: Sequence[str]) -> list[Lane]:
    """A lane for each of these GPUs, or one for a machine without; the cores are divided equally."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // max(len(gpus), 1), 1)
    return [
        Lane(gpu, frozenset(cores[index * share : (index + 1) * share]) or frozenset(cores))
        for index, gpu in enumerate(gpus or [None])
    ]


def visible_gpus() -> list[str]:
    """The GPUs of this machine that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [one for one in visible.split(",") if one]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


@dataclass
class Place:
    """The place and environment of a training.

    Attributes:
        lane: its GPU and cores.
        scratch: for sockets, logs and captures.
        environment: variables over this process's own; None removes one.
    """

    lane: Lane
    scratch: Path
    environment: dict[str, str | None] = field(default_factory=dict)


class Worker:
    """A training in a process of its own.

    Args:
        place: where it runs.
        sizes: of the training.
        prefix: the command of an nsys that starts it, with a channel in the environment; or nothing.
        options: more arguments of gpu_worker.py.
    """

    def __init__(self, place: Place, sizes: Sizes, *, prefix: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        self._log = Path(tempfile.mkstemp(dir=place.scratch, suffix=".log")[1])
        address = str(place.scratch / f"{self._log.stem}.socket")
        command = [sys.executable, str(_WORKER), address, str(place.scratch), json.dumps(asdict(sizes)), *options]
        environment = _environment(place)
        self._server, self._connection, self._began = socket.socket(socket.AF_UNIX), None, monotonic()
        self._server.bind(address)
        self._server.listen(1)
        # nsys agents that start at the same moment lose their connections.
        with self._log.open("w") as log, one_start_at_a_time() if prefix else contextlib.nullcontext():
            self._process = subprocess.Popen(
                [*prefix, *command],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            _running.add(self)
            deadline = monotonic() + _NSYS_START_SECONDS if prefix else 0.0
            while monotonic() < deadline:
                if any(command_of(pid) == command for pid in find_by_variable(CHANNEL_VARIABLE, environment[CHANNEL_VARIABLE])):
                    break
                time.sleep(0.1)

    def connect(self) -> None:
        """Wait until the training runs. `ask` does so too, so several trainings can start at the same time.

        Raises:
            WorkerError: it does not start.
        """
        self._server.settimeout(0.5)
        while self._connection is None:
            with contextlib.suppress(TimeoutError):
                self._connection = self._server.accept()[0]
                self._lines = self._connection.makefile("rw", encoding="utf-8")
                return
            if self._process.poll() is not None:
                code = self._process.returncode
                raise WorkerError(f"the training ended with code {code} before it began; it said:\n{self._said()}")
            if monotonic() - self._began > _START_SECONDS:
                raise WorkerError(f"the training did not begin within {_START_SECONDS:.0f} s; it said:\n{self._said()}")

    def ask(self, what: str, *, seconds: float = 120.0, **arguments: object) -> dict[str, Any]:
        """Run a method of the worker and return its answer.

        Args:
            what: name of the method.
            seconds: how long that may take.
            arguments: the method's.

        Raises:
            WorkerError: it could not, or did not answer in time.
        """
        self.connect()
        assert self._connection is not None
        self._connection.settimeout(seconds)
        try:
            print(json.dumps({"do": what, **arguments}), file=self._lines, flush=True)
            line = self._lines.readline()
        except OSError as error:
            raise WorkerError(f"no answer to {what!r} within {seconds:.0f} s ({error}); it said:\n{self._said()}") from error
        if not line:
            raise WorkerError(f"the training died while it did {what!r}; it said:\n{self._said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{what!r} failed: {answer['error'].strip().splitlines()[-1]}\n{answer['error']}")
        return answer["result"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, *, wait: bool = True) -> None:
        """End the training.

        Args:
            wait: until it has ended; else it is killed once it is idle.
        """
        if wait and self._connection is not None and self._process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                print(json.dumps({"do": "quit"}), file=self._lines, flush=True)
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"a training did not end within {_END_SECONDS:.0f} s and was killed: {self._said(300)}", flush=True)
        self._kill()
        with contextlib.suppress(OSError):
            self._server.close()
            if self._connection is not None:
                self._connection.close()

    def _kill(self) -> None:
        """End what is left of the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _running.discard(self)

    def _said(self, characters: int = 1500) -> str:
        return self._log.read_text(errors="replace")[-characters:].strip()


def end_all() -> None:
    """End every running training; a caller that waits for an answer gets an error that it died."""
    for worker in list(_running):
        worker._kill()


def _environment(place: Place) -> dict[str, str]:
    changes = {"CUDA_VISIBLE_DEVICES": place.lane.gpu or "", **place.environment}
    # Shared by all trainings, wherever their temporary files are, so that each kernel is compiled once.
    changes.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "benchmarks-torchinductor"))
    if place.lane.gpu is None:
        # The operators of `gpt_tiny` are too small for threads.
        changes["OMP_NUM_THREADS"] = "1"
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}


@contextlib.contextmanager
def plain_worker(place: Place, sizes: Sizes) -> Iterator[Worker]:
    """A training without nsys around it."""
    with Worker(place, sizes) as worker:
        yield worker


@contextlib.contextmanager
def own_nsys_worker(place: Place, sizes: Sizes, profiling: dict[str, Any]) -> Iterator[Worker]:
    """A training that starts its own nsys, as a rank does: with one window, after which nsys records no more."""
    own = {**profiling, "output_dir": str(place.scratch / "own-nsys")}
    with Worker(place, sizes, options=["--own-nsys", json.dumps(own)]) as worker:
        yield worker


class ManyWindows:
    """A training under one nsys with the project's own options, but for one: nsys goes on after a window, with a new report.

    nsys makes these reports when the training has ended, from the recording that it writes at the end of each window. Use as a
    context manager.

    Args:
        place: where it runs.
        sizes: of the training.
        profiling: settings of nsys.
        reports: whether the reports are needed; nsys takes long for each.
    """

    def __init__(self, place: Place, sizes: Sizes, profiling: dict[str, Any], *, reports: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=place.scratch, prefix="nsys-"))
        self._temporary, channel = self._folder / "tmp", Channel(self._folder / "channel")
        self._temporary.mkdir()
        channel.directory.mkdir()
        extra = [*profiling.get("nsys_extra_args", []), f"--capture-range-end=repeat:{_MOST_WINDOWS}"]
        config = ProfilingConfig(**{**profiling, "nsys_extra_args": extra})
        version, cuda = find_nsys(), place.lane.gpu is not None
        request = nsys_request(config, rank=0, local_rank=0, cuda=cuda)
        command, self.warnings = profile_command(request, version, report=self._folder / "report")
        self.version, self.executable, self.options = version.text, version.executable, command[1:]
        # The hook must not wait for a report: there is none yet.
        channel.write(
            Spec(
                rank=0,
                supervisor=os.getpid(),
                nsys=command,
                notes=[],
                command=[],
                report=str(self._folder / "report.nsys-rep"),
                export_sqlite=False,
                captures=_MOST_WINDOWS,
                reports_with_range=False,
            )
        )
        self._channel = str(channel.directory)
        changes = {CHANNEL_VARIABLE: self._channel, "TMPDIR": str(self._temporary)}
        self._command, self._wanted = command, reports
        self._windows, self._seen = 0, 0
        self._place, self._sizes = Place(place.lane, place.scratch, place.environment | changes), sizes

    def __enter__(self) -> ManyWindows:
        self.worker = Worker(self._place, self._sizes, prefix=self._command)
        try:
            self.worker.connect()
        except WorkerError as error:
            print(f"nsys is started a second time: {str(error).splitlines()[0]}", flush=True)
            self.worker.end(wait=False)
            self._kill_rest()
            self.worker = Worker(self._place, self._sizes, prefix=self._command)
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.end(wait=self._wanted)
        self._kill_rest()

    def _kill_rest(self) -> None:
        """End processes that nsys leaves running outside the training's session."""
        for pid in find_by_variable(CHANNEL_VARIABLE, self._channel):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def window(self, what: str, **arguments: object) -> dict[str, Any]:
        """Make the training do something that is one window; its answer, with the `recorded_bytes` that nsys wrote for it.

        Raises:
            WorkerError: it could not.
        """
        return self.around(partial(self.worker.ask, what, **arguments))

    def around(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do something in which the training has one window, as `window` does."""
        before = set(self._temporary.rglob("*.qdstrm"))
        answer = act()
        deadline = monotonic() + _NSYS_WINDOW_SECONDS
        while not (recorded := set(self._temporary.rglob("*.qdstrm")) - before) and monotonic() < deadline:
            time.sleep(0.05)
        self._windows += 1
        self._seen += bool(recorded)
        return {**answer, "recorded_bytes": sum(path.stat().st_size for path in recorded)}

    def about(self) -> dict[str, Any]:
        """The nsys and its options, for the record, and how many of the windows it recorded."""
        return {
            "version": self.version,
            "options": [option for option in self.options if not option.startswith("--output")],
            "warnings": self.warnings,
            "windows": self._windows,
            "recorded": self._seen,
        }

    def reports(self) -> list[Path]:
        """The reports, one per window in order; available when the `with` block is left.

        Raises:
            WorkerError: one is missing.
        """
        reports = [self._folder / f"report.{number + 1}.nsys-rep" for number in range(self._windows)]
        if missing := [path.name for path in reports if not path.exists()]:
            raise WorkerError(f"nsys left no {', '.join(missing)}")
        return reports
