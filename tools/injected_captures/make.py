"""Makes the captures of tests/planted on a machine with 2 or 4 GPUs: one run for each case of `cases.json`.

    python tools/injected_captures/make.py --output DIR [--case NAME …] [--cpu]

Cases of 2 ranks run two at a time, each on a pair of GPUs of its own; those of 4 ranks run alone. A case that fails leaves
the others alone; its row in the table and its log say why. At the end everything is packed as it is kept in the repository
(`pack.py`), into DIR/planted.tar. Needs nsys for the cases that it captures, and no network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.planted.cases import CASES, Case
from tests.ports import free_port
from tools.injected_captures import machine, pack

ROOT = Path(__file__).resolve().parents[2]

#: Seconds that one case may take after its training was told to go, and to get ready for it.
CASE_SECONDS, IMPORT_SECONDS = 150.0, 180.0

#: Seconds that the other ranks of a failed one get to end by themselves.
GRACE_SECONDS = 5.0

#: Lines of a failed case's log that the table shows.
LOG_LINES = 15

#: NCCL without peer-to-peer copies goes through shared memory, which containers often have little of.
SHARED_MEMORY_BYTES = 1 << 30


@dataclass
class Running:
    """One case's ranks, from their start to their end.

    Args:
        case: which.
        folder: where it runs, and writes.
        devices: numbers of its GPUs; empty on a CPU.
    """

    case: Case
    folder: Path
    devices: Sequence[int]
    ranks: list[subprocess.Popen] = field(default_factory=list)
    started: float = 0.0
    seconds: float = 0.0
    failure: str | None = None

    def start(self) -> None:
        """Start the ranks: they import what they need, and wait to be told to go."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        environment = _environment(self.case, self.devices)
        port = free_port()
        arguments = ["--case", self.case.name, "--go", str(self._go), *([] if self.devices else ["--cpu"])]
        for rank in range(self.case.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.case.ranks, "MASTER_PORT": port}
            with self.log(rank).open("wb") as log:
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(Path(__file__).with_name("rank.py")), *arguments],
                        cwd=self.folder,
                        env=environment | {name: str(value) for name, value in place.items()},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        self.started = time.monotonic()

    @property
    def _go(self) -> Path:
        return self.folder / "go"

    def log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.folder / f"log-{rank}.txt"

    def go(self) -> None:
        """Let the training begin, when every rank is ready for it: the GPUs are free now."""
        deadline = time.monotonic() + IMPORT_SECONDS
        while len(list(self.folder.glob("ready-*"))) < len(self.ranks) and time.monotonic() < deadline:
            if any(rank.poll() is not None for rank in self.ranks):
                break
            time.sleep(0.05)
        self._go.touch()
        self.started = time.monotonic()

    def wait(self) -> None:
        """Wait for all ranks, or end them when one has failed or the time is over."""
        deadline = self.started + CASE_SECONDS
        while (codes := [rank.poll() for rank in self.ranks]).count(None):
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                self.failure = f"rank {failed[0]} ended with code {codes[failed[0]]}"
                time.sleep(GRACE_SECONDS)
            elif time.monotonic() > deadline:
                self.failure = f"it was not done after {CASE_SECONDS:.0f} s"
            if self.failure:
                self.end()
                break
            time.sleep(0.05)
        self.seconds = time.monotonic() - self.started
        if self.failure is None and any(codes):
            self.failure = f"ranks ended with codes {codes}"
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        if self.failure is None:
            self.failure = _incomplete(self.case, self.folder / "profiles")

    def end(self) -> None:
        """End the ranks that still run: gently, so that an nsys around them ends too, then not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [rank for rank in self.ranks if rank.poll() is None]
            for rank in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, number)
            until = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < until and any(rank.poll() is None for rank in running):
                time.sleep(0.05)


def _environment(case: Case, devices: Sequence[int]) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4" if devices else "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "MASTER_ADDR": "127.0.0.1",
        "NCCL_DEBUG": "WARN",
    }
    environment |= case.environment
    environment.pop("BRIDGE_PROFILING_DIR", None)
    shared = Path("/dev/shm")
    if "NCCL_P2P_DISABLE" in case.environment and shared.is_dir() and shutil.disk_usage(shared).free < SHARED_MEMORY_BYTES:
        environment["NCCL_SHM_DISABLE"] = "1"
    return environment


def _incomplete(case: Case, profiles: Path) -> str | None:
    """What is missing of a case's captures; None when they are whole."""
    for rank in case.captured:
        manifests = list(profiles.glob(f"manifest/*/rank-{rank}.json"))
        if len(manifests) != 1:
            return f"rank {rank} has {len(manifests)} manifests"
        manifest = json.loads(manifests[0].read_text(encoding="utf-8"))
        if manifest["status"] != "complete":
            return f"rank {rank} is {manifest['status']}: {manifest['reason']}"
    return None


