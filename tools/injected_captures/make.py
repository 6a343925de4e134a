"""Makes the captures of tests/planted on a machine with 2 or 4 GPUs: one run for each case of `cases.json`.

    python tools/injected_captures/make.py --output DIR [--case NAME …] [--cpu]

Cases run one after the other, each under torchrun. A case that fails leaves the others alone; its row in the table and its log
say why. At the end everything is packed as it is kept in the repository (`pack.py`), into DIR/planted.tar. Needs nsys for the
cases that it captures, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.planted.cases import CASES, Case
from tests.system.jobs import end_tree
from tools.injected_captures import pack
from tools.injected_captures.machine import describe, gpus

ROOT = Path(__file__).resolve().parents[2]

#: Seconds that one case may take.
CASE_SECONDS = 330.0

#: Lines of a failed case's log that the table shows.
LOG_LINES = 30

#: NCCL without peer-to-peer copies goes through shared memory, which containers often have little of.
SHARED_MEMORY_BYTES = 1 << 30


@dataclass
class Ended:
    """One case's run: where it ran, how long it took, and why it failed."""

    case: Case
    folder: Path
    seconds: float
    failure: str | None


def run(case: Case, folder: Path, devices: Sequence[int]) -> Ended:
    """Run one case's ranks on these GPUs, on a CPU where there are none, with their output in `log.txt`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    command += [str(Path(__file__).with_name("rank.py")), "--case", case.name, *([] if devices else ["--cpu"])]
    started, environment = time.monotonic(), _environment(case, devices[: case.ranks])
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(CASE_SECONDS)
            failure = f"torchrun ended with code {code}" if code else _incomplete(case, folder / "profiles")
        except subprocess.TimeoutExpired:
            failure = f"it was not done after {CASE_SECONDS:.0f} s"
        finally:
            end_tree(process)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    seconds = time.monotonic() - started
    print(f"{case.name}: {failure or 'done'} after {seconds:.1f} s", flush=True)
    return Ended(case, folder, seconds, failure)


def _environment(case: Case, devices: Sequence[int]) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4" if devices else "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
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


def report(runs: Sequence[Ended], packed: dict[str, list[tuple[str, int]]]) -> str:
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
        if run.failure:
            tail = (run.folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            lines += ["", f"--- {run.case.name}: {run.failure}", *tail]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the captures of tests/planted.")
    parser.add_argument("--output", required=True, type=Path, help="directory for planted.tar")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this one; may be given several times")
    parser.add_argument("--cpu", action="store_true", help="small sizes on a CPU: tries the plumbing, captures no device")
    options = parser.parse_args()
    began = time.monotonic()
    output = options.output.resolve()
    devices = [] if options.cpu else gpus()
    cases = [CASES[name] for name in options.case or CASES]
    if not options.cpu and max(case.ranks for case in cases) > len(devices):
        print(f"error: {max(case.ranks for case in cases)} GPUs are needed, and there are {len(devices)}", file=sys.stderr)
        return 2
    scratch = output / "runs"
    scratch.mkdir(parents=True, exist_ok=True)
    described = describe()
    runs = [run(case, scratch / case.name, devices) for case in cases]
    whole = [(ended.case.name, ended.folder) for ended in runs if not ended.failure]
    packed = pack.pack_runs(whole, output / "packed", scratch)
    (output / "packed" / "machine.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    table = report(runs, packed)
    (output / "packed" / "table.txt").write_text(table + "\n", encoding="utf-8")
    with tarfile.open(output / "planted.tar", "w") as tar:
        tar.add(output / "packed", arcname="planted")
    print(table)
    print(f"{output / 'planted.tar'}: {(output / 'planted.tar').stat().st_size} bytes, {time.monotonic() - began:.0f} s")
    return 0 if all(ended.failure is None for ended in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
