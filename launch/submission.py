"""Submits the training of `launch/experiment.py`, and waits until the job has written its last file.

Submit host only. Refuses settings that NeMo-Run or Slurm would change or lose.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_run as run
from torchx.specs import AppState

from bridge_profiling.common.errors import require
from bridge_profiling.plugins.batch_script import path_in_job
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE
from launch.shown_log import without_the_profilers_own_lines
from recipes import executors
from recipes.executor_checks import check_submission

_ROOT = Path(__file__).resolve().parent.parent

#: Seconds that a job may take to end after Slurm has ended it: KillWait is 30 s unless the cluster sets another.
_LEAVING_SECONDS = 180


@dataclass(frozen=True)
class Finished:
    """The outcome of a training.

    Args:
        succeeded: whether the training itself did.
        captures: the directory of its captures, if that is on this machine.
    """

    succeeded: bool
    captures: Path | None = None


def make_executor(
    name: str, nproc: int, nodes: int, env: list[str], output_dir: str | None, slurm: dict[str, Any]
) -> run.Executor:
    """The executor of that name.

    Args:
        name: where the job runs: `local`, `local_torchrun` or `slurm`.
        nproc: ranks per node.
        nodes: nodes.
        env: `NAME=VALUE` entries of the job's environment.
        output_dir: root directory of captures; None is one in the job's own directory.
        slurm: further arguments of `recipes.executors.slurm`, and those of an SSH tunnel; unset ones are None or empty.

    Raises:
        ProfilingConfigError: it cannot start that many ranks, or an option belongs to another executor.
    """
    for entry in env:
        require(re.match("[^=]+=", entry), f"--env {entry} is not NAME=VALUE", instead="Type for example --env NCCL_DEBUG=INFO")
    variables = dict(entry.split("=", 1) for entry in env)
    variables |= {OUTPUT_DIR_VARIABLE: os.path.abspath(output_dir)} if output_dir else {}
    if name == "slurm":
        require(slurm["account"] is not None, "no --account", why="sbatch needs one", instead="Type --account NAME")
        host, user, job_dir = (slurm.pop(option) for option in ("host", "user", "job_dir"))
        require(host or not (user or job_dir), "--user or --job-dir without --host", instead="Type --host NAME as well")
        tunnel = run.SSHTunnel(host=host, user=user or getpass.getuser(), job_dir=job_dir) if host else None
        return executors.slurm(nodes=nodes, ntasks_per_node=nproc, env=variables, tunnel=tunnel, **slurm)
    given = [f"--{option.replace('_', '-')}" for option, value in slurm.items() if value and option != "time"]
    given += [f"--nodes {nodes}"] if nodes != 1 else []
    require(
        not given, f"{', '.join(given)} with --executor {name}", why="it runs on this machine", instead="Type --executor slurm"
    )
    if name == "local_torchrun":
        return executors.local_torchrun(ntasks_per_node=nproc, env=variables)
    require(
        nproc == 1,
        f"--executor local starts one process, not {nproc}",
        why="without a launcher nothing starts the others",
        instead="Type --executor local_torchrun, or --nproc 1",
    )
    return executors.local(env=variables)


def submit(
    name: str,
    task: run.Script | run.Partial,
    executor: run.Executor,
    plugins: list[run.Plugin],
    *,
    dry_run: bool,
) -> Finished:
    """Run the training to its end.

    Args:
        name: the experiment's.
        task: the training.
        executor: where it runs.
        plugins: applied to both.
        dry_run: print what would run instead.
    """
    # torchrun's own messages: NeMo-Run asks for those that tell of nothing wrong, 40 lines, unless this is set.
    os.environ.setdefault("LOGLEVEL", "WARNING")
    # The filter encloses the experiment, since NeMo-Run may print the rest of the log as it closes.
    with without_the_profilers_own_lines(), _checkout_as_working_directory(executor), run.Experiment(name) as experiment:
        check_submission(executor, name, task.args if isinstance(task, run.Script) else ())
        experiment.add(task, executor=executor, name=name, plugins=plugins)
        if dry_run:
            _describe(experiment.jobs[0])
            experiment.dryrun()
            return Finished(succeeded=True)
        experiment.run(detach=False, tail_logs=True)
        job = experiment.jobs[0]
    # NeMo-Run waits for the job as the experiment closes; only then is its state final.
    if isinstance(executor, run.SlurmExecutor):
        _wait_until_gone(job)
    return Finished(job.state == AppState.SUCCEEDED, _local_captures(job))


@contextlib.contextmanager
def _checkout_as_working_directory(executor: run.Executor) -> Iterator[None]:
    """For Slurm, whose jobs get a copy of the checkout: submit from there, and say what the copy will not contain."""
    if not isinstance(executor, run.SlurmExecutor):
        yield
        return
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=_ROOT, capture_output=True, text=True, check=False).stdout
    if changed:
        print(
            f"{len(changed.splitlines())} files of this checkout are not committed: the job gets the last commit, without them",
            file=sys.stderr,
        )
    # NeMo-Run packages the git repository of the working directory.
    with contextlib.chdir(_ROOT):
        yield


def _wait_until_gone(job: Any) -> None:
    """Wait until the ranks are gone: Slurm reports a job as cancelled or timed out while they still write."""
    number = re.search(r"(\d+)$", str(job.handle))
    deadline = time.monotonic() + _LEAVING_SECONDS
    while number is not None and time.monotonic() < deadline:
        listed = job.executor.tunnel.run(f"squeue --noheader --jobs={number.group(1)}", hide=True, warn=True)
        if not listed.stdout.strip():
            return
        time.sleep(1)


def _local_captures(job: Any) -> Path | None:
    """The directory of a job's captures on this machine; if it is on another machine, print where, and return None."""
    captures = job.executor.env_vars.get(OUTPUT_DIR_VARIABLE)
    if captures is None:
        return None
    if isinstance(job.executor, run.SlurmExecutor):
        below = path_in_job(captures)
        if below is not None:
            captures = os.path.join(job.executor.tunnel.job_dir, Path(job.executor.job_dir).name, below)
        if isinstance(job.executor.tunnel, run.SSHTunnel):
            print(f"the captures are on {job.executor.tunnel.host}, in {captures}")
            return None
    return Path(captures)


def _describe(job: Any) -> None:
    """Print the task and the executor as the plugins changed them."""
    launcher = job.executor.get_launcher()
    print(f"executor   {type(job.executor).__name__}, launcher {type(launcher).__name__}")
    if isinstance(job.task, run.Script):
        print(f"command    {shlex.join([job.task.entrypoint, job.task.path, *job.task.args])}")
    else:
        print(f"task       {job.task.__fn_or_cls__.__module__}.{job.task.__fn_or_cls__.__name__}, with")
        print(f"profiling  {job.task.config.profiling}")
    for variable, value in job.executor.env_vars.items():
        print(f"env        {variable}={value}")
