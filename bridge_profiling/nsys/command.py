"""Every command line of nsys: a rank's own, Ray's, NeMo-Run's prefix in its shell script, and the export of a report.

Composes them from `options` and what an nsys knows; runs no profiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from bridge_profiling.errors import CaptureError, ProfilingConfigError
from bridge_profiling.nsys import options as nsys_options
from bridge_profiling.nsys.version import NsysVersion, run_nsys

#: Settings of nsys that its manual leaves out, as `name=value;name=value`.
DIRECTIVES_VARIABLE = "NSYS_CONFIG_DIRECTIVES"

#: One of them, false by default: nsys detaches CUPTI when the collection ends. Left attached, it costs a launch-bound step 6 %
#: for the rest of the run (docs/benchmarks.md).
_DETACH = "CuptiFinalizeOnStop"

#: APIs that need a CUDA device.
_CUDA_ONLY = frozenset({"cuda", "cuda-hw", "cuda-sw", "cublas", "cublas-verbose", "cudnn", "cusparse", "cusolver", "nccl"})


def profile_command(request: nsys_options.NsysRequest, version: NsysVersion, *, report: Path) -> tuple[list[str], list[str]]:
    """The command with which a rank starts nsys, without the application, and a warning for each part that this nsys lacks."""
    warnings: list[str] = []
    trace = list(request.trace or nsys_options.DEFAULT_TRACE)
    if not request.cuda:
        left_out = [name for name in trace if name in _CUDA_ONLY]
        trace = [name for name in trace if name not in _CUDA_ONLY] or ["nvtx"]
        if left_out and request.trace:
            warnings.append(f"no CUDA device: left out --trace={','.join(left_out)}")
    defaults = list(nsys_options.DEFAULT_OPTIONS)
    if not nsys_options.value_of(request.extra_args, "--capture-range"):
        # nsys' own default ends the application with its capture range.
        end = f"repeat:{request.captures}" if request.captures > 1 else "stop"
        defaults += [*_capture_range(request.cuda), f"--capture-range-end={end}"]
    if request.gpu_metrics and not request.cuda:
        warnings.append("no CUDA device: no GPU metrics")
    elif request.gpu_metrics:
        try:
            defaults.insert(0, f"{nsys_options.GPU_METRICS}={version.gpu_metrics_device(request.local_rank)}")
        except CaptureError as error:
            warnings.append(str(error))
    options, unknown = version.adapt(nsys_options.merge_options(defaults, request.extra_args))
    # A default that a version does not know is not worth a warning.
    asked = {name for name, _ in nsys_options.split_options(request.extra_args)} | {nsys_options.GPU_METRICS}
    warnings += [text for name, text in unknown.items() if name in asked]
    return [version.executable, "profile", f"--trace={','.join(trace)}", f"--output={report}", *options], warnings


def directives(version: NsysVersion, options: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """The value of NSYS_CONFIG_DIRECTIVES: the user's own, which win, and to detach CUPTI after the only capture."""
    own = environ.get(DIRECTIVES_VARIABLE, "")
    one_capture = nsys_options.value_of(options, "--capture-range-end") == "stop"
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
    given = {nsys_options.split_options([f"-{name}" if len(name) == 1 else f"--{name}"])[0][0]: value for name, value in asked}
    output = given.pop("--output", None)
    # Without the one default that not every version knows.
    options = [option for option in nsys_options.DEFAULT_OPTIONS if not option.startswith("--cuda-event-trace")]
    options.append("--trace=cuda,nvtx" if cuda else "--trace=nvtx")
    if "--capture-range" not in given:
        options += _capture_range(cuda)
    if given.get("--capture-range") != "none":
        # nsys' own default ends the worker with its capture range.
        options.append("--capture-range-end=stop")
    options = nsys_options.merge_options(options, [f"{name}={value}" for name, value in given.items()])
    options, warnings = version.adapt(options) if version is not None else (options, {})
    # A name from the user gets the worker's as well, so that no two workers write the same report.
    name = f"{output}_{report}" if output else f"{report}_%p"
    # Ray prepends its session's directory to `o`, and knows the option by this name alone.
    place = {"o": str(reports / name) if reports and not output else name}
    return dict(option.lstrip("-").split("=", 1) for option in options) | place, list(warnings.values())


def launcher_options(extra_args: Sequence[str], *, export_sqlite: bool) -> list[str]:
    """The user's options for NeMo-Run's launcher, with the export that writes an SQLite file next to the report."""
    exports = [" ".join(tokens) for name, tokens in nsys_options.split_options(extra_args) if name == "--export"]
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
    for _, tokens in nsys_options.split_options([argument for argument in nsys if argument != "$GPU_METRICS_FLAG"]):
        options += ["=".join(tokens)] if tokens[0].startswith("--") and len(tokens) == 2 else tokens
    text = resources.files("bridge_profiling.nsys").joinpath("prefix.sh").read_text(encoding="utf-8")
    # Without comments: the text becomes part of a batch script.
    script = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    folder = os.path.dirname(nsys_options.value_of(options, "--output") or "")
    renamed = " ".join(",".join(names) for names in nsys_options.RENAMED_OPTIONS)
    metrics = f"{nsys_options.GPU_METRICS}={gpu_metrics}" if gpu_metrics else ""
    return ["-c", script, "nsys", str(len(options)), metrics, folder, renamed, *options]


def export_command(executable: str, report: Path, sqlite: Path) -> list[str]:
    """The command that exports a report to an SQLite file."""
    # Since 2025 nsys leaves out NCCL's description of each message unless asked for it.
    blobs = ["--include-blobs=true"] if "--include-blobs" in run_nsys(executable, "export", "--help") else []
    options = ["--type=sqlite", "--quiet=true", *blobs, "--force-overwrite=true", f"--output={sqlite}"]
    return [executable, "export", *options, str(report)]


def _capture_range(cuda: bool) -> list[str]:
    without_cuda = ["--capture-range=nvtx", f"--nvtx-capture={nsys_options.CAPTURE_RANGE}"]
    return ["--capture-range=cudaProfilerApi"] if cuda else without_cuda
