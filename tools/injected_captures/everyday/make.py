"""Makes the everyday captures on a machine with 2 GPUs, in about six minutes.

    python tools/injected_captures/everyday/make.py --output DIR [--round 2] [--group NAME …] [--seconds 400] [--cpu]

All processes start at once and wait with torch loaded, because loading takes longer than a case. Groups of one GPU run side by
side, then the others one after the other. Each group is packed when it ends, so that a later failure cannot lose it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from tools.injected_captures.everyday.plants import CONTENDERS_VARIABLE
from tools.injected_captures.everyday.setting import Group
from tools.injected_captures.everyday.table import GROUPS, ROUNDS
from tools.injected_captures.machine import describe

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent

#: Seconds that a group may take.
GROUP_SECONDS = 170.0

#: Archives that groups are packed into: the machine that we used gives back few files, of a limited size.
ARCHIVES = 7

_FIRST_PORT = 29_600
_COMPRESSORS = 16


@dataclass
class Running:
    """A group's processes."""

    group: Group
    folder: Path
    processes: list[subprocess.Popen]
    deadline: float = 0.0

    def go(self, deadline: float) -> None:
        """Let it begin."""
        self.deadline = min(time.monotonic() + GROUP_SECONDS, deadline)
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # it has failed, and `ended` finds that
                process.stdin.write(b"go\n")
                process.stdin.flush()

    def ended(self) -> bool:
        """Whether all of its processes have; they are killed when its time is up, or when one of them failed."""
        codes = [process.poll() for process in self.processes]
        if time.monotonic() > self.deadline or any(codes):
            for process in self.processes:
                process.kill()
            return True
        return None not in codes


def start(group: Group, place: int, scratch: Path, gpus: Sequence[int]) -> Running:
    """Start a group's processes, which wait before they use a device. `gpus` is empty for a CPU."""
    folder = scratch / group.name
    folder.mkdir(parents=True)
    processes = []
    for rank in range(group.setting.ranks):
        command = [sys.executable, str(HERE / "worker.py"), f"--group={group.name}", f"--rank={rank}", f"--output={folder}"]
        command += [f"--port={_FIRST_PORT + place}", *([f"--gpu={gpus[rank]}"] if gpus else [])]
        with (folder / f"log-rank-{rank}.txt").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=_environment(scratch)
                )
            )
    return Running(group, folder, processes)


def _environment(scratch: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TEARDOWN_CUPTI": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        CONTENDERS_VARIABLE: str(scratch),
    }


def compress(path: Path) -> None:
    """Replace a trace by its xz."""
    raw = path.read_bytes()
    path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(raw, preset=1))
    path.unlink()


class Archives:
    """Tar files that groups go into when they are done, each into the smallest."""

    def __init__(self, output: Path, scratch: Path) -> None:
        self.paths = [output / f"captures-{number}.tar" for number in range(ARCHIVES)]
        self.compressors = ProcessPoolExecutor(_COMPRESSORS)
        with tarfile.open(self.paths[0], "a") as tar:
            tar.add(scratch / "names.json", arcname="names.json")

    def add(self, running: Running) -> None:
        """Pack what a group left."""
        traces = sorted(running.folder.rglob("*.trace.json"))
        list(self.compressors.map(compress, traces))
        smallest = min(self.paths, key=lambda path: path.stat().st_size if path.exists() else 0)
        with tarfile.open(smallest, "a") as tar:
            tar.add(running.folder, arcname=running.group.name)
        for process, rank in zip(running.processes, range(len(running.processes)), strict=True):
            print(f"{running.group.name} rank {rank}: code {process.poll()}", flush=True)
        log = (running.folder / "log-rank-0.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(line for line in log if line.startswith(running.group.name)), flush=True)
        sizes = sum(path.stat().st_size for path in running.folder.rglob("*.xz"))
        print(f"{running.group.name}: {len(traces)} traces, {sizes} bytes, into {smallest.name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the everyday captures.")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/everyday"))
    parser.add_argument("--group", action="append", choices=GROUPS)
    parser.add_argument("--round", type=int, choices=ROUNDS, help="groups of this round only")
    parser.add_argument("--seconds", type=float, default=390.0, help="what runs then is stopped, and packed")
    parser.add_argument("--cpu", action="store_true", help="small sizes on a CPU: tries the plumbing, captures no device")
    options = parser.parse_args()
    began = time.monotonic()
    deadline = began + options.seconds
    shutil.rmtree(options.scratch, ignore_errors=True)
    options.scratch.mkdir(parents=True)
    described = describe()
    (options.output / "machine.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    # What names the machine in captures: packing replaces it elsewhere.
    telling = {"host": socket.gethostname(), "paths": [str(options.scratch), str(ROOT), *sys.path, sys.prefix]}
    (options.scratch / "names.json").write_text(json.dumps(telling), encoding="utf-8")
    gpus = [] if options.cpu else [0, 1]
    archives = Archives(options.output, options.scratch)
    contenders = [
        subprocess.Popen([sys.executable, str(HERE / "contender.py"), f"--gpu={gpu}", f"--folder={options.scratch}"])
        for gpu in (0, 1)
    ]
    names = options.group or [group.name for group in (ROUNDS[options.round] if options.round else GROUPS.values())]
    chosen = [GROUPS[name] for name in names]
    lanes: list[list[Running]] = [[], []]
    pairs = []
    for place, group in enumerate(chosen):
        if group.setting.ranks == 1:
            lane = min((0, 1), key=lambda number: sum(len(one.group.cases) for one in lanes[number]))
            lanes[lane].append(start(group, place, options.scratch, gpus[lane : lane + 1]))
        else:
            pairs.append(start(group, place, options.scratch, gpus))
    try:
        with ThreadPoolExecutor(len(lanes)) as side_by_side:
            list(side_by_side.map(lambda lane: run(lane, deadline), lanes))
        for running in (*lanes[0], *lanes[1]):
            archives.add(running)
        for running in pairs:
            run([running], deadline)
            archives.add(running)
    finally:
        for process in [*contenders, *(one for running in (*lanes[0], *lanes[1], *pairs) for one in running.processes)]:
            process.kill()
    print(f"done after {time.monotonic() - began:.0f} s")
    return 0


def run(groups: Sequence[Running], deadline: float) -> None:
    """Run groups one after the other; none begins after the deadline."""
    for running in groups:
        if time.monotonic() >= deadline:
            print(f"{running.group.name}: no time left", flush=True)
            continue
        running.go(deadline)
        while not running.ended():
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
