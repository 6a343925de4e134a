"""`bridge-profiling run`: starts an unchanged PyTorch script and has its ranks profiled."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bridge_profiling.cli.options import ProfilerName
from bridge_profiling.cli.output import note, print_error
from bridge_profiling.cli.signals import wait_for
from bridge_profiling.common.errors import ProfilingConfigError, TraceError, install_command, require
from bridge_profiling.common.launch_env import LAUNCH_VARIABLE, LaunchEnv
from bridge_profiling.frameworks.outcome import captures_since, lines, places_to_report
from bridge_profiling.frameworks.run_request import Request
from bridge_profiling.manifest import RankCapture
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.settings.profiling import ProfilingConfig, resolve_output_dir

_START = ["-m", "bridge_profiling.frameworks.start"]

#: Signals that would end this process, and that a script may handle: batch systems send some before the time limit.
#: A terminal sends Ctrl-C to both processes.
_FORWARDED: dict[int, int | None] = {
    signal.SIGINT: None,
    **{number: number for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)},
}


def run(
    script: Annotated[list[str], Argument(metavar="SCRIPT", help="The script, and its own arguments.")],
    module: Annotated[bool, Option("-m", help="SCRIPT is a module's name, as with python -m.")] = False,
    nproc: Annotated[int | None, Option(min=1, help="Ranks on this machine. Default: 1, without torchrun.")] = None,
    report: Annotated[
        bool, Option("--report", help="Afterwards, print the verdict and write a page next to the captures.")
    ] = False,
    best_effort: Annotated[
        bool, Option("--best-effort", help="Run the script even if something cannot be recorded on this machine.")
    ] = False,
    **request: Any,
) -> None:
    """Run a PyTorch script unchanged, and profile some of its iterations: each ends with a step of its optimizer.

    Refuses a request that this machine cannot carry out before the script starts.

    Arguments after SCRIPT are the script's own. Under torchrun, or srun with several tasks, this process is one rank.
    Exit code: the script's. 2: invalid request.
    """
    for name in ("output_dir", "config_file"):
        request[name] = request[name] and str(Path(request[name]).absolute())
    profilers = dict.fromkeys(request["profiler"] or [])
    if len(profilers) > 1:
        request["memory"] |= ProfilerName.memory in profilers
        profilers.pop(ProfilerName.memory, None)
    require(
        len(profilers) <= 1,
        "--profiler torch and --profiler nsys exclude each other",
        why="both need CUPTI, which serves one",
        instead="Type one of them",
    )
    request["profiler"] = next(iter(profilers), None)
    asked = Request.typed(script[0], script[1:], request, module=module)
    launcher = LaunchEnv.read().launcher
    is_rank = launcher in ("torchrun", "ray") or (launcher != "none" and nproc is None)
    if is_rank:
        _check_rank(nproc, report)
    config = asked.config(None if is_rank else nproc or 1)
    root = resolve_output_dir(config)
    _check_programs(asked, report)
    for what, why, instead in _unrecordable(config, root):
        require(best_effort, what, why=why, instead=f"{instead}; with --best-effort the script runs anyway")
        note(f"warning: {what}; {why}. The script runs without it.", err=True)
    if is_rank:
        os.execv(sys.executable, [sys.executable, *_START, *asked.to_arguments()])
    launcher_of_ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] if (nproc or 1) > 1 else []
    command = [sys.executable, *launcher_of_ranks, *_START, *asked.to_arguments()]
    environment = os.environ | {LAUNCH_VARIABLE: uuid.uuid4().hex}
    started_ns = time.time_ns()
    code, _ = wait_for(lambda: subprocess.Popen(command, env=environment), _FORWARDED)
    captured = _print_outcome(root, started_ns)
    if report:
        for folder, place in places_to_report(root, captured).items():
            _report(place, root / f"report-{folder}.html")
    raise typer.Exit(code if code >= 0 else 128 - code)


def _check_rank(nproc: int | None, report: bool) -> None:
    require(
        nproc is None,
        "--nproc starts ranks, and this process is a rank already",
        why="RANK is set, as torchrun does it",
        instead="Leave it out, or type bridge-profiling run without torchrun around it, or unset RANK before",
    )
    require(
        not report,
        "--report needs all ranks, and this process is one of them",
        why="another launcher started it",
        instead="Type bridge-profiling report afterwards",
    )


def _check_programs(request: Request, report: bool) -> None:
    """Check that required files and packages exist."""
    request.check_script()
    require(
        importlib.util.find_spec("torch"),
        f"{sys.executable} has no torch",
        instead="Type the bridge-profiling of the script's environment",
    )
    missing = [name for name in ("duckdb", "jinja2", "msgspec", "plotly", "pyarrow") if importlib.util.find_spec(name) is None]
    require(
        not report or not missing,
        f"--report needs {', '.join(missing)}",
        instead=f"Type {install_command('analysis')}, or leave --report out",
    )


def _unrecordable(config: ProfilingConfig, root: Path) -> Iterator[tuple[str, str, str]]:
    """Parts of a capture that this machine cannot record: what, why, and what to do instead."""
    if config.use_nsys_profiler and not runs_under_nsys() and shutil.which("nsys") is None:
        instead = "Install Nsight Systems, or type --profiler torch"
        yield "nsys is not on this machine's PATH", "every rank starts under `nsys profile`", instead
    of_cuda = {
        "a memory history (--memory, --profiler memory)": config.record_memory_history,
        "a capture of the device alone (--light)": config.pytorch_profiler_device_only,
    }
    wanted = [option for option, is_wanted in of_cuda.items() if is_wanted]
    if wanted and not _has_cuda():
        yield f"{' and '.join(wanted)} cannot be recorded here", "torch sees no CUDA device", "Leave it out"
    existing = next(place for place in (root, *root.parents) if place.exists())
    try:
        # Rather than asking for permissions, which know nothing of quotas, of read-only file systems, or of /proc.
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        instead = "Type --output-dir and another directory"
        yield f"the output directory {root} cannot be written", f"{existing}: {error.strerror}", instead


def _has_cuda() -> bool:
    # In a process of its own: torch takes seconds to load, and this command needs nothing else of it.
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def _print_outcome(root: Path, started_ns: int) -> list[RankCapture]:
    """Print what was captured; returns the captures."""
    try:
        captures = captures_since(root, started_ns)
    except TraceError as error:
        print_error(str(error))
        return []
    for line in lines(root, captures):
        note(f"bridge-profiling: {line}", err=True)
    return captures


def _report(captures: Path, page: Path) -> None:
    from bridge_profiling.cli.show import report

    try:
        report(captures, page)
    except typer.Exit:
        pass  # It has printed the error, and the exit code is the script's.
    except (ProfilingConfigError, TraceError, OSError) as error:
        print_error(f"no report: {error}")
