"""Refuses executors and submissions that would fail in the queue, or run wrongly there, before they are submitted.

Also executors made elsewhere, for example on the NeMo-Run command line. Changes nothing.
"""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import nemo_run as run
from nemo_run.config import get_nemorun_home

from bridge_profiling.common.errors import require
from bridge_profiling.plugins.batch_script import RUNDIR, arrives_unchanged, exports, names_another_path
from bridge_profiling.plugins.executors import check_launcher
from bridge_profiling.settings.profiling import check_flag

_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
#: Text that a shell reads as one word; variables are expanded.
_WORD = re.compile(r"(?:[\w./:@#%+,=~-]|\$\w+|\$\{\w+\})+", re.ASCII)

#: Characters that run a command, or end one, in a shell.
_RUNS = re.compile(r"[`;&|<>()\n\r\0]")

_JOB_NAME = re.compile(r"[\w.+=@:-]+", re.ASCII)
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

#: Allowed characters of a directory: NeMo-Run passes it to a shell unquoted, Slurm reads % as a pattern, Pyxis : and , too.
_DIRECTORY = re.compile(r"/[\w./@+=-]*", re.ASCII)


def check_executor(executor: run.Executor) -> None:
    """Refuse an executor whose job would fail, or run wrongly, after submission.

    Raises:
        ProfilingConfigError: names the field, the reason, and what to type.
    """
    if isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)):
        for name in ("nodes", "ntasks_per_node", "gpus_per_node"):
            value = getattr(executor, name, None)
            unset = name == "gpus_per_node" and value is None
            require(
                unset or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
                f"{name}={value!r} is not a number of at least 1",
                why="a job has at least one of them",
                instead=f"Type {name}=1 or more",
            )
    check_launcher(executor)
    for name, value in executor.env_vars.items():
        check_variable(name, value)
    if isinstance(executor, run.SlurmExecutor):
        _check_slurm(executor)


def check_submission(executor: run.Executor, name: str, arguments: Sequence[str] = ()) -> None:
    """Refuse an experiment's name, or arguments of a run.Script, that NeMo-Run would change in a Slurm batch script.

    Args:
        executor: where it is submitted.
        name: the experiment's name, which becomes a directory's.
        arguments: of a run.Script; a run.Partial's config is sent unchanged.

    Raises:
        ProfilingConfigError: names the text, the reason, and what to type.
    """
    if not isinstance(executor, run.SlurmExecutor):
        return
    bare = executor.container_image is None
    require(
        _DIRECTORY.fullmatch(f"/{name}") and not (bare and f"/{name}".startswith(RUNDIR)),
        f"the name {name!r} cannot be a Slurm experiment's",
        why=f"it becomes a directory, whose path NeMo-Run writes unquoted{' and searches for ' + RUNDIR if bare else ''}",
        instead="Choose one of letters, digits and ._- that does not start with nemo_run",
    )
    for argument in arguments if bare else ():
        _check_replacement("an argument", argument, "Use another path, or a run.Partial, whose config is sent unchanged")


def check_variable(name: object, value: object) -> None:
    """Refuse variables that no environment can hold.

    Raises:
        ProfilingConfigError: the name is invalid, or the value is not text.
    """
    require(
        isinstance(name, str) and _ENV_NAME.fullmatch(name),
        f"{name!r} is not a name of an environment variable",
        why="shells accept letters, digits and _",
        instead="Choose another name",
    )
    require(
        isinstance(value, str) and "\0" not in value,
        f"the environment variable {name}={value!r} is not text",
        why="an environment holds text, without null characters",
        instead=f"Type {name}={str(value)!r}",
    )


