"""The nsys of this machine: its version, the options it knows, and other options adapted to them.

Asks the program itself, because options come and go between versions. Runs `nsys --version` and `nsys … --help` only;
never profiles.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge_profiling.errors import CaptureError
from bridge_profiling.nsys.options import GPU_METRICS, RENAMED_OPTIONS, split_options


@dataclass(frozen=True)
class NsysVersion:
    """An nsys that runs here: its path, its version as it prints it, and the long names of its `profile` options."""

    executable: str
    text: str
    options: frozenset[str]

    def adapt(self, options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Options of `nsys profile`, renamed or left out for this nsys, and a warning for each such option by its long name."""
        adapted: list[str] = []
        warnings: dict[str, str] = {}
        for name, tokens in split_options(options):
            known = name if not name.startswith("--") else self.name_of(name)
            if known is None:
                warnings[name] = f"nsys {self.text} does not know {name}: left out {' '.join(tokens)}"
                continue
            if known != name:
                warnings[name] = f"nsys {self.text} knows {name} as {known}"
            adapted += [tokens[0].replace(name, known, 1), *tokens[1:]]
        return adapted, warnings

    def name_of(self, option: str) -> str | None:
        """The name of an option in this version; None if it has no such option."""
        names = next((names for names in RENAMED_OPTIONS if option in names), ())
        return next((name for name in (option, *names) if name in self.options), None)

    def gpu_metrics_device(self, local_rank: int) -> str:
        """The number that this nsys gives the GPU of a local rank; raises CaptureError with nsys' own reason if it has none.

        The rank uses the GPU at that place in CUDA_VISIBLE_DEVICES.
        """
        answer = run_nsys(self.executable, "profile", f"{self.name_of(GPU_METRICS) or GPU_METRICS}=help", "true")
        devices = re.findall(r"^\s*(\d+):", answer, re.MULTILINE)
        if not devices:
            reason = " ".join(line.strip() for line in answer.splitlines()[1:] if line.strip()) or "it lists no GPU"
            raise CaptureError(f"nsys samples no GPU metrics here: {reason}")
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        device = visible[local_rank] if local_rank < len(visible) else str(local_rank)
        # A UUID does not give nsys' number; a job that sees one GPU by its UUID mostly sees no other in its container.
        device = device if device.isdigit() else str(local_rank)
        if device not in devices:
            raise CaptureError(f"nsys samples metrics of the GPUs {', '.join(devices)}, not of {device}")
        return device


def find_nsys(name: str = "nsys") -> NsysVersion:
    """The nsys on PATH, or at a path."""
    executable = shutil.which(name)
    if executable is None:
        raise CaptureError(f"{name} is not on PATH here; install Nsight Systems, or mount it into the container")
    version = re.search(r"version\s+(\S+)", run_nsys(executable, "--version"))
    known = run_nsys(executable, "profile", "--help")
    options = re.findall(r"^\s*(?:-\w,\s*)?(--[a-z0-9][a-z0-9-]*)", known, re.MULTILINE)
    if version is None or "--trace" not in options:
        raise CaptureError(f"{executable} does not answer as nsys does")
    return NsysVersion(executable, version.group(1), frozenset(options))


def run_nsys(executable: str, *arguments: str) -> str:
    """The output of a short nsys command, its errors included."""
    try:
        environ = without_injection(os.environ)
        done = subprocess.run([executable, *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CaptureError(f"{executable} does not run: {error}") from error
    return done.stdout + done.stderr


def without_injection(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a program runs free of the nsys around this process."""
    return {name: value for name, value in environ.items() if name not in ("LD_PRELOAD", "CUDA_INJECTION64_PATH")}
