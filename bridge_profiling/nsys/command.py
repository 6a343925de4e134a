"""nsys' options, and every command line of it: a rank's own, Ray's, NeMo-Run's prefix, and the export of a report.

The submit host checks the user's options, which are merged over our defaults by name. Options come and go between versions, so
a rank asks the program itself (`nsys --version`, `nsys … --help`). Never profiles.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from bridge_profiling.common.errors import CaptureError, ProfilingConfigError, did_you_mean, require
from bridge_profiling.common.processes import run_owned

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

#: Characters that a shell splits at, expands or runs; nsys reads variables as %q{NAME}.
_CHANGED_BY_A_SHELL = re.compile(r"[^\x21-\x7e]|['\"$`;&|<>()\\!]")

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

#: Settings of nsys that its manual leaves out, as `name=value;name=value`.
DIRECTIVES_VARIABLE = "NSYS_CONFIG_DIRECTIVES"

#: One of them, false by default: nsys detaches CUPTI when the collection ends. Left attached, it costs a launch-bound step 6 %
#: for the rest of the run.
_DETACH = "CuptiFinalizeOnStop"

#: APIs that need a CUDA device.
_CUDA_ONLY = frozenset({"cuda", "cuda-hw", "cuda-sw", "cublas", "cublas-verbose", "cudnn", "cusparse", "cusolver", "nccl"})


@dataclass(frozen=True, kw_only=True)
class NsysRequest:
    """What one rank asks of the nsys that it starts."""

    rank: int  # global rank
    local_rank: int  # rank on this machine; the number of its GPU
    cuda: bool  # whether the training uses a CUDA device. Without one the window is marked by an NVTX range.
    output_dir: Path  # root of the captures
    trace: Sequence[str] | None = None  # APIs to trace; None is DEFAULT_TRACE
    extra_args: Sequence[str] = ()  # the user's options, over the defaults
    gpu_metrics: bool = False  # sample the metrics of the rank's GPU
    export_sqlite: bool = False  # write an SQLite file next to each report
    captures: int = 1  # how many windows to capture


def check_trace(trace: object, *, name: str = "nsys_trace") -> None:
    """Check that an `nsys_trace` is a list of API names."""
    names = trace if isinstance(trace, list) else []
    require(
        names,
        f"{name}={trace!r} is not a list of APIs to trace",
        why="each entry is one name that `nsys profile --trace` knows",
        instead=f'Type {name}=["nvtx", "cuda"], or leave it out for the same',
    )
    for word in names:
        require(
            word in TRACE_WORDS,
            f"{name} holds {word!r}, which nsys cannot trace",
            why="nsys would refuse to start, and the ranks would train without it",
            instead=did_you_mean(str(word), TRACE_WORDS),
        )


def check_extra_args(extra_args: object, *, name: str = "nsys_extra_args") -> None:
    """Check that `nsys_extra_args` can be passed on, and that Slurm's shell and a plain process read them alike."""
    example = f'Type for example {name}=["--cuda-graph-trace=graph", "--gpu-metrics-device=0"]'
    if not isinstance(extra_args, list) or not all(isinstance(arg, str) and arg for arg in extra_args):
        raise ProfilingConfigError(f"{name}={extra_args!r} is not a list of options", instead=example)
    for arg in extra_args:
        require(
            not _CHANGED_BY_A_SHELL.search(arg),
            f"{name} holds {arg!r}, with a space, a quote or another character that a shell reads",
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


#: How to get the ranges of the package nvtx into a report of an nsys that its release is too new for.
NVTX_REMEDY = "Install nvtx==0.2.11 or a newer nsys, or mark the ranges with torch.cuda.nvtx"


def nvtx_is_too_new(nvtx: str, nsys: str) -> bool:
    """Whether the ranges of a release of the package nvtx are known not to reach a version of nsys.

    From 0.2.12 on, the package asks for a payload extension that nsys 2024.2 does not have (260, not 259), and emits nothing.
    """
    package, program = ([int(part) for part in re.findall(r"\d+", text)] for text in (nvtx, nsys))
    return package >= [0, 2, 12] and program[:2] <= [2024, 2]


# -- the nsys of this machine, and its command lines ------------------------------------------------------------------


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
        devices = self.sampled_devices()
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        device = visible[local_rank] if local_rank < len(visible) else str(local_rank)
        # A UUID does not give nsys' number; a job that sees one GPU by its UUID mostly sees no other in its container.
        device = device if device.isdigit() else str(local_rank)
        if device not in devices:
            raise CaptureError(f"nsys samples metrics of the GPUs {', '.join(devices)}, not of {device}")
        return device

    def sampled_devices(self) -> list[str]:
        """The numbers of the GPUs whose metrics this nsys samples here; raises CaptureError with its own reason without any."""
        answer = run_nsys(self.executable, "profile", f"{self.name_of(GPU_METRICS) or GPU_METRICS}=help", "true")
        devices = re.findall(r"^\s*(\d+):", answer, re.MULTILINE)
        if not devices:
            reason = " ".join(line.strip() for line in answer.splitlines()[1:] if line.strip()) or "it lists no GPU"
            raise CaptureError(f"nsys samples no GPU metrics here: {reason}")
        return devices


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
        done = run_owned([executable, *arguments], seconds=60, environment=without_injection(os.environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CaptureError(f"{executable} does not run: {error}") from error
    return done.stdout + done.stderr


def without_injection(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a program runs free of the nsys around this process."""
    return {name: value for name, value in environ.items() if name not in ("LD_PRELOAD", "CUDA_INJECTION64_PATH")}


def profile_command(request: NsysRequest, version: NsysVersion, *, report: Path) -> tuple[list[str], list[str]]:
    """The command with which a rank starts nsys, without the application, and a warning for each part that this nsys lacks."""
    warnings: list[str] = []
    trace = list(request.trace or DEFAULT_TRACE)
    if not request.cuda:
        left_out = [name for name in trace if name in _CUDA_ONLY]
        trace = [name for name in trace if name not in _CUDA_ONLY] or ["nvtx"]
        if left_out and request.trace:
            warnings.append(f"no CUDA device: left out --trace={','.join(left_out)}")
    defaults = list(DEFAULT_OPTIONS)
    if not value_of(request.extra_args, "--capture-range"):
        # nsys' own default ends the application with its capture range.
        end = f"repeat:{request.captures}" if request.captures > 1 else "stop"
        defaults += [*_capture_range(request.cuda), f"--capture-range-end={end}"]
    if request.gpu_metrics and not request.cuda:
        warnings.append("no CUDA device: no GPU metrics")
    elif request.gpu_metrics:
        try:
            defaults.insert(0, f"{GPU_METRICS}={version.gpu_metrics_device(request.local_rank)}")
        except CaptureError as error:
            warnings.append(str(error))
    extra_args, asked_options = list(request.extra_args), split_options(request.extra_args)
    if asked_metrics := [tokens for name, tokens in asked_options if name in RENAMED_OPTIONS[0]]:
        try:
            version.sampled_devices()
        except CaptureError as error:
            # nsys refuses to start the training with them.
            extra_args = [token for name, tokens in asked_options if name not in RENAMED_OPTIONS[0] for token in tokens]
            warnings.append(f"{error}: left out {' '.join(asked_metrics[-1])}")
    options, unknown = version.adapt(merge_options(defaults, extra_args))
    # A default that a version does not know is not worth a warning.
    asked = {name for name, _ in asked_options} | {GPU_METRICS}
    warnings += [text for name, text in unknown.items() if name in asked]
    # nsys replaces %p, %q{NAME} and others in it.
    output = str(report).replace("%", "%%")
    return [version.executable, "profile", f"--trace={','.join(trace)}", f"--output={output}", *options], warnings


def directives(version: NsysVersion, options: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """The value of NSYS_CONFIG_DIRECTIVES: the user's own, which win, and to detach CUPTI after the only capture."""
    own = environ.get(DIRECTIVES_VARIABLE, "")
    one_capture = value_of(options, "--capture-range-end") == "stop"
    # The versions in which it is known to work. Other versions don't get a directive that their manual leaves out.
    if not one_capture or not version.text.startswith("2024.2.") or _DETACH.lower() in own.lower():
        return own
    return ";".join(filter(None, [own.rstrip(";"), f"{_DETACH}=true"]))


def ray_options(
    asked: Iterable[tuple[str, str]], *, cuda: bool, report: str, reports: Path | None, version: NsysVersion | None
) -> tuple[dict[str, str], list[str]]:
    """The value of Ray's `runtime_env={"nsight": …}`: options of `nsys profile` without their dashes; and warnings.

    Later options of the user's win. A `reports` directory of None leaves it to Ray; a `version` of None leaves out options that
    not every version knows.
    """
    given = {split_options([f"-{name}" if len(name) == 1 else f"--{name}"])[0][0]: value for name, value in asked}
    output = given.pop("--output", None)
    # Without the one default that not every version knows.
    options = [option for option in DEFAULT_OPTIONS if not option.startswith("--cuda-event-trace")]
    options.append("--trace=cuda,nvtx" if cuda else "--trace=nvtx")
    if "--capture-range" not in given:
        options += _capture_range(cuda)
    if given.get("--capture-range") != "none":
        # nsys' own default ends the worker with its capture range.
        options.append("--capture-range-end=stop")
    options = merge_options(options, [f"{name}={value}" for name, value in given.items()])
    options, warnings = version.adapt(options) if version is not None else (options, {})
    # A name from the user gets the worker's as well, so that no two workers write the same report.
    name = f"{output}_{report}" if output else f"{report}_%p"
    # Ray prepends its session's directory to `o`, and knows the option by this name alone.
    place = {"o": str(reports / name) if reports and not output else name}
    return dict(option.lstrip("-").split("=", 1) for option in options) | place, list(warnings.values())


def launcher_options(extra_args: Sequence[str], *, export_sqlite: bool) -> list[str]:
    """The user's options for NeMo-Run's launcher, with the export that writes an SQLite file next to the report."""
    exports = [" ".join(tokens) for name, tokens in split_options(extra_args) if name == "--export"]
    if not export_sqlite or any("sqlite" in export for export in exports):
        return list(extra_args)
    if exports:
        raise ProfilingConfigError(
            f"export_sqlite=True, but nsys_extra_args holds {exports[-1]}",
            why="nsys takes one --export, and this one writes no SQLite file",
            instead="Leave out export_sqlite, or type --export=sqlite,… in nsys_extra_args",
        )
    return [*extra_args, "--export=sqlite"]


def prefix_command(nsys: Sequence[str], *, gpu_metrics: str) -> list[str]:
    """Arguments of bash that run NeMo-Run's nsys prefix through `prefix.sh`; the application follows them.

    `gpu_metrics` is "" for none, "all", or "local" for the GPU of this Slurm task.
    """
    # The script looks at options one by one, so each long one is one argument; it samples GPU metrics by its own means.
    options: list[str] = []
    for _, tokens in split_options([argument for argument in nsys if argument != "$GPU_METRICS_FLAG"]):
        options += ["=".join(tokens)] if tokens[0].startswith("--") and len(tokens) == 2 else tokens
    text = resources.files("bridge_profiling.nsys").joinpath("prefix.sh").read_text(encoding="utf-8")
    # Without comments: the text becomes part of a batch script.
    script = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    folder = os.path.dirname(value_of(options, "--output") or "")
    renamed = " ".join(",".join(names) for names in RENAMED_OPTIONS)
    metrics = f"{GPU_METRICS}={gpu_metrics}" if gpu_metrics else ""
    return ["-c", script, "nsys", str(len(options)), metrics, folder, renamed, *options]


def export_command(executable: str, report: Path, sqlite: Path) -> list[str]:
    """The command that exports a report to an SQLite file."""
    # Since 2025 nsys leaves out NCCL's description of each message unless asked for it.
    blobs = ["--include-blobs=true"] if "--include-blobs" in run_nsys(executable, "export", "--help") else []
    options = ["--type=sqlite", "--quiet=true", *blobs, "--force-overwrite=true", f"--output={sqlite}"]
    return [executable, "export", *options, str(report)]


def _capture_range(cuda: bool) -> list[str]:
    without_cuda = ["--capture-range=nvtx", f"--nvtx-capture={CAPTURE_RANGE}"]
    return ["--capture-range=cudaProfilerApi"] if cuda else without_cuda
