"""Where a training runs: executors for this machine and for Slurm, checked before anything is submitted.

Each returns a real NeMo-Run executor. On the NeMo-Run command line they are `run.executor=local`, `local_torchrun` and
`slurm`. Submit host only; a rank never imports this.
"""

# No `from __future__ import annotations`: NeMo-Run reads the annotations of factories.

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import nemo_run as run
from nemo_run.config import get_nemorun_home

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins.launchers import check_launcher

_ROOT = Path(__file__).resolve().parent.parent

#: NeMo-Run's name for the job's directory: a mount in a container, replaced by the real path in a batch script without.
_RUNDIR = "/nemo_run"

_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
_ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_SHELL_SAFE = re.compile(r"[\w./:@%+,=-]*", re.ASCII)


def local(*, env: Mapping[str, str] | None = None) -> run.LocalExecutor:
    """One process on this machine, without a launcher.

    Args:
        env: environment variables of the job, over the ones set here.

    Raises:
        ProfilingConfigError: an entry of `env` that is no text.
    """
    return _checked(run.LocalExecutor(ntasks_per_node=1, env_vars=_local_env() | dict(env or {})))


def local_torchrun(ntasks_per_node: int = 2, *, env: Mapping[str, str] | None = None) -> run.LocalExecutor:
    """Several ranks on this machine, under torchrun.

    Args:
        ntasks_per_node: number of ranks.
        env: environment variables of the job, over the ones set here.

    Raises:
        ProfilingConfigError: no rank at all, or an entry of `env` that is no text.
    """
    return _checked(
        run.LocalExecutor(ntasks_per_node=ntasks_per_node, launcher="torchrun", env_vars=_local_env() | dict(env or {}))
    )


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
    tunnel: Any = None,
    launcher: str | None = "torchrun",
    **options: Any,
) -> run.SlurmExecutor:
    """Ranks on a Slurm cluster.

    Args:
        account: Slurm account.
        partition: partition; None is the cluster's default.
        nodes: number of nodes.
        gpus_per_node: GPUs to ask for on each node; None asks for none.
        ntasks_per_node: ranks on each node; None is one a GPU, or one.
        time: time limit, as Slurm writes it.
        container_image: image for Pyxis; None runs on the nodes themselves.
        mounts: `source:destination` pairs for the container.
        env: environment variables of the job.
        tunnel: a run.SSHTunnel to the cluster; None submits from this machine.
        launcher: `torchrun`, or None for one Slurm task a rank.
        options: further fields of run.SlurmExecutor.

    Raises:
        ProfilingConfigError: a value that Slurm or NeMo-Run would refuse, or misread, after submission.
    """
    if ntasks_per_node is None:
        # One rank a GPU has to be said here: under torchrun NeMo-Run starts ntasks_per_node ranks a node, whatever
        # gpus_per_node says.
        ntasks_per_node = gpus_per_node or 1
    fields: dict[str, Any] = {
        "account": account,
        "partition": partition,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "ntasks_per_node": ntasks_per_node,
        "time": time,
        "container_image": container_image,
        "container_mounts": list(mounts),
        "env_vars": _slurm_env() | dict(env or {}),
        # A LocalTunnel copies nothing, so its job_dir has to be where NeMo-Run writes the batch script anyway: "".
        "tunnel": run.LocalTunnel(job_dir="") if tunnel is None else tunnel,
        "launcher": launcher,
    }
    unknown = sorted(set(options) - set(run.SlurmExecutor.__dataclass_fields__))
    if unknown:
        raise ProfilingConfigError(
            f"slurm() does not know {', '.join(unknown)}",
            why="further options are fields of run.SlurmExecutor",
            instead="Leave it out, or put the sbatch option into additional_parameters",
        )
    return _checked(run.SlurmExecutor(**fields, **options))


def check_executor(executor: run.Executor) -> None:
    """Refuse an executor whose job would fail, or run wrongly, after submission; also one made elsewhere.

    Raises:
        ProfilingConfigError: says which field, why, and what to type.
    """
    if isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)):
        _check_count(executor.nodes, "nodes")
        _check_count(executor.ntasks_per_node, "ntasks_per_node")
    check_launcher(executor)
    for name, value in executor.env_vars.items():
        _check(
            isinstance(value, str),
            f"the environment variable {name}={value!r} is not text",
            why="an environment holds text",
            instead=f"Type {name}={str(value)!r}",
        )
    if isinstance(executor, run.SlurmExecutor):
        _check_slurm(executor)


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
        env_vars=_slurm_env(),
        container_mounts=[],
        tunnel=run.Config(run.LocalTunnel, job_dir=""),
    )


