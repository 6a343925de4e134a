"""Makes the captures of tests/planted on a machine with 2 or 4 GPUs: one run for each case of `cases.json`.

    python tools/injected_captures/make.py --output DIR [--case NAME …] [--cpu]

Cases run one after the other, each under torchrun. A case that fails leaves the others alone, and its log
says why. At the end everything is packed as it is kept in the repository (`pack.py`), into DIR/planted.tar. Needs nsys for the
cases that it captures, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.planted.cases import CASES, Case
from tests.system.jobs import end_tree
from tools.injected_captures import pack

ROOT = Path(__file__).resolve().parents[2]

#: Seconds that one case may take.
CASE_SECONDS = 330.0


#: NCCL without peer-to-peer copies goes through shared memory, which containers often have little of.
SHARED_MEMORY_BYTES = 1 << 30


def gpus() -> list[int]:
    """Numbers of the GPUs that a process started here sees; empty where there are none."""
    counted = _lines(sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
    return list(range(int(counted[-1]))) if counted else []


def describe() -> dict[str, object]:
    """What captures depend on: GPUs, driver and versions. Names neither the host nor a user."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "megatron-core", "nvtx", "triton", "nvidia-nccl-cu13"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "gpus": _lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "driver": sorted(set(_lines("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))),
        "nsys": _lines("nsys", "--version"),
        "versions": versions,
    }


def _lines(*command: str) -> list[str]:
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in printed.splitlines() if line.strip()]


def run(case: Case, folder: Path, devices: Sequence[int]) -> bool:
    """Run one case's ranks on these GPUs, or on a CPU, with their output in `log.txt`; says whether its captures are whole."""
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
    print(f"{case.name}: {failure or 'done'} after {time.monotonic() - started:.1f} s", flush=True)
    return failure is None


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the captures of tests/planted.")
    parser.add_argument("--output", required=True, type=Path, help="directory for planted.tar")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this one; may be given several times")
    parser.add_argument("--cpu", action="store_true", help="small sizes on a CPU: tries the plumbing, captures no device")
    options = parser.parse_args()
    output = options.output.resolve()
    devices = [] if options.cpu else gpus()
    cases = [CASES[name] for name in options.case or CASES]
    if not options.cpu and max(case.ranks for case in cases) > len(devices):
        print(f"error: {max(case.ranks for case in cases)} GPUs are needed, and there are {len(devices)}", file=sys.stderr)
        return 2
    scratch = output / "runs"
    scratch.mkdir(parents=True, exist_ok=True)
    described = describe()
    whole = [case.name for case in cases if run(case, scratch / case.name, devices)]
    pack.pack_runs([(name, scratch / name) for name in whole], output / "packed", scratch)
    (output / "packed" / "machine.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    with tarfile.open(output / "planted.tar", "w") as tar:
        tar.add(output / "packed", arcname="planted")
    print(f"{len(whole)} of {len(cases)} cases are in {output / 'planted.tar'}; each case's output is in {scratch}/*/log.txt")
    return 0 if len(whole) == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
