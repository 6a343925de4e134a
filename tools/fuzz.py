"""Looks for input that a reader does not survive: `make fuzz`. Exit code 1: there is some.

    python tools/fuzz.py --minutes 10                 # every target, in processes of their own
    python tools/fuzz.py --target kineto --seed 7     # one round again, here

A round is a hundred examples from one seed. The next run first repeats examples that failed, then goes on with new seeds; both
are kept in `.cache/fuzz`. What is found becomes a row of a table in `tests/hostile`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".cache" / "fuzz"
EXAMPLES = 100

#: An example's files have some kilobytes. Its CPU time, its time in code that no signal interrupts, memory beyond the start's.
CPU_SECONDS, STUCK_SECONDS, MEMORY_BYTES = 20, 300, 2 << 30


def main() -> int:
    """Run all targets, or a round or more of one."""
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, for all targets together")
    parser.add_argument("--target", help="one of tools/fuzz_targets.py")
    parser.add_argument("--seed", type=int, help="of the round to repeat; with --target")
    given = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    if given.target is None:
        return run_all(given.minutes)
    with guarded():
        return run_one(given.target, given.minutes, given.seed)


def run_all(minutes: float) -> int:
    """Every target in a process of its own, so that one that dies or grows is a finding too."""
    from tools.fuzz_targets import TARGETS

    at_once = min(os.cpu_count() or 1, len(TARGETS))
    share = minutes * at_once / len(TARGETS)

    def run(target: str) -> tuple[str, int]:
        command = [sys.executable, str(Path(__file__)), "--target", target, "--minutes", str(share)]
        # An arena for each of DuckDB's threads would take most of the address space that `guarded` leaves.
        environment = os.environ | {"MALLOC_ARENA_MAX": "2"}
        return target, subprocess.run(command, check=False, env=environment).returncode

    with ThreadPoolExecutor(at_once) as threads:
        failed = [f"{target} ({code})" for target, code in threads.map(run, TARGETS) if code]
    print(f"findings in: {', '.join(failed)}" if failed else "no findings", flush=True)
    return int(bool(failed))


def run_one(name: str, minutes: float, only: int | None) -> int:
    """Rounds of one target until its time is up, or until one fails."""
    from tools.fuzz_targets import TARGETS

    target, strategy = TARGETS[name]
    seeds = KEPT / f"{name}.json"
    first = number = only if only is not None else json.loads(seeds.read_text())["next"] if seeds.exists() else 0
    until, examples = time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        while True:

            def example(drawn: Any) -> None:
                nonlocal examples
                if only is None and time.monotonic() > until:
                    return
                examples += 1
                with bounded():
                    target(Path(folder), drawn)

            try:
                seed(number)(_settings(given(strategy)(example)))()
            except BaseException:
                print(f"{name} fails: python tools/fuzz.py --target {name} --seed {number}", flush=True)
                raise
            number += 1
            if only is not None or time.monotonic() > until:
                break
            seeds.write_text(json.dumps({"next": number}))
    print(f"{name}: {examples:,} examples, seeds {first} to {number - 1}", flush=True)
    return 0


_settings = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=DirectoryBasedExampleDatabase(KEPT / "failed"),
    suppress_health_check=list(HealthCheck),
)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Limit this process' memory, and raise in an example that takes too much CPU time."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"an example took more than {CPU_SECONDS} s of CPU")

    signal.signal(signal.SIGPROF, too_long)
    with contextlib.suppress(OSError, ValueError):  # not on macOS
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    yield


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """One example."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
