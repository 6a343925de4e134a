"""Executors for this machine and for Slurm, checked before anything is submitted.

Each function returns a real NeMo-Run executor. On the NeMo-Run command line they are `run.executor=local`, `local_torchrun`
and `slurm`. Submit host only; a rank never imports this.
"""

# No `from __future__ import annotations`: NeMo-Run reads the annotations of factories.

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import nemo_run as run

from bridge_profiling.common.errors import require
from bridge_profiling.plugins.batch_script import RUNDIR, arrives_unchanged, exports, quoted
from recipes.executor_checks import check_executor, check_variable

_ROOT = Path(__file__).resolve().parent.parent


def local(*, env: Mapping[str, str] | None = None) -> run.LocalExecutor:
    """One process on this machine, without a launcher.

    Args:
        env: environment variables of the job, in addition to those set here.

    Raises:
        ProfilingConfigError: an entry of `env` is not text.
    """
    return _local(1, None, env)


def local_torchrun(ntasks_per_node: int = 2, *, env: Mapping[str, str] | None = None) -> run.LocalExecutor:
    """Several ranks on this machine, under torchrun.

    Args:
        ntasks_per_node: number of ranks.
        env: environment variables of the job, in addition to those set here.

    Raises:
        ProfilingConfigError: the number of ranks is below 1, or an entry of `env` is not text.
    """
    return _local(ntasks_per_node, "torchrun", env)


def _local(ntasks_per_node: int, launcher: str | None, env: Mapping[str, str] | None) -> run.LocalExecutor:
    def prepended(directory: str, variable: str) -> str:
        return os.pathsep.join(filter(None, (directory, os.environ.get(variable, ""))))

    variables = {
        # The job uses the `python` and `torchrun` that submit it, even if the environment is not activated.
        "PATH": prepended(os.path.dirname(sys.executable), "PATH"),
        # A job starts in another directory, and must find `recipes` and `launch`.
        "PYTHONPATH": prepended(str(_ROOT), "PYTHONPATH"),
        # Ranks on one machine share its cores; a thread pool in each of them makes all of them slower.
        "OMP_NUM_THREADS": "1",
    }
    executor = run.LocalExecutor(ntasks_per_node=ntasks_per_node, launcher=launcher, env_vars=variables | dict(env or {}))
    check_executor(executor)
    return executor


def slurm(
    account: str,
    partition: str | None = None,
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    ntasks_per_node: int | None = None,
    time: str = "00:30:00",
    container_image: str | None = None,
    mounts: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    venv: str | os.PathLike[str] | None = None,
    tunnel: run.SSHTunnel | run.LocalTunnel | None = None,
    launcher: Any = "torchrun",
    setup_lines: str | None = None,
    **options: Any,
) -> run.SlurmExecutor:
    """Ranks on a Slurm cluster: submitted from this machine, or through SSH.

    Args:
        account: Slurm account.
        partition: partition; None is the cluster's default.
        nodes: number of nodes.
        gpus_per_node: GPUs to ask for on each node; None asks for none.
        ntasks_per_node: ranks on each node; None is one a GPU, or one.
        time: time limit, as Slurm writes it.
        container_image: image for Pyxis; None runs on the nodes themselves.
        mounts: `source:destination` pairs for the container.
        env: environment variables of the job. Names and values arrive unchanged; no `$NAME` in them is expanded, and
            `/nemo_run` as a path of its own is the job's directory. In a container, a variable that the image sets keeps the
            image's value, unless the option `container_env` names it.
        venv: virtual environment, on the nodes, whose `python` and `torchrun` a job without a container uses. None is the
            one that submits; through SSH, the programs on the nodes' PATH.
        tunnel: a `run.SSHTunnel(host, user, job_dir)` to submit on another machine, with a directory of the cluster for the
            job's code, logs and captures; None submits from this machine.
        launcher: `torchrun`, `ft`, a launcher object, or None for one Slurm task a rank.
        setup_lines: shell lines of the batch script, run once before the ranks start, after the variables above are set.
        options: further fields of run.SlurmExecutor.

    Raises:
        ProfilingConfigError: a value that Slurm or NeMo-Run would refuse, or misread, after submission.
    """
    if ntasks_per_node is None:
        # Set explicitly: under torchrun, NeMo-Run starts ntasks_per_node ranks on a node and ignores gpus_per_node.
        ntasks_per_node = gpus_per_node or 1
    variables = _SLURM_ENV | dict(env or {})
    for name, value in variables.items():
        check_variable(name, value)
        require(
            re.search(rf"\$({re.escape(name)}\b|{{{re.escape(name)}}})", value) is None,
            f"the environment variable {name}={value!r} refers to itself",
            why="a value arrives in the job unchanged, so its old value would be lost",
            instead=f"Write it as a line of the batch script: setup_lines='export {name}=\"{value}\"'",
        )
    if venv is None and not isinstance(tunnel, run.SSHTunnel):
        venv = _submitting_venv()
    require(
        venv is None or os.path.isabs(venv),
        f"venv={venv!r} is not an absolute path",
        why="the job starts in another directory, and on other machines",
        instead='Type for example venv="/shared/me/venv"',
    )
    lines = [_path_line(venv)] if venv is not None and container_image is None and "PATH" not in variables else []
    lines += exports({name: value for name, value in variables.items() if not arrives_unchanged(name, value)})
    lines += [setup_lines] if setup_lines else []
    executor = run.SlurmExecutor(
        account=account,
        partition=partition,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ntasks_per_node=ntasks_per_node,
        time=time,
        container_image=container_image,
        container_mounts=list(mounts),
        env_vars={name: value for name, value in variables.items() if arrives_unchanged(name, value)},
        # A LocalTunnel copies nothing, so its job_dir must be where NeMo-Run writes the batch script: "".
        tunnel=tunnel or run.LocalTunnel(job_dir=""),
        launcher=launcher,
        setup_lines="\n".join(lines) or None,
        **options,
    )
    check_executor(executor)
    return executor


@run.cli.factory(target=run.Executor, name="local")
def local_config() -> run.Config[run.LocalExecutor]:
    """One process on this machine."""
    return local().to_config()


@run.cli.factory(target=run.Executor, name="local_torchrun")
def local_torchrun_config(ntasks_per_node: int = 2) -> run.Config[run.LocalExecutor]:
    """Several ranks on this machine, under torchrun."""
    return local_torchrun(ntasks_per_node).to_config()


@run.cli.factory(target=run.Executor, name="slurm")
def slurm_config(account: str = "", partition: Optional[str] = None) -> run.Config[run.SlurmExecutor]:  # noqa: UP045
    """Ranks on a Slurm cluster: `run.executor="slurm(account,partition)" run.executor.nodes=2`; checked when all is set."""
    return run.Config(
        run.SlurmExecutor,
        account=account,
        partition=partition,
        time="00:30:00",
        launcher="torchrun",
        env_vars=dict(_SLURM_ENV),
        # Has no effect in a container, which a later setting may select.
        setup_lines=_path_line(_submitting_venv()),
        container_mounts=[],
        tunnel=run.Config(run.LocalTunnel, job_dir=""),
    )


#: PYTHONPATH finds the copy of the code that the job runs; one thread a rank, as torchrun chooses, since ranks share cores.
_SLURM_ENV = {"PYTHONPATH": f"{RUNDIR}/code", "OMP_NUM_THREADS": "1"}


def _submitting_venv() -> str:
    return os.path.dirname(os.path.dirname(sys.executable))


def _path_line(venv: str | os.PathLike[str]) -> str:
    return f'export PATH={quoted(os.path.join(venv, "bin"))}:"$PATH"'