def _check_slurm(executor: run.SlurmExecutor) -> None:
    bare = executor.container_image is None
    require(
        isinstance(executor.account, str) and executor.account.strip(),
        "no Slurm account is given",
        why="sbatch needs one, and NeMo-Run names the job after it",
        instead='Type slurm(account="…"), or run.executor.account=… on the command line',
    )
    require(
        isinstance(executor.time, str) and _TIME.fullmatch(executor.time),
        f"time={executor.time!r} is not a Slurm time limit",
        why="Slurm reads minutes, MM:SS, HH:MM:SS or D-HH:MM:SS",
        instead='Type for example time="00:30:00"',
    )
    for name, value in executor.env_vars.items():
        require(
            arrives_unchanged(name, value, container=not bare),
            f"the environment variable {name}={value!r} would not arrive in the job unchanged",
            why="NeMo-Run writes its name in capitals and its value unquoted, and replaces the text /nemo_run in it",
            instead=f"Type slurm(env={{{name!r}: {value!r}}}), which quotes it, or setup_lines={exports({name: value})[0]!r}",
        )
    _check_fields(executor)
    for request in (executor, *executor.resource_group):
        _check_step(request)
    for mount in executor.container_mounts:
        _check_mount(mount, bare=bare)
    _check_tunnel(executor.tunnel, bare=bare)
    for name in ("setup_lines", "comment", "job_name_prefix", "srun_args", "additional_parameters") if bare else ():
        value = getattr(executor, name)
        for text in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            instead = "Write it with quotes between: /''nemo_run" if name == "setup_lines" else "Use another path"
            _check_replacement(name, text, instead)


def _check_fields(executor: run.SlurmExecutor) -> None:
    """Check the fields that become lines `#SBATCH --name='value'`, and all switches."""
    for field in fields(executor):
        value = getattr(executor, field.name)
        if isinstance(field.default, bool):
            check_flag(value, field.name)
        elif isinstance(value, str) and field.name != "setup_lines":
            _check_line(field.name, value)
    require(
        executor.exclusive is None or isinstance(executor.exclusive, bool) or executor.exclusive in ("user", "mcs", "topo"),
        f"exclusive={executor.exclusive!r} is not a boolean, 'user', 'mcs' or 'topo'",
        why="any other text is passed to sbatch, and none means no",
        instead="Type exclusive=True, or leave it out",
    )
    for name, value in (executor.additional_parameters or {}).items():
        require(
            isinstance(name, str) and _OPTION.fullmatch(name) and isinstance(value, str | int | float),
            f"additional_parameters holds {name!r}: {value!r}",
            why="each becomes an option of sbatch, --name=value",
            instead="Pass a name of letters and -, and text or a number; True is an option without a value",
        )
        _check_line(f"additional_parameters[{name!r}]", str(value))
    prefix = executor.job_name_prefix if executor.job_name_prefix is not None else executor.account
    setting = "account" if executor.job_name_prefix is None else "job_name_prefix"
    for name, text in ((setting, prefix), ("job_details.job_name", executor.job_details.job_name)):
        require(
            text is None or (isinstance(text, str) and _JOB_NAME.fullmatch(text)),
            f"{name}={text!r} cannot be part of a job's name",
            why="NeMo-Run names log files after the job, and writes their paths unquoted into the batch script",
            instead="Choose one of letters, digits and ._+=@:-",
        )


def _check_step(request: Any) -> None:
    """Check what NeMo-Run writes unquoted into the command line of srun."""
    image = request.container_image
    require(
        image is None or (isinstance(image, str) and _WORD.fullmatch(image)),
        f"container_image={image!r} cannot be written into a batch script",
        why="NeMo-Run writes it unquoted, so a shell would split or change it",
        instead="Type letters, digits and ._/:@#%+,=~-; a variable as $NAME. Link a file of another name",
    )
    for name, texts in (("container_env", request.container_env), ("srun_args", request.srun_args)):
        require(
            texts is None or (isinstance(texts, list) and all(isinstance(text, str) for text in texts)),
            f"{name}={texts!r} is not a list of texts",
            instead=f'Type for example {name}=["…"]',
        )
        for text in texts or ():
            require(
                _is_one_word(text),
                f"{name} holds {text!r}, which is not one argument in a shell",
                why="NeMo-Run writes it unquoted into the batch script, where a shell would split or run it",
                instead="Give each argument as an entry of its own, in quotes where it holds a space: \"--comment='my run'\"",
            )


