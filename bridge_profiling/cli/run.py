"""`bridge-profiling run`: starts an unchanged PyTorch script and has its ranks profiled."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bridge_profiling.cli.common import note, print_error, wait_for
from bridge_profiling.config import resolve_output_dir
from bridge_profiling.easy.outcome import captures_since, lines
from bridge_profiling.easy.request import DEFAULT_STEPS, Request
from bridge_profiling.errors import ProfilingConfigError, TraceError, install_command, require
from bridge_profiling.launch_env import LAUNCH_VARIABLE, LaunchEnv

_START = ["-m", "bridge_profiling.easy.start"]

#: torchrun's default.
_PORT = 29500

#: Signals that would end this process, and that a script may handle: batch systems send some before the time limit.
#: A terminal sends Ctrl-C to both processes.
_FORWARDED: dict[int, int | None] = {
    signal.SIGINT: None,
    **{number: number for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)},
}


ProfilerName = StrEnum("ProfilerName", ["torch", "memory", "nsys"])


def run(
    script: Annotated[list[str], Argument(metavar="SCRIPT", help="The script, and its own arguments.")],
    module: Annotated[bool, Option("-m", help="SCRIPT is a module's name, as with python -m.")] = False,
    nproc: Annotated[int | None, Option(min=1, help="Ranks on this machine. Default: 1, without torchrun.")] = None,
    nodes: Annotated[int, Option(min=1, help="Number of machines. Type the command on each of them.")] = 1,
    node_rank: Annotated[int | None, Option(min=0, help="Number of this machine. Default: from Slurm.")] = None,
    rdzv_endpoint: Annotated[
        str | None, Option(metavar="HOST[:PORT]", help="Machine 0, where the ranks meet. Default: from Slurm.")
    ] = None,
    profiler: Annotated[ProfilerName, Option(help="The profiler.")] = ProfilerName.torch,
    steps: Annotated[str, Option(metavar="A:B", help="First iteration, and first one after the last.")] = DEFAULT_STEPS,
    ranks: Annotated[str, Option(metavar="all|0,1,…", help="Global ranks to profile.")] = "all",
    output_dir: Annotated[
        Path | None, Option(metavar="DIRECTORY", help="Default: $BRIDGE_PROFILING_DIR, else profiles.")
    ] = None,
    report: Annotated[bool, Option("--report", help="Afterwards, print the verdict and write report.html.")] = False,
) -> None:
    """Run a PyTorch script unchanged, and profile some of its iterations: each ends with a step of its optimizer.

    Arguments after SCRIPT are the script's own. Under torchrun, or srun with several tasks, this process is one rank.
    Exit code: the script's. 2: invalid request.
    """
    request = Request(
        script=script[0],
        arguments=tuple(script[1:]),
        module=module,
        profiler=profiler.value,
        steps=steps,
        ranks=ranks,
        output_dir=None if output_dir is None else str(output_dir.absolute()),
    )
    launcher = LaunchEnv.read().launcher
    is_rank = launcher in ("torchrun", "ray") or (launcher != "none" and nproc is None and nodes == 1)
    if is_rank:
        _check_rank(nproc, nodes, report)
    root = resolve_output_dir(request.config(None if is_rank else (nproc or 1) * nodes))
    _check_programs(request, report)
    if is_rank:
        os.execv(sys.executable, [sys.executable, *_START, *request.to_arguments()])
    command = [sys.executable, *_launcher(nproc or 1, nodes, node_rank, rdzv_endpoint), *_START, *request.to_arguments()]
    # The ranks of one machine get the launch's name here; those of several agree on one when they meet.
    environment = os.environ | ({LAUNCH_VARIABLE: uuid.uuid4().hex} if nodes == 1 else {})
    started_ns = time.time_ns()
    code, _ = wait_for(subprocess.Popen(command, env=environment), _FORWARDED)
    if _print_outcome(root, started_ns) and report:
        _report(root)
    raise typer.Exit(code)


def _check_rank(nproc: int | None, nodes: int, report: bool) -> None:
    require(
        nproc is None and nodes == 1,
        "--nproc and --nodes start ranks, and this process is a rank already",
        why="RANK is set, as torchrun does it",
        instead="Leave them out, or type bridge-profiling run without torchrun around it, or unset RANK before",
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


def _launcher(nproc: int, nodes: int, node_rank: int | None, endpoint: str | None) -> list[str]:
    """The part of the command that starts the ranks of this machine: torchrun, or nothing for one rank."""
    if nodes == 1:
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] if nproc > 1 else []
    env = LaunchEnv.read()
    node_rank = env.node_rank if node_rank is None else node_rank
    host, port = (env.rendezvous or (None, 0)) if endpoint is None else _parse_endpoint(endpoint)
    if node_rank is None or not host:
        raise ProfilingConfigError(
            f"--nodes {nodes} needs {'--node-rank' if node_rank is None else '--rdzv-endpoint'}",
            why="every machine needs its own number and the place where the ranks meet",
            instead="Type on machine 0 --node-rank 0 --rdzv-endpoint HOST:PORT, HOST being itself, and likewise on the others",
        )
    require(node_rank < nodes, f"--node-rank {node_rank} is outside {nodes} machines", instead=f"Type 0 to {nodes - 1}")
    # The static rendezvous: ranks are numbered by --node-rank.
    meeting = ["--rdzv-backend=static", f"--rdzv-endpoint={host}:{port}", f"--node-rank={node_rank}"]
    return ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={nproc}", *meeting]


def _parse_endpoint(typed: str) -> tuple[str, int]:
    """Host and port of `gpu07`, `gpu07:29500` or `[fe80::1]:29500`."""
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::(\d{1,5}))?", typed)
    if found is None:
        raise ProfilingConfigError(
            f"--rdzv-endpoint {typed} is not HOST or HOST:PORT", instead=f"Type machine 0's name and a port, as gpu07:{_PORT}"
        )
    return found[1], int(found[2] or _PORT)


def _print_outcome(root: Path, started_ns: int) -> bool:
    """Print what was captured; returns whether there is anything to read."""
    try:
        captures = captures_since(root, started_ns)
    except TraceError as error:
        print_error(str(error))
        return False
    for line in lines(root, captures):
        note(f"bridge-profiling: {line}", err=True)
    return any(capture.artifacts for capture in captures)


def _report(root: Path) -> None:
    from bridge_profiling.cli.report import report

    try:
        report(root)
    except typer.Exit:
        pass  # It has printed the error, and the exit code is the script's.
    except (ProfilingConfigError, TraceError, OSError) as error:
        print_error(f"no report: {error}")
