"""Where the work on each rank is done: in processes of this machine, or on a Ray cluster. Knows nothing of traces.

An engine calls one function on many tasks and yields what becomes of each as soon as it is done. A task that fails, or kills
the process it runs in, costs its own answer and no other.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from bridge_profiling.errors import ProfilingConfigError

#: How long a Ray cluster may take to accept a connection.
_KNOCK_S = 10

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """What became of a task.

    Args:
        task: its place among the tasks.
        answer: what the function gave; None when it failed.
        error: why it failed, in words; None when it did not.
    """

    task: int
    answer: R | None = None
    error: str | None = None


class Engine(Protocol):
    """Calls a function on many tasks."""

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[Outcome[R]]:
        """Every task's outcome, in the order in which they come; tasks are begun in the order given.

        Args:
            function: a module's function. It, the tasks and the answers are pickled.
            tasks: at least none.
        """


class ProcessEngine:
    """Processes of this machine, each a fresh interpreter, so that nothing of the caller's is in them.

    Unlike with `concurrent.futures`, they import none of the caller's script, which needs no `if __name__ == "__main__"`, and
    one that dies, as for lack of memory, is replaced: the other tasks do not notice.

    Args:
        workers: processes at a time; None takes the CPUs that this process may use.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ProfilingConfigError(f"{workers} workers can do no work", instead="Type --workers 1 or more")
        self.workers = workers or len(os.sched_getaffinity(0))

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[Outcome[R]]:
        """Every task's outcome; a single task is done in this process."""
        if len(tasks) == 1:
            yield _outcome(0, call(function, tasks[0]))
            return
        team: _Team[R] = _Team(function, tasks)
        threads = [threading.Thread(target=team.work, daemon=True) for _ in range(min(self.workers, len(tasks)))]
        for thread in threads:
            thread.start()
        try:
            for _ in tasks:
                yield team.done.get()
        finally:
            team.stop()
            for thread in threads:
                thread.join()


class RayEngine:
    """A Ray cluster: the same code on its machines. They need this package, and the captures and the cache on a shared disk.

    Args:
        address: of a running cluster, "auto", or "ray://host:10001"; None takes `$RAY_ADDRESS`, else starts one here.
        workers: tasks at a time; None takes as many as the cluster has CPUs.

    Raises:
        ProfilingConfigError: Ray is not installed, or there is no cluster at that address.
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ProfilingConfigError(
                "the ray engine needs Ray", why=str(error), instead="Type pip install 'bridge-profiling[ray]'"
            ) from error
        self._ray = ray
        if not ray.is_initialized():
            address = address or os.environ.get("RAY_ADDRESS")
            # No dashboard for a cluster that we start; a running one has its own.
            dashboard = None if address else False
            try:
                _knock(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=dashboard)
            except (OSError, ValueError, RuntimeError) as error:
                raise ProfilingConfigError(
                    f"no Ray cluster answers at {address or 'this machine'}",
                    why=str(error).splitlines()[0],
                    instead="Type ray start --head there, or another --ray-address",
                ) from error
        self.workers = workers

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[Outcome[R]]:
        """Every task's outcome; a task whose machine dies is tried once more on another."""
        remote: Any = self._ray.remote(num_cpus=1, max_retries=1)(call)
        at_once = self.workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        # A few more than run: a worker that is done need not wait for us.
        waiting = iter(range(len(tasks)))
        running: dict[Any, int] = {}
        while True:
            while len(running) < at_once * 2 and (place := next(waiting, None)) is not None:
                running[remote.remote(function, tasks[place])] = place
            if not running:
                return
            (ready, *_), _ = self._ray.wait(list(running), num_returns=1)
            place = running.pop(ready)
            try:
                yield _outcome(place, self._ray.get(ready))
            except self._ray.exceptions.RayError as error:
                yield Outcome(place, error=f"its worker died: {str(error).splitlines()[0]}")


def call(function: Callable[[T], R], task: T) -> tuple[R | None, str | None]:
    """What a function gives for a task, and why it gives nothing."""
    try:
        return function(task), None
    except Exception as error:  # whatever a damaged capture provokes must not end the others
        return None, f"{type(error).__name__}: {error}"