def _is_one_word(text: str) -> bool:
    """Whether a shell reads one argument and runs nothing; variables and quotes may be in it."""
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    return len(words) == 1 and not _RUNS.search(text)


def _check_line(name: str, value: str) -> None:
    require(
        value.isprintable(),
        f"{name}={value!r} is not one line of text",
        why="it becomes one line of the batch script, and a second line would be run",
        instead="Leave line breaks and control characters out",
    )


def _check_replacement(name: str, text: object, instead: str) -> None:
    """Refuse text of a batch script in which NeMo-Run would replace a part of a path."""
    require(
        not isinstance(text, str) or not names_another_path(text),
        f"{name} holds {text!r}, and a path in it contains {RUNDIR!r}",
        why="without a container NeMo-Run replaces that text by the job's directory everywhere in the batch script",
        instead=instead,
    )


def _check_mount(mount: object, *, bare: bool) -> None:
    parts = mount.split(":") if isinstance(mount, str) else []
    require(
        not isinstance(mount, str) or _WORD.fullmatch(mount) or "," in mount,
        f"the mount {mount!r} cannot be written into a batch script",
        why="NeMo-Run writes it unquoted, so a shell would split or change it",
        instead="Use a path of letters, digits and ._/:@#%+=~-, or a link to it; a variable as $NAME",
    )
    require(
        len(parts) in (2, 3) and all(parts) and "," not in "".join(parts[:2]),
        f"the mount {mount!r} is not source:destination",
        why="Pyxis mounts one path of the node onto one path of the container, and separates mounts by commas",
        instead='Type for example mounts=["/data:/data"]',
    )
    require(
        not bare,
        f"the mount {mount!r} has no container",
        why="without container_image the job runs on the node itself, and mounts are dropped",
        instead="Give container_image, or leave the mounts out",
    )
    require(
        not f"{os.path.normpath(parts[1])}/".startswith(f"{RUNDIR}/"),
        f"the mount {mount!r} goes to {RUNDIR}",
        why="NeMo-Run mounts the job's own directory there, over whatever is mounted before",
        instead="Choose another destination",
    )


def _check_tunnel(tunnel: run.SSHTunnel | run.LocalTunnel, *, bare: bool) -> None:
    job_dir, setting = tunnel.job_dir, "job_dir"
    if isinstance(tunnel, run.LocalTunnel):
        home = os.path.join(get_nemorun_home(), "experiments")
        require(
            not job_dir or os.path.abspath(job_dir) == os.path.abspath(home),
            f"LocalTunnel(job_dir={job_dir!r}) is not where NeMo-Run writes the batch script",
            why="a LocalTunnel copies nothing, so sbatch would not find it",
            instead=f'Leave the tunnel out, or type LocalTunnel(job_dir=""); NEMORUN_HOME={get_nemorun_home()} moves both',
        )
        job_dir, setting = home, "NEMORUN_HOME"
    else:
        for name in ("host", "user"):
            require(
                isinstance(getattr(tunnel, name), str) and getattr(tunnel, name),
                f"the SSH tunnel's {name} is {getattr(tunnel, name)!r}",
                why="it says where to log in",
                instead=f'Type {name}="…"',
            )
    require(
        isinstance(job_dir, str) and _DIRECTORY.fullmatch(job_dir),
        f"the job directory {job_dir!r} is not an absolute path of letters, digits and ./_@+=-",
        why="NeMo-Run and Slurm read it unquoted, and Slurm reads % in it as a pattern",
        instead=f"Choose another with {setting}",
    )
    require(
        not bare or RUNDIR not in job_dir,
        f"the job directory {job_dir!r} contains {RUNDIR!r}",
        why="without a container NeMo-Run replaces that text by the job's directory everywhere in the batch script",
        instead=f"Choose a directory whose path does not contain it, with {setting}",
    )
