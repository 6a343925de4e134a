"""The machine that captures are made on: its GPUs and versions, as its own tools name them."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata


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
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.splitlines() if line.strip()]
