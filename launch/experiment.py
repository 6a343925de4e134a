"""Submit a training with a profiler, wait for it, and show what was captured.

    python launch/experiment.py --recipe gpt_tiny --profiler torch --steps 4:6 --ranks 0,1 train.train_iters=12

Runs on the submit host. Checks as much as possible before anything is submitted: a usage error ends with exit code 2, a
job that fails with 1.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

if __name__ == "__main__":
    # Started by its path, Python looks for modules in launch/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bridge_profiling import plugins
from bridge_profiling.cli.options import with_options
from bridge_profiling.cli.outcome import exit_code
from bridge_profiling.common.errors import TraceError, print_error, require
from bridge_profiling.frameworks.outcome import own_command, shortest_path
from bridge_profiling.manifest import find_captures
from bridge_profiling.report.terminal import print_captures
from bridge_profiling.settings.overrides import format_override
from bridge_profiling.settings.recording import check_flags, option, to_overrides
from bridge_profiling.settings.window import OPTIONS, check_request, parse_ranks, parse_steps

ExecutorName = StrEnum("ExecutorName", ["local", "local_torchrun", "slurm"])
ProfilerName = StrEnum("ProfilerName", ["torch", "memory", "nsys", "none"])
TaskKind = StrEnum("TaskKind", ["script", "partial"])

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command()
@with_options
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of the config, as section.field=value.")] = None,
    recipe: Annotated[str, typer.Option(help="What to train.")] = "gpt_tiny",
    executor: Annotated[ExecutorName, typer.Option(help="Where to run.")] = ExecutorName.local_torchrun,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes (Slurm).")] = 1,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    time: Annotated[str, typer.Option(help="Slurm time limit.")] = "00:30:00",
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs to ask Slurm for on each node.")] = None,
    container_image: Annotated[str | None, typer.Option(help="Slurm container image; without it the job runs bare.")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="SOURCE:DESTINATION in the container; may be repeated.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment on the nodes, for a job without a container.")] = None,
    host: Annotated[str | None, typer.Option(help="Machine to submit on, through SSH; without it, this one.")] = None,
    user: Annotated[str | None, typer.Option(help="Name to log in there.")] = None,
    job_dir: Annotated[str | None, typer.Option(help="Directory there for the job's files.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE in the job's environment; may be repeated.")] = None,
    profiler: Annotated[
        list[ProfilerName] | None,
        typer.Option(help="What to profile with, repeatable; memory adds the history. Default: torch."),
    ] = None,
    steps: Annotated[str, typer.Option(help="Window: first iteration, and first one after it.")] = "10:12",
    ranks: Annotated[str, typer.Option(help="Ranks to profile: 0,1 or all or pp (one per pipeline stage).")] = "0",
    output_dir: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Captures' directory. Default: profiles in the job's own.")
    ] = None,
    sqlite: Annotated[bool, typer.Option("--export-sqlite", help="Also export nsys' report as SQLite.")] = False,
    gpu_metrics: Annotated[bool, typer.Option("--gpu-metrics", help="Sample GPU metrics (with --profiler nsys).")] = False,
    nsys_arg: Annotated[list[str] | None, typer.Option(help="Option of `nsys profile`; may be repeated.")] = None,
    fault_tolerance: Annotated[bool, typer.Option("--fault-tolerance", help="Run under the fault-tolerance launcher.")] = False,
    task: Annotated[TaskKind, typer.Option(help="Submit a run.Script or a run.Partial.")] = TaskKind.script,
    name: Annotated[str, typer.Option(help="Name of the experiment.")] = "profile",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    **recording: Any,
) -> None:
    """Train RECIPE under a profiler and show what was captured."""
    if not sys.stdout.isatty():
        # Without a terminal, NeMo-Run would break paths and commands at 80 columns.
        os.environ.setdefault("COLUMNS", "200")
    config, settings = recording.pop("config_file"), recording.pop("settings")
    names = {each.value for each in profiler or [ProfilerName.torch]} - {"none"}
    if "memory" in names:
        recording["memory"] = True
        names |= set() if "nsys" in names else {"torch"}
    nsys = {"export_sqlite": sqlite, "nsys_gpu_metrics": gpu_metrics, "nsys_extra_args": nsys_arg}
    _check_options(names, recording, nsys)
    asked = parse_steps(steps)
    # The plugins have arguments for these two; the rest are settings of the task.
    window = {"profile_step_start": asked.start, "profile_step_end": asked.end, "profile_ranks": parse_ranks(ranks)}
    shapes = recording.pop("record_shapes")
    memory = "torch" in names and recording.pop("memory")
    overrides = [*(overrides or []), *to_overrides(recording, settings)]
    # Imported late, with NeMo-Run: --help and wrong options are answered at once.
    from launch.submission import make_executor, submit
    from launch.tasks import pretrain_partial, pretrain_script

    chosen: list[Any] = []
    if "torch" in names:
        chosen.append(plugins.PyTorchProfilerPlugin(**window, record_shapes=shapes, record_memory_history=memory))
    if "nsys" in names:
        chosen.append(plugins.NsysPlugin(**window, record_shapes=shapes, **nsys))
    if fault_tolerance:
        chosen.append(plugins.FaultTolerancePlugin())
    _check_config(recipe, config, overrides, names, window, nodes * nproc)
    slurm = {
        "account": account, "partition": partition, "time": time, "gpus_per_node": gpus_per_node, "venv": venv,
        "container_image": container_image, "mounts": mount or [], "host": host, "user": user, "job_dir": job_dir,
    }  # fmt: skip
    where = make_executor(executor, nproc, nodes, env or [], output_dir, slurm)
    is_local = executor != ExecutorName.slurm
    if is_local and not dry_run:
        _check_installed({"nsys": "nsys" in names and not fault_tolerance, "ft_launcher": fault_tolerance})
    if task == TaskKind.script:
        submitted = pretrain_script(recipe, overrides, config=config, packaged=not is_local)
    else:
        submitted = pretrain_partial(recipe, overrides, config=config)
    finished = submit(name, submitted, where, chosen, dry_run=dry_run)
    if dry_run:
        return
    if names and finished.captures is not None:
        _show_captures(finished.captures)
    if not finished.succeeded:
        print_error("the job failed; its log is above")
        raise typer.Exit(1)


def _show_captures(folder: Path) -> None:
    try:
        captures = find_captures(folder)
        print_captures(captures, Console())
        if any(capture.artifacts for capture in captures):
            print(f"type: {own_command('report', shortest_path(folder))}")
    except TraceError as error:
        print_error(error)


def _check_options(profilers: set[str], recording: Mapping[str, object], nsys: Mapping[str, object]) -> None:
    """Refuse options that do not apply to the chosen profilers."""
    given = [option(name) for name, value in recording.items() if value]
    require(
        not given or profilers,
        f"{' and '.join(given)} does not go with --profiler none",
        why="without a profiler nothing is recorded",
        instead="Type --profiler torch or --profiler nsys",
    )
    check_flags(recording, sorted(profilers))
    require(
        not any(nsys.values()) or "nsys" in profilers,
        "--export-sqlite, --gpu-metrics and --nsys-arg are options of nsys",
        instead="Type --profiler nsys as well, or leave them out",
    )


def _check_installed(programs: Mapping[str, bool]) -> None:
    """Refuse a job on this machine that would start a program that is not installed here."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    for program, is_started in programs.items():
        require(
            not is_started or shutil.which(program, path=path),
            f"{program} is not on this machine's PATH",
            why="the job would run here, and start it",
            instead="Install Nsight Systems for nsys, and nvidia-resiliency-ext for ft_launcher, or leave the option out",
        )


def _check_config(
    recipe: str, path: Path | None, overrides: Sequence[str], profilers: set[str], window: dict[str, Any], world_size: int
) -> None:
    """Build and check the whole config as the ranks will, if megatron-core is installed here."""
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed here: the config is checked in the job, not before it", file=sys.stderr)
        return
    from launch.pretrain import build_config
    from recipes.finalize import finalize

    settings = {f"profiling.{name}": value for name, value in window.items()} if profilers else {}
    switches = {"torch": "profiling.use_pytorch_profiler", "nsys": "profiling.use_nsys_profiler"}
    settings |= {switch: True for name, switch in switches.items() if name in profilers}
    config = build_config(recipe, [str(path)] if path else [], [*overrides, *map(format_override, settings, settings.values())])
    if profilers:
        # First, by the names of the options.
        asked = (window["profile_step_start"], window["profile_step_end"], window["profile_ranks"])
        check_request(*asked, spelled=OPTIONS, train_iters=config.train.train_iters, world_size=world_size)
    finalize(config, world_size)


if __name__ == "__main__":
    sys.exit(exit_code(app))