def _local_env() -> dict[str, str]:
    def prepended(directory: str, variable: str) -> str:
        return os.pathsep.join(filter(None, (directory, os.environ.get(variable, ""))))

    return {
        # The job's `python` and `torchrun` are then the ones that submit it, also where the environment is not activated.
        "PATH": prepended(os.path.dirname(sys.executable), "PATH"),
        # A job starts in another directory and has to find `recipes` and `launch` all the same.
        "PYTHONPATH": prepended(str(_ROOT), "PYTHONPATH"),
        # Ranks on one machine share its cores; a thread pool in each of them makes all of them slower.
        "OMP_NUM_THREADS": "1",
    }


def _slurm_env() -> dict[str, str]:
    return {"PYTHONPATH": f"{_RUNDIR}/code"}


def _checked(executor: Any) -> Any:
    check_executor(executor)
    return executor


def _check_slurm(executor: run.SlurmExecutor) -> None:
    _check(
        isinstance(executor.account, str) and bool(executor.account.strip()),
        "no Slurm account is given",
        why="sbatch needs one, and NeMo-Run names the job after it",
        instead='Type slurm(account="…"), or run.executor.account=… on the command line',
    )
    if executor.gpus_per_node is not None:
        _check_count(executor.gpus_per_node, "gpus_per_node")
    _check(
        isinstance(executor.time, str) and _TIME.fullmatch(executor.time) is not None,
        f"time={executor.time!r} is not a Slurm time limit",
        why="Slurm reads minutes, MM:SS, HH:MM:SS or D-HH:MM:SS",
        instead='Type for example time="00:30:00"',
    )
    for name, value in executor.env_vars.items():
        _check_slurm_variable(name, value)
    for mount in executor.container_mounts:
        _check_mount(mount, executor)
    _check_tunnel(executor)


def _check_slurm_variable(name: str, value: str) -> None:
    # NeMo-Run writes `export NAME=value` into the batch script: the name in capitals, the value unquoted.
    _check(
        _ENV_NAME.fullmatch(name) is not None,
        f"the environment variable {name!r} cannot be set on Slurm",
        why="NeMo-Run writes its name in capitals",
        instead=f'Type {name.upper()!r}, or put `export {name}=…` into setup_lines="…"',
    )
    _check(
        _SHELL_SAFE.fullmatch(value) is not None,
        f"the environment variable {name}={value!r} cannot be set on Slurm",
        why="NeMo-Run writes it into the batch script unquoted, where a space or a quote ends or changes it",
        instead=f"Export it yourself, quoted: setup_lines=\"export {name}='…'\"",
    )


def _check_mount(mount: object, executor: run.SlurmExecutor) -> None:
    parts = mount.split(":") if isinstance(mount, str) else []
    _check(
        len(parts) in (2, 3) and all(parts),
        f"the mount {mount!r} is not source:destination",
        why="Pyxis mounts one path of the node onto one path of the container",
        instead='Type for example mounts=["/data:/data"]',
    )
    _check(
        executor.container_image is not None,
        f"the mount {mount!r} has no container",
        why="without container_image the job runs on the node itself, and mounts are dropped",
        instead="Give container_image, or leave the mounts out",
    )
    _check(
        parts[1].rstrip("/") != _RUNDIR,
        f"the mount {mount!r} covers {_RUNDIR}",
        why="NeMo-Run mounts the job's own directory there",
        instead="Choose another destination",
    )


def _check_tunnel(executor: run.SlurmExecutor) -> None:
    home = os.path.join(get_nemorun_home(), "experiments")
    job_dir = executor.tunnel.job_dir
    if isinstance(executor.tunnel, run.LocalTunnel):
        _check(
            not job_dir or os.path.abspath(job_dir) == os.path.abspath(home),
            f"LocalTunnel(job_dir={job_dir!r}) is not where NeMo-Run writes the batch script",
            why="a LocalTunnel copies nothing, so sbatch would not find it",
            instead=f'Leave the tunnel out, or type LocalTunnel(job_dir=""); NEMORUN_HOME={get_nemorun_home()} moves both',
        )
        job_dir = home
    _check(
        executor.container_image is not None or _RUNDIR not in job_dir,
        f"the job directory {job_dir!r} contains {_RUNDIR!r}",
        why="without a container NeMo-Run replaces that text by the job's directory all over the batch script",
        instead="Choose a directory whose path does not contain it (NEMORUN_HOME, or the tunnel's job_dir)",
    )


def _check_count(value: object, name: str) -> None:
    _check(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        f"{name}={value!r} is not a number of at least 1",
        why="a job has at least one of them",
        instead=f"Type {name}=1 or more",
    )


def _check(right: bool, what: str, *, why: str, instead: str) -> None:
    if not right:
        raise ProfilingConfigError(what, why=why, instead=instead)
