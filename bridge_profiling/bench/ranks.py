"""The ranks of a measurement: starting them on this machine or joining those of a launcher, timing on their devices, and the
conditions they run under.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling import __version__
from bridge_profiling.bench.results import MeasurementError, UnavailableError
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.processes import OwnedProcess

#: Path of the rendezvous file for ranks started by `run_locally`: a port that is free now may be taken a moment later.
STORE_VARIABLE = "BRIDGE_PROFILING_BENCH_STORE"

#: Environment variables that select the links.
_LINK_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")

#: Seconds that ranks have to end after one has failed.
_PATIENCE_S = 5.0

#: How long a rank waits for the others.
_TIMEOUT = timedelta(minutes=3)

#: Target duration of a sample, and its largest number of operations: long enough for any clock, and few enough for a device's
#: queue.
_SAMPLE_S, _MAX_OPERATIONS = 0.002, 50

_MAX_SAMPLES = 30


def run_locally(arguments: Sequence[str], processes: int | None, backend: str | None) -> int:
    """Start ranks on this machine and wait for them; if one fails, end the others and return its exit code.

    `processes` None means one per CUDA device, else 2; `backend` None means the best available.
    """
    devices = torch.cuda.device_count() if backend != "gloo" and torch.cuda.is_available() else 0
    if processes is None and devices == 1:
        raise UnavailableError(
            "one CUDA device: unavailable, communication needs two; type --backend gloo to measure the host's instead"
        )
    count = processes or devices or 2
    command = [sys.executable, "-m", "bridge_profiling.bench", *arguments]
    with tempfile.TemporaryDirectory(prefix="bridge_profiling-bench-", ignore_cleanup_errors=True) as folder:
        # One thread each by default, as with torchrun: the ranks share the machine's CPU cores.
        common = {"OMP_NUM_THREADS": "1"} | os.environ | {"WORLD_SIZE": str(count), STORE_VARIABLE: f"{folder}/store"}
        errors = [Path(folder, f"stderr-{rank}") for rank in range(count)]
        running: list[OwnedProcess] = []
        try:
            for rank, path in enumerate(errors):
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with path.open("wb") as stderr:
                    running.append(OwnedProcess(command, env=environment, stderr=stderr))
            failed = _first_failure(running)
            if failed is None:
                return 0
            # Its last words are the reason; the others fail because it did.
            print(errors[failed].read_text(errors="replace").rstrip(), file=sys.stderr)
            code = running[failed].returncode
            return code if code > 0 else MeasurementError.exit_code
        finally:
            _end(running)


def _first_failure(running: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all ranks, or for the first that fails; returns that one."""
    while True:
        codes = [process.poll() for process in running]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(0.05)


def _end(running: Sequence[OwnedProcess]) -> None:
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _PATIENCE_S
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
        process.end()


@dataclass(frozen=True)
class World:
    """The ranks that measure together; `device` is where messages are stored, `hosts` has the host of each rank."""

    rank: int
    size: int
    backend: str
    device: torch.device
    hosts: list[str]

    def slowest(self, samples: list[float]) -> list[float]:
        """For each sample the largest value of all ranks, which must have the same number of them."""
        values = torch.tensor(samples, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()


@contextmanager
def joined(env: LaunchEnv, backend: str) -> Iterator[World]:
    """Join the other ranks for the duration of the block."""
    device = _device(env, backend)
    store = os.environ.get(STORE_VARIABLE)
    host, port = env.rendezvous or ("127.0.0.1", 29500)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    dist.init_process_group(
        backend,
        init_method="env://" if store is None else f"file://{store}",
        rank=env.rank,
        world_size=env.world_size,
        timeout=_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    try:
        hosts: list[Any] = [None] * env.world_size
        dist.all_gather_object(hosts, socket.gethostname())
        yield World(env.rank, env.world_size, backend, device, hosts)
    finally:
        dist.destroy_process_group()


def _device(env: LaunchEnv, backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if not dist.is_nccl_available():
        raise UnavailableError(f"nccl: unavailable, torch {torch.__version__} was built without it; type --backend gloo")
    require_cuda()
    if env.device_index >= torch.cuda.device_count():
        raise UnavailableError(
            f"rank {env.rank}: unavailable, it needs a CUDA device of its own and this host has {torch.cuda.device_count()}; "
            "type a smaller --nproc, or --backend gloo"
        )
    torch.cuda.set_device(env.device_index)
    return torch.device("cuda", env.device_index)


def require_cuda() -> None:
    """Raise UnavailableError on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} was built without CUDA" if torch.version.cuda is None else "torch finds none"
        raise UnavailableError(f"no CUDA device: unavailable, {why}")


def plan(once_s: float, budget_s: float, *, min_samples: int) -> tuple[int, int]:
    """Operations per sample, and number of samples, for an operation that takes `once_s` and a total of about `budget_s`."""
    operations = int(min(max(_SAMPLE_S / once_s, 1), _MAX_OPERATIONS))
    return operations, int(min(max(budget_s / (once_s * operations), min_samples), _MAX_SAMPLES))


def device_seconds(call: Callable[[], object], count: int, *, hold_cycles: int = 0) -> float:
    """Seconds of `count` calls in sequence by the clock of the CUDA device, which first waits for `hold_cycles`."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if hold_cycles:
        torch.cuda._sleep(hold_cycles)
    before.record()
    for _ in range(count):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def conditions(kind: str, device: torch.device, *, subject: str | None = None) -> dict[str, Any]:
    """The fields common to all results: where and when they were measured, and no limitations yet."""
    cuda = device.type == "cuda"
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions["bridge-profiling"] = __version__
    if cuda:
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    return {
        "kind": kind,
        "measured_unix_ns": time.time_ns(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "devices_of_host": torch.cuda.device_count() if cuda else 0,
        "subject": subject,
        "versions": versions,
        "limitations": [],
    }


def links(device: torch.device) -> dict[str, Any]:
    """The variables that select links, and on CUDA devices peer access and nvidia-smi's matrix of links."""
    selected = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_LINK_VARIABLES)}
    found: dict[str, Any] = {"environment": selected}
    if device.type == "cuda":
        own = device.index
        others = [other for other in range(torch.cuda.device_count()) if other != own]
        found["peer_access"] = {str(other): torch.cuda.can_device_access_peer(own, other) for other in others}
        found["topology"] = None
        with suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "topo", "-m"]
            matrix = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
            found["topology"] = [line.expandtabs(8).rstrip() for line in matrix if line.lstrip().startswith(("GPU", "NIC"))]
    return found
