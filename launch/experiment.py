"""Submit a training with a profiler, wait for it, and show what was captured.

    python launch/experiment.py --recipe gpt_tiny --profiler torch --steps 4:6 --ranks 0,1 train.train_iters=12

Runs on the submit host. Checks as much as possible before anything is submitted: a usage error ends with exit code 2, a
job that fails with 1.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

if __name__ == "__main__":
    # Started by its path, Python looks for modules in launch/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bridge_profiling import plugins
from bridge_profiling.cli.common import closed, exit_code, with_options
from bridge_profiling.common.errors import TraceError, print_error
from bridge_profiling.frameworks.outcome import own_command, shortest_path
from bridge_profiling.manifest import find_captures
from bridge_profiling.report.terminal import print_captures
from bridge_profiling.settings.recording import to_overrides
from bridge_profiling.settings.window import OPTIONS, check_request, parse_ranks, parse_steps
from launch import request
from launch.request import ExecutorName, ProfilerName, TaskKind

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command()
@with_options
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of the config, as section.field=value.")] = None,
    recipe: Annotated[str, typer.Option(help="What to train.")] = "gpt_tiny",
    executor: Annotated[ExecutorName, typer.Option(**closed(ExecutorName), help="Where to run.")] = ExecutorName.local_torchrun,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 2,
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
    profiler: Annotated[ProfilerName, typer.Option(**closed(ProfilerName), help="What to profile with.")] = ProfilerName.torch,
    steps: Annotated[str, typer.Option(help="Window: first iteration, and first one after it.")] = "10:12",
    ranks: Annotated[str, typer.Option(help="Ranks to profile: 0,1 or all or pp (one per pipeline stage).")] = "0",
    sqlite: Annotated[bool, typer.Option("--export-sqlite", help="Also export nsys' report as SQLite.")] = False,
    gpu_metrics: Annotated[bool, typer.Option("--gpu-metrics", help="Sample GPU metrics (with --profiler nsys).")] = False,
    nsys_arg: Annotated[list[str] | None, typer.Option(help="Option of `nsys profile`; may be repeated.")] = None,
    fault_tolerance: Annotated[bool, typer.Option("--fault-tolerance", help="Run under the fault-tolerance launcher.")] = False,
    task: Annotated[TaskKind, typer.Option(**closed(TaskKind), help="Submit a run.Script or a run.Partial.")] = TaskKind.script,
    name: Annotated[str, typer.Option(help="Name of the experiment.")] = "profile",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    **recording: Any,
) -> None:
    """Train RECIPE under a profiler and show what was captured."""
    if not sys.stdout.isatty():
        # Without a terminal, NeMo-Run would break paths and commands at 80 columns.
        os.environ.setdefault("COLUMNS", "200")
    config, settings = recording.pop("config_file"), recording.pop("settings")
    is_torch = profiler is ProfilerName.torch
    request.check_options(profiler, recording=recording, nsys_only=sqlite or gpu_metrics or bool(nsys_arg))
    asked = parse_steps(steps)
    # The plugins have arguments for these two; the rest are settings of the task.
    record_shapes = recording.pop("record_shapes")
    memory = is_torch and recording.pop("memory")
    overrides = [*(overrides or []), *to_overrides(recording, settings)]
    window = {
        "profile_step_start": asked.start,
        "profile_step_end": asked.end,
        "profile_ranks": parse_ranks(ranks),
        "record_shapes": record_shapes,
    }
    # Imported late, with NeMo-Run: --help and wrong options are answered at once.
    from launch.submission import make_executor, make_task, submit

    chosen: list[Any] = []
    if is_torch:
        chosen.append(plugins.PyTorchProfilerPlugin(**window, record_memory_history=memory))
    if profiler is ProfilerName.nsys:
        options = {"nsys_extra_args": nsys_arg, "export_sqlite": sqlite, "nsys_gpu_metrics": gpu_metrics}
        chosen.append(plugins.NsysPlugin(**window, **options))
    if fault_tolerance:
        chosen.append(plugins.FaultTolerancePlugin())
    _check_config(recipe, config, overrides, profiler, window, nodes * nproc_per_node)
    slurm = {
        "account": account, "partition": partition, "time": time, "gpus_per_node": gpus_per_node, "venv": venv,
        "container_image": container_image, "mounts": mount or [], "host": host, "user": user, "job_dir": job_dir,
    }  # fmt: skip
    where = make_executor(executor, nproc_per_node, nodes, request.parse_env(env), slurm)
    packaged = executor is ExecutorName.slurm
    if not packaged and not dry_run:
        nsys = profiler is ProfilerName.nsys and not fault_tolerance
        request.check_installed(nsys=nsys, ft_launcher=fault_tolerance)
    submitted = make_task(task, recipe, config, overrides, packaged=packaged)
    finished = submit(name, submitted, where, chosen, dry_run=dry_run)
    if dry_run:
        return
    if profiler is not ProfilerName.none and finished.captures is not None:
        try:
            captures = find_captures(finished.captures)
            print_captures(captures, Console())
            if any(capture.artifacts for capture in captures):
                print(f"type: {own_command('report', shortest_path(finished.captures))}")
        except TraceError as error:
            print_error(error)
    if not finished.succeeded:
        print_error("the job failed; its log is above")
        raise typer.Exit(1)


def _check_config(
    recipe: str, path: Path | None, overrides: Sequence[str], profiler: ProfilerName, window: dict[str, Any], world_size: int
) -> None:
    """Build and check the whole config as the ranks will, if megatron-core is installed here."""
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed here: the config is checked in the job, not before it", file=sys.stderr)
        return
    from launch.pretrain import build_config
    from recipes.finalize import finalize

    config = build_config(recipe, [str(path)] if path else [], overrides)
    if profiler is not ProfilerName.none:
        profiling = config.profiling
        for name, value in window.items():
            setattr(profiling, name, value)
        profiling.use_pytorch_profiler |= profiler is ProfilerName.torch
        profiling.use_nsys_profiler |= profiler is ProfilerName.nsys
        # First, by the names of the options.
        asked = (window["profile_step_start"], window["profile_step_end"], window["profile_ranks"])
        check_request(*asked, spelled=OPTIONS, train_iters=config.train.train_iters, world_size=world_size)
    finalize(config, world_size)


if __name__ == "__main__":
    sys.exit(exit_code(app))
