"""Commands that a signal ends: the exit code of a shell, at most one line, and no process and no temporary file left."""

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bridge_profiling.cli.signals import Interrupted, interruptible
from tests.capture.conftest import run
from tests.cli.conftest import COMMAND, write
from tests.system.jobs import wait_until

__all__ = ["run"]

ENDINGS = [
    (signal.SIGINT, ""),
    (signal.SIGTERM, "error: ended by SIGTERM\n"),
    (signal.SIGHUP, "error: ended by SIGHUP\n"),
]

#: Answers as nsys does, and takes forever to export.
NSYS = """#!/bin/sh
case "$1" in
    --version) echo "NVIDIA Nsight Systems version 2024.2.1" ;;
    profile) echo "  --trace=" ;;
    *) sleep 300; true ;;
esac
"""


@contextmanager
def started(*arguments: object, **environment: str) -> Iterator[subprocess.Popen]:
    """A command whose temporary files are in `tmp`; no process of it is left when the block is over."""
    Path("tmp").mkdir()
    # Where SIGINT is ignored, as in a shell's background job, children would ignore it too.
    command = ["env", "--default-signal=INT,TERM,HUP", *COMMAND, *map(str, arguments)]
    environment = os.environ | {"TMPDIR": str(Path("tmp").absolute()), **environment}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen: set[psutil.Process] = set()
        process.descendants = lambda: seen.update(found := psutil.Process(process.pid).children(recursive=True)) or found
        try:
            yield process
        finally:
            process.kill()
    _, alive = psutil.wait_procs(seen, timeout=30)
    for each in alive:
        each.kill()
    assert not alive


@pytest.fixture
def working(folder):
    """A command of which two workers are in the middle of something, and stopped there."""

    @contextmanager
    def start(*arguments):
        for rank in range(6):
            write(folder / "run" / f"rank-{rank}.json.gz", rank)
        with started(*arguments, "run", "--workers", 2) as process:
            # A process that is stopped before it executes its program also stops the command, which waits for that.
            wait_until(lambda: sum(each.cpu_times().user > 0.1 for each in process.descendants()) == 2)
            for worker in process.descendants():
                worker.suspend()
            yield process

    return start


def left(folder: Path) -> list[str]:
    """Temporary files, and entries of the cache that are not complete."""
    hidden = [path for path in (folder / "run").rglob(".*") if path.name != ".bridge_profiling"]
    return [str(path) for path in [*Path("tmp").iterdir(), *hidden, *folder.glob(".*")]]


@pytest.mark.integration
@pytest.mark.parametrize(("number", "said"), ENDINGS)
def test_a_signal_ends_a_command_and_its_workers_even_twice(folder, working, number, said):
    with working("report") as process:
        for _ in range(2):
            process.send_signal(number)
        assert process.communicate(timeout=60) == ("", said)
    assert (process.returncode, left(folder), Path("report.html").exists()) == (128 + number, [], False)


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_costs_its_rank_and_leaves_nothing(folder, working, number):
    with working("analyze") as process:
        killed, other = process.descendants()
        killed.send_signal(number)
        if number == signal.SIGTERM:  # which a stopped process receives once it goes on
            killed.resume()
        other.resume()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n"), left(folder)) == (1, 1, [])
    assert f"killed by signal {number.value}" in err
    assert out


@pytest.mark.integration
def test_workers_end_with_a_command_that_is_killed(working):
    with working("report") as process:
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.integration
@pytest.mark.parametrize(("number", "said"), [*ENDINGS, (signal.SIGKILL, "")])
def test_an_export_ends_with_the_command(folder, number, said):
    (folder / "bin").mkdir()
    (folder / "bin" / "nsys").write_text(NSYS)
    (folder / "bin" / "nsys").chmod(0o755)
    (folder / "run" / "rank-1.nsys-rep").write_text("a report")
    with started("report", "run", PATH=f"{folder / 'bin'}:{os.environ['PATH']}") as process:
        wait_until(lambda: any(each.name() == "sleep" for each in process.descendants()))
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", said)
    if number != signal.SIGKILL:
        assert (process.returncode, left(folder)) == (128 + number, [])


@pytest.mark.integration
@pytest.mark.parametrize("number", dict(ENDINGS))
def test_a_trigger_that_is_interrupted_withdraws_its_request(run, folder, number):
    process = []

    def on_iteration(iteration):
        if iteration == 20:
            trigger = ["trigger", run.root, "--wait", "--start", 10**5]
            process.append(
                subprocess.Popen(["env", "--default-signal", *COMMAND, *map(str, trigger)], stderr=subprocess.PIPE, text=True)
            )
        if process and process[0].poll() is None and run.requests.accepted():
            process[0].send_signal(number)

    run.listen(range(10**6), on_iteration, until=run.done)
    [done] = run.done()
    assert (done["withdrawn"], run.folders()) == (True, [])
    stopped = "stopped waiting: the request is withdrawn, unless the job reaches iteration 100000 first\n"
    assert process[0].communicate() == (None, stopped)
    assert process[0].returncode == 128 + number


@pytest.mark.integration
def test_a_reader_that_has_seen_enough_is_no_error(folder):
    with started("analyze", "run", "--json") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert (process.returncode, left(folder)) == (1, [])


class Raising:
    """Receives a signal where Python drops exceptions."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_arrives_where_exceptions_are_dropped_still_ends_the_command(capsys):
    before = signal.getsignal(signal.SIGTERM)

    def work():
        Raising()
        gc.collect()
        while True:
            signal.sigtimedwait([], 0.01)

    with interruptible() as received, pytest.raises(Interrupted):
        work()
    assert received == [signal.SIGTERM]
    assert capsys.readouterr().err == ""
    signal.signal(signal.SIGTERM, before)


def test_only_the_first_signal_interrupts_and_ignored_ones_stay_ignored():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible() as received:
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(Interrupted):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
