"""The conditions of a measurement: where, when and with which versions."""

from __future__ import annotations

import platform
import socket
import time
from typing import Any

import torch

from bridge_profiling import __version__


def conditions(kind: str, device: torch.device | None = None, subject: str | None = None) -> dict[str, Any]:
    """The fields common to all results: where and when they were measured, and no limitations yet."""
    cuda = device is not None and device.type == "cuda"
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "bridge-profiling": __version__,
    }
    if cuda:
        versions["cuda"], versions["nccl"] = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version()))
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
