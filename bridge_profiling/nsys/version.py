"""What the nsys of this machine is and accepts: its version, its options, and requests translated to what it knows.

Asks the program itself, because options come and go between versions. Runs `nsys --version` and `nsys … --help` only;
never profiles.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from bridge_profiling.errors import CaptureError
from bridge_profiling.nsys.options import split_options

#: One option under the names that versions gave it; the newest first.
_RENAMED = (("--gpu-metrics-devices", "--gpu-metrics-device"),)

_SECONDS = 60


@dataclass(frozen=True)
class NsysVersion:
    """An nsys that runs here.

    Attributes:
        executable: its path.
        text: what it calls itself, for example `2024.2.3.38-242334140272v0`.
        options: long names of all options that its `profile` command knows.
    """

    executable: str
    text: str
    options: frozenset[str]


def find_nsys(name: str = "nsys") -> NsysVersion:
    """The nsys on PATH, or at a path.

    Raises:
        CaptureError: there is none, or it does not run.
    """
    executable = shutil.which(name)
    if executable is None:
        raise CaptureError(
            f"{name} is not on this machine's PATH; install Nsight Systems there, or mount it into the container"
        )
    return read_version(executable)


def read_version(executable: str) -> NsysVersion:
    """Ask an nsys for its version and its options.

    Raises:
        CaptureError: it does not run, or is no nsys.
    """
    version = re.search(r"version\s+(\S+)", _run(executable, "--version"))
    options = re.findall(r"^\s*(?:-\w,\s*)?(--[a-z0-9][a-z0-9-]*)", _run(executable, "profile", "--help"), re.MULTILINE)
    if version is None or "--trace" not in options:
        raise CaptureError(f"{executable} does not answer as nsys does")
    return NsysVersion(executable, version.group(1), frozenset(options))


def adapt(options: Sequence[str], version: NsysVersion) -> tuple[list[str], list[str]]:
    """Options for this nsys: renamed to the name it knows, left out where it knows none.

    Args:
        options: of `nsys profile`, as `--flag=value` or `--flag value`, long or short.
        version: the nsys they are for.

    Returns:
        The options, and a warning for each that was left out or renamed.
    """
    adapted: list[str] = []
    warnings: list[str] = []
    for name, tokens in split_options(options):
        known = name if name in version.options or not name.startswith("--") else _other_name(name, version)
        if known is None:
            warnings.append(f"nsys {version.text} does not know {name}: left out {' '.join(tokens)}")
            continue
        if known != name:
            warnings.append(f"nsys {version.text} knows {name} as {known}")
            tokens = [tokens[0].replace(name, known, 1), *tokens[1:]]
        adapted += tokens
    return adapted, warnings


def gpu_metrics_device(version: NsysVersion, local_rank: int) -> str:
    """The number by which this nsys knows the GPU of a local rank, for its GPU metrics.

    Args:
        version: the nsys to ask.
        local_rank: rank on this machine; it uses the GPU of that place in CUDA_VISIBLE_DEVICES.

    Raises:
        CaptureError: it samples no GPU here; with nsys' own reason, a missing permission for example.
    """
    option = _other_name("--gpu-metrics-devices", version) or "--gpu-metrics-device"
    answer = _run(version.executable, "profile", f"{option}=help", "true")
    devices = re.findall(r"^\s*(\d+):", answer, re.MULTILINE)
    if not devices:
        said = " ".join(line.strip() for line in answer.splitlines()[1:] if line.strip()) or "it names no GPU"
        raise CaptureError(f"nsys samples no GPU metrics here: {said}")
    device = _visible_device(local_rank)
    if device not in devices:
        raise CaptureError(f"nsys samples metrics of the GPUs {', '.join(devices)}, not of {device}")
    return device


def _visible_device(local_rank: int) -> str:
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    device = visible[local_rank] if local_rank < len(visible) else str(local_rank)
    # A UUID says nothing about nsys' numbers; a job that sees one GPU by its UUID mostly sees no other in its container.
    return device if device.isdigit() else str(local_rank)


def _other_name(name: str, version: NsysVersion) -> str | None:
    for names in _RENAMED:
        if name in names:
            return next((other for other in names if other in version.options), None)
    return name if name in version.options else None


def _run(executable: str, *arguments: str) -> str:
    # Without the injection of an nsys that runs around this process already.
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "CUDA_INJECTION64_PATH")}
    try:
        done = subprocess.run(
            [executable, *arguments], env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CaptureError(f"{executable} does not run: {error}") from error
    return done.stdout + done.stderr
