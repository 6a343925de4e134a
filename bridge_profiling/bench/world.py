"""Ranks that have joined, and what they work on: device, hosts, links and versions, as every result says them."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling.bench.failures import UnavailableError
from bridge_profiling.bench.ranks import Place
from bridge_profiling.bench.samples import Estimate
from bridge_profiling.launch_env import LaunchEnv, export_for_torch

#: How long a rank waits for the others.
_TIMEOUT = timedelta(minutes=3)

#: Variables that decide over what messages go.
_LINK_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass(frozen=True)
class World:
    """The ranks that measure together.

    Args:
        place: this process'.
        backend: `nccl` or `gloo`.
        device: what messages lie on.
        hosts: each rank's host.
    """

    place: Place
    backend: str
    device: torch.device
    hosts: list[str]

    def agreed(self, value: float) -> float:
        """The largest of what the ranks say: all go on with the same."""
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told.item())

    def slowest(self, samples: list[float]) -> list[float]:
        """Of each sample the time of the rank that took longest.

        Args:
            samples: this rank's, as many as every rank has.
        """
        told = torch.tensor(samples, dtype=torch.float64, device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return told.tolist()


@contextmanager
def joined(place: Place, backend: str) -> Iterator[World]:
    """Join the other ranks, and leave them.

    Args:
        place: this process'.
        backend: `nccl` or `gloo`.

    Raises:
        UnavailableError: there is no such backend or device here.
    """
    device = _device(place, backend)
    method = f"file://{place.store}" if place.store is not None else "env://"
    if place.store is None:
        export_for_torch()
        host, port = LaunchEnv.read().rendezvous or ("127.0.0.1", 29500)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", str(port))
    bound = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(
        backend, init_method=method, rank=place.rank, world_size=place.size, timeout=_TIMEOUT, **bound  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        hosts: list[Any] = [None] * place.size
        dist.all_gather_object(hosts, socket.gethostname())
        yield World(place, backend, device, hosts)
    finally:
        dist.destroy_process_group()


def _device(place: Place, backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if not dist.is_nccl_available():
        raise UnavailableError(f"nccl: unavailable, torch {torch.__version__} was built without it; type --backend gloo")
    require_cuda()
    if place.local_rank >= torch.cuda.device_count():
        raise UnavailableError(
            f"rank {place.rank}: unavailable, it needs a CUDA device of its own and this host has {torch.cuda.device_count()}; "
            "type a smaller --nproc, or --backend gloo"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def require_cuda() -> None:
    """Refuse a machine without a CUDA device.

    Raises:
        UnavailableError: there is none.
    """
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} was built without CUDA" if torch.version.cuda is None else "torch sees none"
        raise UnavailableError(f"no CUDA device: unavailable, {why}")


def circumstances(kind: str, device: torch.device, *, subject: str | None = None) -> dict[str, Any]:
    """What every result says of where it was measured.

    Args:
        kind: of benchmark.
        device: what was measured.
        subject: the user's own code that was measured.
    """
    cuda = device.type == "cuda"
    return {
        "kind": kind,
        "measured_unix_ns": time.time_ns(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "devices_of_host": torch.cuda.device_count() if cuda else 0,
        "subject": subject,
        "versions": _versions(cuda),
        "limitations": [],
    }


def circumstances_of(world: World) -> dict[str, Any]:
    """The same of communication, with the ranks and what is known of the links between them.

    Args:
        world: of this process.
    """
    return circumstances("collectives", world.device) | {
        "world_size": world.place.size,
        "hosts": len(set(world.hosts)),
        "ranks_per_host": max(world.hosts.count(host) for host in set(world.hosts)),
        "backend": world.backend,
        "link": _link(world),
    }


def plain(estimate: Estimate) -> dict[str, float | int | None]:
    """An estimate as results hold it: six digits, which is more than any clock gives."""
    numbers = {name: getattr(estimate, name) for name in ("median", "mean", "low", "high")}
    rounded = {name: None if value is None else float(f"{value:.6g}") for name, value in numbers.items()}
    return {"count": estimate.count, **rounded}


def _link(world: World) -> dict[str, Any]:
    """What is known of the links: between this host's devices, and which variables choose among them."""
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_LINK_VARIABLES)}
    found: dict[str, Any] = {"environment": chosen}
    if world.device.type == "cuda":
        mine = world.device.index
        others = [other for other in range(torch.cuda.device_count()) if other != mine]
        found["peer_access"] = {str(other): torch.cuda.can_device_access_peer(mine, other) for other in others}
        found["topology"] = _topology()
    return found


def _topology() -> list[str] | None:
    """nvidia-smi's matrix of links, line by line; None without it."""
    try:
        told = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.expandtabs(8).rstrip() for line in told.stdout.splitlines() if line.lstrip().startswith(("GPU", "NIC"))]


def _versions(cuda: bool) -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        found["bridge-profiling"] = metadata.version("bridge-profiling")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        found["bridge-profiling"] = None
    if cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    return found
