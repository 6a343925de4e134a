"""Engines: they call one function on many tasks, in processes of this machine or on a Ray cluster.

A task that fails, or kills its process, costs its own answer and no other. Pebble on loky's process context does the same; it
took 0.2 s more CPU than this for two workers, and its two resource trackers run until the caller's process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, Protocol, TypeVar, cast

from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean, install_command, shortage
from bridge_profiling.common.processes import OwnedProcess

#: Time limit for a connection to a Ray cluster. Ray itself would try for minutes.
_CONNECT_S = 10

#: How long a worker that no longer answers may take to end by itself, so that its exit code is known.
_DYING_S = 2.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The result of a task.

    Args:
        task: index of the task.
        answer: what the function returned; None if it failed.
        error: why it failed; None if it did not.
    """

    task: int
    answer: R | None = None
    error: str | None = None


class Engine(Protocol):
    """Calls a function on many tasks."""

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[Outcome[R]]:
        """Every task's outcome, as they finish; tasks start in the order given.

        Args:
            function: of a module. It, the tasks and the answers are pickled.
            tasks: any number.
        """


class ProcessEngine:
    """Processes of this machine, each a fresh interpreter, kept for later calls until `close`.

    Unlike those of `multiprocessing` they do not import the caller's script, which needs no `if __name__ == "__main__"`. They
    can be killed at any time: their temporary files are in a folder of the engine.

    Args:
        workers: processes at a time; None for the number of CPUs that this process may use.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ProfilingConfigError(f"--workers {workers} is less than 1", instead="Type --workers 1 or more")
        self.workers = workers or len(os.sched_getaffinity(0))
        self._started: list[_Worker] = []
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        weakref.finalize(self, _end, self._started, self._folders)

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[Outcome[R]]:
        """Every task's outcome; a single task is done in this process."""
        if len(tasks) == 1:
            yield from here(function, tasks)
            return
        waiting = iter(range(len(tasks)))
        idle = [worker for worker in self._started if worker.poll() is None]
        busy: dict[Connection, tuple[_Worker, int]] = {}
        done = False
        try:
            while True:
                while len(busy) < self.workers and (place := next(waiting, None)) is not None:
                    try:
                        request = pickle.dumps((function, tasks[place]))
                        worker = idle.pop() if idle else self._start()
                    except Exception as error:  # the task cannot be pickled, or no process can be started
                        yield Outcome(place, error=shortage(error) or f"{type(error).__name__}: {error}")
                        continue
                    worker.send(request)
                    busy[worker.connection] = worker, place
                if not busy:
                    done = True
                    return
                for connection in cast("list[Connection]", wait(list(busy))):
                    worker, place = busy.pop(connection)
                    outcome: Outcome[R] = Outcome(place, *worker.receive())
                    if worker.connection.closed:
                        self._started.remove(worker)
                    else:
                        idle.append(worker)
                    yield outcome
        finally:
            if not done:  # the caller wants no more answers, and a worker may be in the middle of one
                self.close()

    def close(self) -> None:
        """End the processes at once, and remove their temporary files."""
        _end(self._started, self._folders)

    def _start(self) -> _Worker:
        if not self._folders:
            self._folders.append(tempfile.TemporaryDirectory(prefix="bridge_profiling-", ignore_cleanup_errors=True))
        worker = _Worker(self._folders[0].name)
        self._started.append(worker)
        return worker


class RayEngine:
    """A Ray cluster: the same code on its machines. They need this package, and the captures and the cache on a shared disk.

    Args:
        address: of a running cluster, "auto", or "ray://host:10001"; None takes `$RAY_ADDRESS`, else starts one here.
        workers: tasks at a time; None for the number of the cluster's CPUs.

    Raises:
        ProfilingConfigError: Ray is not installed, or no cluster answers at that address.
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ProfilingConfigError(
                "the ray engine needs Ray", why=str(error), instead=f"Type {install_command('ray')}"
            ) from error
        self._ray = ray
        if not ray.is_initialized():
            address = address or os.environ.get("RAY_ADDRESS")
            # A cluster that we start needs no dashboard; a running one has its own.
            dashboard = None if address else False
            if not address:
                # Ray gives its workers the lowest priority but four: whatever else runs would take the processors from them.
                os.environ.setdefault("RAY_worker_niceness", "0")
            try:
                _connect(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=dashboard)
            except (OSError, ValueError, RuntimeError) as error:
                raise ProfilingConfigError(
                    f"no Ray cluster answers at {address or 'this machine'}",
                    why=str(error).splitlines()[0],
                    instead="Type ray start --head there, or another --ray-address",
                ) from error
            # Before Ray's own, which sleeps for 0.5 s so that logs can arrive: we have none.
            atexit.register(ray.shutdown)
        self.workers = workers

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[Outcome[R]]:
        """Every task's outcome; a task whose machine dies is tried once more on another."""
        remote: Any = self._ray.remote(num_cpus=1, max_retries=1)(call_pickled)
        at_once = self.workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        waiting = iter(range(len(tasks)))
        running: dict[Any, int] = {}
        while True:
            # Twice as many as can run, so that no worker has to wait for us.
            while len(running) < at_once * 2 and (place := next(waiting, None)) is not None:
                running[remote.remote(pickle.dumps((function, tasks[place])))] = place
            if not running:
                return
            (ready, *_), _ = self._ray.wait(list(running), num_returns=1)
            place = running.pop(ready)
            try:
                yield Outcome(place, *self._ray.get(ready))
            except self._ray.exceptions.RayError as error:
                yield Outcome(place, error=f"its worker died: {str(error).splitlines()[0]}")