def serve() -> None:
    """Work on tasks from standard input until it ends: what a worker process does."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Whatever prints must not print among the answers.
    while True:
        try:
            function, task = pickle.load(tasks)
        except EOFError:
            return
        pickle.dump(call(function, task), answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


#: Ctrl-C goes to every process of a terminal; the workers leave it to their parent, which ends them.
_WORKER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[1])
from bridge_profiling.analysis.workers import serve
serve()
"""


class _Worker:
    """A process that works on one task after another."""

    def __init__(self) -> None:
        # -P: a file in the current directory called like a library must not be taken for it.
        command = [sys.executable, "-P", "-c", _WORKER, json.dumps(sys.path)]
        # The workers share out the CPUs among them; Arrow's and numpy's threads on top would fight over them. So does Ray.
        # Arrow's own allocator keeps what was freed: 200 MB for a rank that fits into 160.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def call(self, function: Callable[..., Any], task: Any) -> tuple[Any, str | None]:
        """What the function gives for a task, and why it gives nothing.

        Raises:
            EOFError: the process died of it.
        """
        tasks, answers = self._process.stdin, self._process.stdout
        assert tasks is not None
        assert answers is not None
        try:
            pickle.dump((function, task), tasks)
            tasks.flush()
            return pickle.load(answers)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            raise EOFError(self._last_words()) from error

    def _last_words(self) -> str:
        self.end()
        code = self._process.returncode
        if code >= 0:
            return f"the process that worked on it ended with exit code {code}"
        out_of_memory = "; it may have run out of memory" if code == -9 else ""
        return f"the process that worked on it was killed by signal {-code}{out_of_memory}"

    def interrupt(self) -> None:
        """Make the process end; who waits for its answer gets an EOFError."""
        self._process.terminate()

    def end(self) -> None:
        """End the process, at once, and wait until it has."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()


class _Team(Generic[R]):
    """Workers that share out tasks. Each thread that calls `work` minds one of them.

    Args:
        function: what is called.
        tasks: on what.
    """

    def __init__(self, function: Callable[[Any], R], tasks: Sequence[Any]) -> None:
        self.done: queue.SimpleQueue[Outcome[R]] = queue.SimpleQueue()
        self._function, self._tasks = function, tasks
        self._waiting = list(range(len(tasks) - 1, -1, -1))
        self._workers: set[_Worker] = set()

    def work(self) -> None:
        """Keep one worker busy until no task waits."""
        worker: _Worker | None = None
        while True:
            try:
                place = self._waiting.pop()
            except IndexError:
                break
            try:
                if worker is None:
                    worker = _Worker()
                    self._workers.add(worker)
                self.done.put(_outcome(place, worker.call(self._function, self._tasks[place])))
            except Exception as error:  # a thread that died instead would leave its task without an outcome, and us waiting
                self._dismiss(worker)
                worker = None
                self.done.put(Outcome(place, error=str(error)))
        self._dismiss(worker)

    def stop(self) -> None:
        """Begin no more tasks, and end what runs."""
        self._waiting.clear()
        for worker in list(self._workers):
            worker.interrupt()

    def _dismiss(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            self._workers.discard(worker)


def _outcome(place: int, called: tuple[Any, str | None]) -> Outcome[Any]:
    answer, error = called
    return Outcome(place, answer, error)


def _knock(address: str | None) -> None:
    """Whether anything listens at host:port. Ray itself would try for minutes.

    Raises:
        OSError: nothing does.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def engine_named(name: str, workers: int | None, ray_address: str | None) -> Engine:
    """The engine that a word stands for: process or ray.

    Raises:
        ProfilingConfigError: it stands for none, or Ray is not to be had.
    """
    if name == "ray":
        return RayEngine(ray_address, workers)
    if ray_address is not None:
        raise ProfilingConfigError("a Ray address is of no use to processes of this machine", instead="Type --engine ray")
    if name == "process":
        return ProcessEngine(workers)
    raise ProfilingConfigError(f"there is no engine {name!r}", instead="Type process or ray")
