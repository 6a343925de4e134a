"""Submit a training with a profiler, wait for it, and show what was captured.

    python launch/experiment.py --recipe gpt_tiny --profiler torch --steps 4:6 --ranks 0,1 train.train_iters=12

Runs where jobs are submitted from. Everything that can be known beforehand is checked before anything is submitted: a
usage error ends with exit code 2, a job that fails with 1.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # Run as a script, this file finds `recipes` and `launch` only in an installed checkout.
    sys.path.insert(0, str(ROOT))

import typer  # noqa: E402
from rich.console import Console  # noqa: E402

from bridge_profiling.errors import ProfilingConfigError, TraceError  # noqa: E402
from bridge_profiling.report.terminal import print_captures  # noqa: E402
from bridge_profiling.traces.run_dir import find_captures  # noqa: E402

if TYPE_CHECKING:
    import nemo_run as run

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


class ExecutorName(StrEnum):
    """Where the job runs."""

    local = "local"
    local_torchrun = "local_torchrun"
    slurm = "slurm"


class ProfilerName(StrEnum):
    """What records it."""

    none = "none"
    torch = "torch"
    nsys = "nsys"


class TaskKind(StrEnum):
    """How NeMo-Run is told what to run."""

    script = "script"
    partial = "partial"


def parse_steps(text: str) -> tuple[int, int]:
    """`10:12` as (10, 12).

    Raises:
        ProfilingConfigError: it is not two whole numbers.
    """
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError(text)
        return int(first), int(last)
    except ValueError:
        raise ProfilingConfigError(
            f"--steps {text} is not a window",
            why="a window is its first iteration and the first one after it",
            instead="Type --steps 10:12 to capture iterations 10 and 11",
        ) from None


def parse_ranks(text: str) -> list[int] | str:
    """`0,1` as [0, 1]; `all` and `pp` as they are.

    Raises:
        ProfilingConfigError: something else.
    """
    if text in ("all", "pp"):
        return text
    try:
        return [int(rank) for rank in text.strip("[]").split(",")]
    except ValueError:
        raise ProfilingConfigError(
            f"--ranks {text} is not a list of ranks",
            why="ranks are whole numbers with commas between them, or one of the words all and pp",
            instead="Type --ranks 0,1 or --ranks all",
        ) from None


@app.command(context_settings={"ignore_unknown_options": False})
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of the config, as section.field=value.")] = None,
    recipe: Annotated[str, typer.Option(help="What to train.")] = "gpt_tiny",
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, applied before the overrides.")] = None,
    executor: Annotated[ExecutorName, typer.Option(help="Where to run.")] = ExecutorName.local_torchrun,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes (Slurm).")] = 1,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    time: Annotated[str, typer.Option(help="Slurm time limit.")] = "00:30:00",
    container_image: Annotated[str | None, typer.Option(help="Slurm container image; without it the job runs bare.")] = None,
    profiler: Annotated[ProfilerName, typer.Option(help="What to profile with.")] = ProfilerName.torch,
    steps: Annotated[str, typer.Option(help="Window: first iteration, and first one after it.")] = "10:12",
    ranks: Annotated[str, typer.Option(help="Ranks to profile: 0,1 or all or pp (one per pipeline stage).")] = "0",
    record_shapes: Annotated[bool, typer.Option("--record-shapes", help="Record tensor shapes.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Record CUDA's memory history (with --profiler torch).")] = False,
    sqlite: Annotated[bool, typer.Option("--export-sqlite", help="An SQLite file beside nsys' report.")] = False,
    gpu_metrics: Annotated[bool, typer.Option("--gpu-metrics", help="Sample GPU metrics (with --profiler nsys).")] = False,
    nsys_arg: Annotated[list[str] | None, typer.Option(help="Option of `nsys profile`; may be repeated.")] = None,
    fault_tolerance: Annotated[bool, typer.Option("--fault-tolerance", help="Run under the fault-tolerance launcher.")] = False,
    preempt_time: Annotated[int | None, typer.Option(help="Seconds before Slurm's time limit to stop in good order.")] = None,
    task: Annotated[TaskKind, typer.Option(help="Submit a run.Script or a run.Partial.")] = TaskKind.script,
    name: Annotated[str, typer.Option(help="Name of the experiment.")] = "profile",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
) -> None:
    """Train RECIPE under a profiler and show what was captured."""
    if not sys.stdout.isatty():
        # Where nobody sees a terminal, NeMo-Run would break paths and commands at 80 columns.
        os.environ.setdefault("COLUMNS", "200")
    console = Console()
    try:
        chosen = {"account": account, "partition": partition, "time": time, "container_image": container_image}
        _check_options(profiler, memory=memory, nsys_only=sqlite or gpu_metrics or bool(nsys_arg))
        window = _window(steps, ranks, record_shapes)
        plugins = _profiler_plugins(profiler, window, memory, nsys_arg, export_sqlite=sqlite, gpu_metrics=gpu_metrics)
        plugins += _job_plugins(fault_tolerance=fault_tolerance, preempt_time=preempt_time)
        _check_config(recipe, config, overrides or [], profiler, steps, ranks, nodes * nproc_per_node)
        executor_config = _executor(executor, nproc_per_node, nodes, chosen)
        if executor is not ExecutorName.slurm and not dry_run:
            _check_programs(nsys=profiler is ProfilerName.nsys and not fault_tolerance, ft_launcher=fault_tolerance)
        packaged = executor is ExecutorName.slurm
        submitted = _task(task, recipe, config, overrides or [], packaged=packaged)
        # NeMo-Run packages the git repository of the working directory.
        with contextlib.chdir(ROOT) if packaged else contextlib.nullcontext():
            succeeded, output_dir = _submit(name, submitted, executor_config, plugins, dry_run=dry_run)
    except ProfilingConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if dry_run:
        return
    if profiler is not ProfilerName.none and output_dir is not None:
        _show(output_dir, console)
    if not succeeded:
        print("error: the job failed; its log is above", file=sys.stderr)
        raise typer.Exit(1)


def _check_config(
    recipe: str, path: Path | None, overrides: Sequence[str], profiler: ProfilerName, steps: str, ranks: str, world_size: int
) -> None:
    """Build and check the whole config here, as the ranks will, where megatron-core is installed."""
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed here: the config is checked in the job, not before it", file=sys.stderr)
        return
    from launch.pretrain import build_config

    config = build_config(recipe, [str(path)] if path else [], overrides)
    if profiler is not ProfilerName.none:
        profiling = config.profiling
        profiling.profile_step_start, profiling.profile_step_end = parse_steps(steps)
        profiling.profile_ranks = parse_ranks(ranks)
        profiling.use_pytorch_profiler |= profiler is ProfilerName.torch
        profiling.use_nsys_profiler |= profiler is ProfilerName.nsys
    config.finalize(world_size=world_size)


def _check_options(profiler: ProfilerName, *, memory: bool, nsys_only: bool) -> None:
    if memory and profiler is not ProfilerName.torch:
        raise ProfilingConfigError(
            f"--memory does not go with --profiler {profiler.value}",
            why="PyTorchProfilerPlugin records the memory history",
            instead="Type --profiler torch --memory, or profiling.record_memory_history=true among the overrides",
        )
    if nsys_only and profiler is not ProfilerName.nsys:
        raise ProfilingConfigError(
            f"--export-sqlite, --gpu-metrics and --nsys-arg do not go with --profiler {profiler.value}",
            why="they are options of nsys",
            instead="Type --profiler nsys as well, or leave them out",
        )


def _check_programs(*, nsys: bool, ft_launcher: bool) -> None:
    """Refuse a job on this machine that would start with a program that is not there."""
    if nsys and not shutil.which("nsys"):
        raise ProfilingConfigError(
            "nsys is not on this machine's PATH",
            why="the job would run here, and its ranks start with `nsys profile`",
            instead="Install Nsight Systems, or type --profiler torch",
        )
    if ft_launcher and not shutil.which("ft_launcher", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
        raise ProfilingConfigError(
            "ft_launcher is not on this machine's PATH",
            why="the job would run here, under the fault-tolerance launcher",
            instead="Install it: pip install nvidia-resiliency-ext, or leave --fault-tolerance out",
        )


def _window(steps: str, ranks: str, record_shapes: bool) -> dict[str, Any]:
    start, end = parse_steps(steps)
    return {
        "profile_step_start": start,
        "profile_step_end": end,
        "profile_ranks": parse_ranks(ranks),
        "record_shapes": record_shapes,
    }


def _profiler_plugins(
    profiler: ProfilerName,
    window: dict[str, Any],
    memory: bool,
    nsys_args: list[str] | None,
    *,
    export_sqlite: bool,
    gpu_metrics: bool,
) -> list[run.Plugin]:
    from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin

    if profiler is ProfilerName.torch:
        return [PyTorchProfilerPlugin(**window, record_memory_history=memory)]
    if profiler is ProfilerName.nsys:
        options = {"nsys_extra_args": nsys_args, "export_sqlite": export_sqlite, "nsys_gpu_metrics": gpu_metrics}
        return [NsysPlugin(**window, **options)]
    return []


def _job_plugins(*, fault_tolerance: bool, preempt_time: int | None) -> list[run.Plugin]:
    from bridge_profiling.plugins import FaultTolerancePlugin, PreemptionPlugin

    plugins: list[run.Plugin] = [FaultTolerancePlugin()] if fault_tolerance else []
    return plugins if preempt_time is None else [*plugins, PreemptionPlugin(preempt_time=preempt_time)]


def _executor(name: ExecutorName, nproc_per_node: int, nodes: int, slurm: dict[str, Any]) -> run.Executor:
    from recipes import executors

    if name is ExecutorName.slurm:
        if slurm["account"] is None:
            raise ProfilingConfigError("no --account", why="sbatch needs one", instead="Type --account NAME")
        return executors.slurm(nodes=nodes, ntasks_per_node=nproc_per_node, **slurm)
    if nodes != 1:
        raise ProfilingConfigError(
            f"--nodes {nodes} on one machine", why=f"--executor {name.value} runs here", instead="Type --executor slurm"
        )
    if name is ExecutorName.local:
        if nproc_per_node != 1:
            raise ProfilingConfigError(
                f"--executor local starts one process, not {nproc_per_node}",
                why="without a launcher nothing starts the others",
                instead="Type --executor local_torchrun, or --nproc-per-node 1",
            )
        return executors.local()
    return executors.local_torchrun(ntasks_per_node=nproc_per_node)


def _task(
    kind: TaskKind, recipe: str, config: Path | None, overrides: Sequence[str], *, packaged: bool
) -> run.Script | run.Partial:
    import nemo_run as run

    if kind is TaskKind.partial:
        from launch.pretrain import build_config
        from launch.tasks import pretrain_partial

        return pretrain_partial(lambda: build_config(recipe, [str(config)] if config else [], overrides))
    arguments = ["--recipe", recipe, *(["--config", str(config.resolve())] if config else []), *overrides]
    # A cluster gets a copy of this checkout and starts there; this machine has the checkout itself.
    path = Path("launch", "pretrain.py") if packaged else ROOT / "launch" / "pretrain.py"
    return run.Script(path=str(path), entrypoint="python", args=arguments)


def _submit(
    name: str, task: run.Script | run.Partial, executor: run.Executor, plugins: list[run.Plugin], *, dry_run: bool
) -> tuple[bool, Path | None]:
    """Run it to its end; whether it succeeded, and where it wrote its captures, when that is a directory here."""
    import nemo_run as run
    from torchx.specs import AppState

    from bridge_profiling.config import OUTPUT_DIR_VARIABLE

    with run.Experiment(name) as experiment:
        experiment.add(task, executor=executor, name=name, plugins=plugins)
        if dry_run:
            _describe(experiment.jobs[0])
            experiment.dryrun()
            return True, None
        experiment.run(detach=False, tail_logs=True)
        job = experiment.jobs[0]
    # NeMo-Run waits for the job as the experiment closes; only then is its state the last one.
    place = job.executor.env_vars.get(OUTPUT_DIR_VARIABLE)
    return job.state == AppState.SUCCEEDED, Path(place) if place else None


def _describe(job: Any) -> None:
    """Print what the plugins made of the task and the executor."""
    import nemo_run as run

    launcher = job.executor.get_launcher()
    print(f"executor   {type(job.executor).__name__}, launcher {type(launcher).__name__}")
    if isinstance(job.task, run.Script):
        print(f"command    {shlex.join([job.task.entrypoint, job.task.path, *job.task.args])}")
    else:
        print(f"task       {job.task.__fn_or_cls__.__module__}.{job.task.__fn_or_cls__.__name__}, with")
        print(f"profiling  {job.task.config.profiling}")
    for variable, value in job.executor.env_vars.items():
        print(f"env        {variable}={value}")


def _show(output_dir: Path, console: Console) -> None:
    try:
        print_captures(find_captures(output_dir), console)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    app()