def run_in_turn(cases: Sequence[Case], devices: Sequence[int], scratch: Path, deadline: float) -> list[Running]:
    """Run cases one after the other on the same GPUs; while one trains, the next one's ranks import what they need."""
    done: list[Running] = []
    upcoming = [Running(case, scratch / case.name, devices[: case.ranks]) for case in cases]
    for place, running in enumerate(upcoming):
        if time.monotonic() > deadline:
            running.failure = "not started: the time was over"
            running.end()
        else:
            try:
                if not running.ranks:
                    running.start()
                running.go()
                if place + 1 < len(upcoming):
                    upcoming[place + 1].start()
                running.wait()
            except Exception as error:
                # One case's trouble is not the others'.
                running.failure = f"{type(error).__name__}: {error}"
                running.end()
        done.append(running)
        print(f"{running.case.name}: {running.failure or 'done'} after {running.seconds:.1f} s", flush=True)
    return done


def run_all(cases: Sequence[Case], scratch: Path, devices: Sequence[int], deadline: float) -> list[Running]:
    """Run every case: those of 2 ranks on pairs of GPUs at the same time, the larger ones after them."""
    pairs = [devices[first : first + 2] for first in range(0, len(devices) - 1, 2)] or [()]
    small, large = [case for case in cases if case.ranks == 2], [case for case in cases if case.ranks > 2]
    with ThreadPoolExecutor(len(pairs)) as threads:
        shares = [small[place :: len(pairs)] for place in range(len(pairs))]
        done = [
            running
            for found in threads.map(
                lambda share: run_in_turn(share[0], share[1], scratch, deadline), zip(shares, pairs, strict=True)
            )
            for running in found
        ]
    return done + run_in_turn(large, devices, scratch, deadline)


def report(runs: Sequence[Running], packed: dict[str, list[tuple[str, int]]]) -> str:
    """A table: case, ranks, iterations, files, bytes; and why the failed ones failed."""
    lines = [f"{'case':28} {'ranks':>5} {'iterations':>10} {'files':>5} {'bytes':>9} {'largest':>8} {'seconds':>7}  status"]
    for run in runs:
        files = packed.get(run.case.name, [])
        sizes = [size for _, size in files] or [0]
        first, end = run.case.window
        lines.append(
            f"{run.case.name:28} {run.case.ranks:5} {f'{first} to {end - 1}':>10} {len(files):5} {sum(sizes):9} {max(sizes):8}"
            f" {run.seconds:7.1f}  {'failed: ' + run.failure if run.failure else 'done'}"
        )
    total = sum(size for files in packed.values() for _, size in files)
    lines.append(f"{sum(run.failure is None for run in runs)} of {len(runs)} cases are done, {total} bytes")
    for run in runs:
        for rank in range(run.case.ranks) if run.failure else ():
            if run.log(rank).is_file():
                tail = run.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
                lines += ["", f"--- {run.case.name}, rank {rank}: {run.failure}", *tail]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the captures of tests/planted.")
    parser.add_argument("--output", required=True, type=Path, help="directory for planted.tar")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this one; may be given several times")
    parser.add_argument("--cpu", action="store_true", help="small sizes on a CPU: tries the plumbing, captures no device")
    parser.add_argument("--minutes", type=float, default=7.0, help="start no case after this long (default: %(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    output = options.output.resolve()
    devices = [] if options.cpu else machine.gpus()
    cases = [CASES[name] for name in options.case or CASES]
    if not options.cpu and max(case.ranks for case in cases) > len(devices):
        print(f"error: {max(case.ranks for case in cases)} GPUs are needed, and there are {len(devices)}", file=sys.stderr)
        return 2
    scratch = output / "runs"
    scratch.mkdir(parents=True, exist_ok=True)
    described = machine.describe()
    runs = run_all(cases, scratch, devices, began + 60 * options.minutes)
    packed = pack.pack_runs([(run.case.name, run.folder) for run in runs if not run.failure], output / "packed", scratch)
    (output / "packed" / "machine.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    table = report(runs, packed)
    (output / "packed" / "table.txt").write_text(table + "\n", encoding="utf-8")
    with tarfile.open(output / "planted.tar", "w") as tar:
        tar.add(output / "packed", arcname="planted")
    print(table)
    print(f"{output / 'planted.tar'}: {(output / 'planted.tar').stat().st_size} bytes, {time.monotonic() - began:.0f} s")
    return 0 if all(run.failure is None for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