def engine_named(name: str, workers: int | None, ray_address: str | None) -> Engine:
    """The engine called `process` or `ray`.

    Raises:
        ProfilingConfigError: the name is unknown, or Ray is not available.
    """
    if name == "ray":
        return RayEngine(ray_address, workers)
    if ray_address is not None:
        raise ProfilingConfigError("--ray-address needs the ray engine", instead="Type --engine ray")
    if name == "process":
        return ProcessEngine(workers)
    raise ProfilingConfigError(f"engine {name!r} is unknown", instead=did_you_mean(name, ("process", "ray")))


def here(function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[Outcome[R]]:
    """Every task's outcome, worked out in this process."""
    return (Outcome(place, *call(function, task)) for place, task in enumerate(tasks))


def call(function: Callable[[T], R], task: T) -> tuple[R | None, str | None]:
    """What a function returns for a task, or why it failed."""
    try:
        return function(task), None
    except Exception as error:  # a damaged capture must not end the others
        return None, shortage(error) or f"{type(error).__name__}: {error}"


def call_pickled(request: bytes) -> tuple[Any, str | None]:
    """What a pickled function returns for its task, or why it failed, in a process that works on many."""
    with without_pandas():
        try:
            function, task = pickle.loads(request)
        except Exception as error:  # the other machine has another version of this package, or none
            return None, shortage(error) or f"{type(error).__name__}: {error}"
        found = call(function, task)
    if not gc.get_freeze_count():
        # The first task has imported everything. Later collections of garbage need not go through that: 4% of the time.
        gc.collect()
        gc.freeze()
    return found


def serve(descriptor: int) -> None:
    """Work on tasks from a connection until its other end is closed: the main loop of a worker process."""
    parent = Connection(descriptor)
    with contextlib.suppress(EOFError):
        while True:
            try:
                parent.send(call_pickled(parent.recv_bytes()))
            except MemoryError as error:  # nothing was sent of an answer that could not be pickled
                parent.send((None, shortage(error)))


class _NoPandas:
    """Finds no pandas, wherever it is installed: a finder of modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name=name)


@contextlib.contextmanager
def without_pandas() -> Iterator[None]:
    """Keep PyArrow from importing pandas to recognise its objects, of which we have none: 0.3 s in every process."""
    finder: Any = _NoPandas
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


#: A worker that someone interrupts prints no traceback. Variables of the C library have been read when Python starts, and are
#: not for processes that a worker starts, such as `nsys export`.
_WORKER = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
for name in sys.argv[3:]:
    del os.environ[name]
sys.path[:] = json.loads(sys.argv[1])
try:
    from bridge_profiling.facts.engines import serve
except Exception as error:
    from multiprocessing.connection import Connection
    from bridge_profiling.common.errors import shortage
    Connection(int(sys.argv[2])).send((None, shortage(error) or f"its worker cannot start: {type(error).__name__}: {error}"))
    sys.exit(1)
serve(int(sys.argv[2]))
"""


#: Of a worker. One thread each, as with Ray: the workers share the CPUs. Arrow's own allocator keeps freed memory: 200 MB for a
#: rank that fits into 160. The C library's would give it back after each rank, and get it again: 7% of the time.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
_UNLESS_SET = {"MALLOC_TRIM_THRESHOLD_": str(128 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


class _Worker(OwnedProcess):
    """A process that works on one task after another; `folder` is where it puts temporary files."""

    def __init__(self, folder: str) -> None:
        self.connection, theirs = Pipe()
        # -P: a file in the current directory named like a library must not be imported in its place.
        ours = [name for name in _UNLESS_SET if name not in os.environ]
        command = [sys.executable, "-P", "-c", _WORKER, json.dumps(sys.path), str(theirs.fileno()), *ours]
        environment = _UNLESS_SET | os.environ | _ENVIRONMENT | {"TMPDIR": folder}
        with theirs:
            # What tasks print goes to standard error, not among the caller's output.
            super().__init__(command, stdout=2, pass_fds=[theirs.fileno()], env=environment)

    def send(self, request: bytes) -> None:
        """Have it call a pickled function on its task. If it has died, `receive` says so."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(request)

    def receive(self) -> tuple[Any, str | None]:
        """What the function returned for the task, or why it failed; the process has ended if it died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(_DYING_S)  # its connection closes a moment before it has ended
        self.end()
        code = self.returncode
        if code is None or code >= 0:
            return None, f"the process that worked on it ended with exit code {code}"
        out_of_memory = "; it may have run out of memory" if code == -signal.SIGKILL else ""
        return None, f"the process that worked on it was killed by signal {-code}{out_of_memory}"

    def end(self) -> None:
        super().end()
        self.connection.close()


def _end(workers: list[_Worker], folders: list[tempfile.TemporaryDirectory[str]]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()
    while folders:
        folders.pop().cleanup()


def _connect(address: str | None) -> None:
    """Check that something listens at host:port.

    Raises:
        OSError: nothing does.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
