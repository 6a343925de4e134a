"""Submits what `launch/experiment.py` was asked for, and waits until the job has written its last file.

Submit host only. Refuses what NeMo-Run or Slurm would change or lose on the way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_profiling.errors import ProfilingConfigError
from launch.report_job import add_report, where_the_page_is
from launch.request import ExecutorName, TaskKind
from launch.shown_log import without_the_profilers_own_lines

if TYPE_CHECKING:
    import nemo_run as run

ROOT = Path(__file__).resolve().parent.parent

#: How long a job that Slurm has ended may take to leave: its KillWait is 30 s unless the cluster says otherwise.
_LEAVING_SECONDS = 180


@dataclass(frozen=True)
class Finished:
    """What became of a training.

    Args:
        succeeded: the training itself.
        captures: the directory of its captures, when that is one here.
        report: where the report is, or that there is none; None when none was asked for.
    """

    succeeded: bool
    captures: Path | None = None
    report: str | None = None


def make_executor(
    name: ExecutorName, nproc_per_node: int, nodes: int, env: Mapping[str, str], slurm: dict[str, Any]
) -> run.Executor:
    """The executor of that name.

    Args:
        name: where the job runs.
        nproc_per_node: ranks per node.
        nodes: nodes.
        env: environment variables of the job.
        slurm: what the recipe for Slurm takes besides; unset ones are None or empty.

    Raises:
        ProfilingConfigError: it cannot start so many ranks, or was given what belongs to another one.
    """
    from recipes import executors

    if name is ExecutorName.slurm:
        if slurm["account"] is None:
            raise ProfilingConfigError("no --account", why="sbatch needs one", instead="Type --account NAME")
        return executors.slurm(nodes=nodes, ntasks_per_node=nproc_per_node, env=env, **slurm)
    given = [f"--{option.replace('_', '-')}" for option, value in slurm.items() if value and option != "time"]
    if given:
        raise ProfilingConfigError(
            f"{', '.join(given)} with --executor {name.value}", why="it runs on this machine", instead="Type --executor slurm"
        )
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
        return executors.local(env=env)
    return executors.local_torchrun(ntasks_per_node=nproc_per_node, env=env)


def make_task(
    kind: TaskKind, recipe: str, config: Path | None, overrides: Sequence[str], *, packaged: bool
) -> run.Script | run.Partial:
    """The training as NeMo-Run is told of it.

    Args:
        kind: Script or Partial.
        recipe: a recipe's name.
        config: YAML file of settings.
        overrides: settings over both.
        packaged: the job gets a copy of this checkout, and starts in it.
    """
    import nemo_run as run

    if kind is TaskKind.partial:
        from launch.pretrain import build_config
        from launch.tasks import pretrain_partial

        return pretrain_partial(lambda: build_config(recipe, [str(config)] if config else [], overrides))
    arguments = ["--recipe", recipe, *(["--config", str(config.resolve())] if config else []), *overrides]
    # A cluster gets a copy of this checkout and starts there; this machine has the checkout itself.
    path = Path("launch", "pretrain.py") if packaged else ROOT / "launch" / "pretrain.py"
    return run.Script(path=str(path), entrypoint="python", args=arguments, metadata=_settings_told(recipe))


def _settings_told(recipe: str) -> dict[str, str]:
    """The recipe's own settings, for whoever reads the experiment and cannot import recipes: `bridge-profiling doctor`."""
    if importlib.util.find_spec("megatron") is None:
        return {}
    from bridge_profiling.doctor.experiment import SETTINGS_KEY
    from recipes.catalog import get_recipe, known_settings

    return {SETTINGS_KEY: " ".join(known_settings(get_recipe(recipe)()))}


def submit(
    name: str,
    task: run.Script | run.Partial,
    executor: run.Executor,
    plugins: list[run.Plugin],
    *,
    dry_run: bool,
    report: bool = False,
) -> Finished:
    """Run it to its end.

    Args:
        name: the experiment's.
        task: the training.
        executor: where it runs.
        plugins: what is applied to both.
        dry_run: print what would run instead.
        report: analyse the captures in a job of its own afterwards. Its failure is told, and is not the training's.
    """
    import nemo_run as run
    from torchx.specs import AppState

    from recipes.executor_checks import check_submission

    # Around the experiment: NeMo-Run may print the rest of the log as it closes.
    with without_the_profilers_own_lines(), _from_the_checkout(executor), run.Experiment(name) as experiment:
        check_submission(executor, name, task.args if isinstance(task, run.Script) else ())
        experiment.add(task, executor=executor, name=name, plugins=plugins)
        if report:
            add_report(experiment, experiment.jobs[0], executor)
        if dry_run:
            for job in experiment.jobs:
                _describe(job)
            experiment.dryrun()
            return Finished(succeeded=True)
        experiment.run(detach=False, tail_logs=True)
        job = experiment.jobs[0]
        reported = experiment.jobs[1] if report else None
    # NeMo-Run waits for the job as the experiment closes; only then is its state the last one.
    if isinstance(executor, run.SlurmExecutor):
        _wait_until_it_has_left(job)
    captures = _captures_here(job)
    return Finished(
        job.state == AppState.SUCCEEDED, captures, None if reported is None else where_the_page_is(reported, captures)
    )


@contextlib.contextmanager
def _from_the_checkout(executor: run.Executor) -> Iterator[None]:
    """Where a job gets a copy of the checkout: submit from there, and say what the copy will not hold."""
    import nemo_run as run

    if not isinstance(executor, run.SlurmExecutor):
        yield
        return
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if changed:
        print(
            f"{len(changed.splitlines())} files of this checkout are not committed: the job gets the last commit, without them",
            file=sys.stderr,
        )
    # NeMo-Run packages the git repository of the working directory.
    with contextlib.chdir(ROOT):
        yield


def _wait_until_it_has_left(job: Any) -> None:
    """Slurm calls a job cancelled or timed out while its ranks still write what they hold; wait until they are gone."""
    number = re.search(r"(\d+)$", str(job.handle))
    deadline = time.monotonic() + _LEAVING_SECONDS
    while number is not None and time.monotonic() < deadline:
        left = job.executor.tunnel.run(f"squeue --noheader --jobs={number.group(1)}", hide=True, warn=True)
        if not left.stdout.strip():
            return
        time.sleep(1)


def _captures_here(job: Any) -> Path | None:
    """Where this machine finds the captures of a job; None, with a word about where they are, when that is elsewhere."""
    import nemo_run as run

    from bridge_profiling.config import OUTPUT_DIR_VARIABLE
    from recipes.batch_script import RUNDIR

    place = job.executor.env_vars.get(OUTPUT_DIR_VARIABLE)
    if place is None:
        return None
    if isinstance(job.executor, run.SlurmExecutor):
        if place.startswith(f"{RUNDIR}/"):  # as a container sees the job's directory
            place = os.path.join(job.executor.tunnel.job_dir, Path(job.executor.job_dir).name, place[len(RUNDIR) + 1 :])
        if isinstance(job.executor.tunnel, run.SSHTunnel):
            print(f"the captures are on {job.executor.tunnel.host}, in {place}")
            return None
    return Path(place)


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
