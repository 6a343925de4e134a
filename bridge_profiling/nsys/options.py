"""The options of `nsys profile`: our defaults, the user's merged over them by option name, and the checks of both.

The submit host checks options, a rank puts them on its command line (nsys/command.py). Never runs nsys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.errors import ProfilingConfigError, did_you_mean, require

#: APIs that are traced unless the user names others.
DEFAULT_TRACE = ("nvtx", "cuda")

#: Defaults of a rank that starts its own nsys, with their reasons. The user's options replace them by name.
DEFAULT_OPTIONS = (
    "--sample=none",  # CPU sampling interrupts the launching thread, and needs a permission few clusters give
    "--cpuctxsw=none",  # inside the window: 1.13 x the step without context switches, 1.23 x with them
    "--cuda-graph-trace=node",  # traced as a whole, a graph hides its kernels, and with them what to change
    "--cuda-event-trace=false",  # NCCL and overlap record events by the thousand; versions without it never trace them
    "--force-overwrite=true",  # the name is ours, and a failed start may have left the file
    "--kill=none",  # the training goes on when the collection ends, after a `--duration` for example
    "--wait=primary",  # a helper process that the training leaves behind must not keep the job waiting
)

#: The NVTX range that the hook opens for the window; nsys' capture range where there is no CUDA device.
CAPTURE_RANGE = "bridge_profiling_window"

#: Groups of names that versions of nsys gave one option, the newest first.
RENAMED_OPTIONS = (("--gpu-metrics-devices", "--gpu-metrics-device"),)

#: Samples the GPU's metrics, under its newest name.
GPU_METRICS = RENAMED_OPTIONS[0][0]

#: Options that we write for the user, and how to set them instead.
_RESERVED = {
    "--trace": 'Pass nsys_trace=["nvtx", "cuda"]',
    "--output": "Leave it out; the report goes to the job's directory",
}
#: nsys' short options that mean the same as a long one.
_LONG_NAMES = {
    "-b": "--backtrace",
    "-c": "--capture-range",
    "-d": "--duration",
    "-e": "--env-var",
    "-f": "--force-overwrite",
    "-n": "--inherit-environment",
    "-o": "--output",
    "-p": "--nvtx-capture",
    "-s": "--sample",
    "-t": "--trace",
    "-w": "--show-output",
    "-x": "--stop-on-exit",
    "-y": "--delay",
}


#: Words of `nsys profile --trace` on Linux, of releases from 2022 to 2025 (Nsight Systems User Guide, "CLI Profile Command
#: Switch Options").
TRACE_WORDS = (
    *("cuda", "cuda-hw", "cuda-sw", "nvtx", "osrt", "cublas", "cublas-verbose", "cusparse", "cusparse-verbose", "cudnn"),
    *("cusolver", "cusolver-verbose", "cudla", "cudla-verbose", "mpi", "ucx", "oshmem", "nccl", "gds", "gds-beta", "openacc"),
    *("openmp", "python-gil", "syscall", "nvvideo", "opengl", "opengl-annotations", "vulkan", "vulkan-annotations"),
    *("tegra-accelerators", "none"),
)


@dataclass(frozen=True, kw_only=True)
class NsysRequest:
    """What one rank asks of the nsys that it starts.

    Attributes:
        rank: global rank.
        local_rank: rank on this machine; the number of its GPU.
        cuda: whether the training uses a CUDA device. Without one the window is marked by an NVTX range.
        output_dir: root of the captures.
        trace: APIs to trace; None is DEFAULT_TRACE.
        extra_args: the user's options, over the defaults.
        gpu_metrics: sample the metrics of the rank's GPU.
        export_sqlite: write an SQLite file next to each report.
        captures: how many windows to capture.
    """

    rank: int
    local_rank: int
    cuda: bool
    output_dir: Path
    trace: Sequence[str] | None = None
    extra_args: Sequence[str] = ()
    gpu_metrics: bool = False
    export_sqlite: bool = False
    captures: int = 1


def check_trace(trace: object, *, name: str = "nsys_trace") -> None:
    """Check that an `nsys_trace` is a list of API names."""
    names = trace if isinstance(trace, list) else []
    require(
        names and all(isinstance(name, str) and re.fullmatch(r"[a-z0-9-]+", name) for name in names),
        f"{name}={trace!r} is not a list of APIs to trace",
        why="each entry is one name that `nsys profile --trace` knows",
        instead=f'Type {name}=["nvtx", "cuda"], or leave it out for the same',
    )
    for word in names:
        require(
            word in TRACE_WORDS,
            f"{name} holds {word!r}, which nsys cannot trace",
            why="nsys would refuse to start, and the ranks would train without it",
            instead=f"{did_you_mean(word, TRACE_WORDS)}; a newer nsys' own words go into nsys_extra_args as --trace=…",
        )


def check_extra_args(extra_args: object, *, name: str = "nsys_extra_args") -> None:
    """Check that `nsys_extra_args` can be passed on, and that Slurm's shell and a plain process read them alike."""
    example = f'Type for example {name}=["--cuda-graph-trace=graph", "--gpu-metrics-device=0"]'
    if not isinstance(extra_args, list) or not all(isinstance(arg, str) and arg for arg in extra_args):
        raise ProfilingConfigError(f"{name}={extra_args!r} is not a list of options", instead=example)
    for arg in extra_args:
        require(
            not re.search(r"[\s'\"]", arg),
            f"{name} holds {arg!r}, with a space or a quote",
            why="NeMo-Run gives it to a shell on Slurm and to nsys itself elsewhere, which read it differently",
            instead="Give an option and its value as two entries, without quotes",
        )
    for option, (first, *_) in split_options(extra_args):
        require(option.startswith("-"), f"{name} starts with {first!r}, a value without an option", instead=example)
        require(
            option not in _RESERVED,
            f"{name} holds {first!r}",
            why="that option is written for you",
            instead=_RESERVED.get(option, ""),
        )


def split_options(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Options as pairs of long name and tokens as written: `--flag value` is one option of two tokens."""
    options: list[tuple[str, list[str]]] = []
    for token in args:
        if token.startswith("-") or not options:
            name = token.split("=", 1)[0]
            options.append((_LONG_NAMES.get(name, name), [token]))
        else:
            options[-1][1].append(token)
    return options


def merge_options(defaults: Sequence[str], extra_args: Sequence[str]) -> list[str]:
    """The defaults with the user's options over them, by option name.

    `--flag=value`, `--flag value` and nsys' short form name the same option. The user's keep their order, after the remaining
    defaults. Merging the same options twice gives the same list.
    """
    given = {name for name, _ in split_options(extra_args)}
    kept = [token for name, tokens in split_options(defaults) if name not in given for token in tokens]
    return [*kept, *extra_args]


def value_of(args: Sequence[str], option: str) -> str | None:
    """The value of an option, written in any form; None if it is not among these or has none."""
    for name, (first, *values) in split_options(args):
        if name == option:
            return first.split("=", 1)[1] if "=" in first else next(iter(values), None)
    return None


def reports_with_range(args: Sequence[str]) -> bool:
    """Whether nsys writes its report when a capture range ends; otherwise when the application or the duration ends."""
    ends = value_of(args, "--capture-range-end")
    return value_of(args, "--capture-range") not in (None, "none") and (ends is None or ends.startswith(("stop", "repeat")))


def captures_of(args: Sequence[str]) -> int:
    """How many capture ranges nsys records with these options: one, unless they say `repeat:N`."""
    ends = re.fullmatch(r"repeat(?:-shutdown)?:(\d+)", value_of(args, "--capture-range-end") or "")
    return int(ends[1]) if ends else 1
