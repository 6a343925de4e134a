"""Refuses executors and submissions that would fail in the queue, or run wrongly there, before they are submitted.

Also executors made elsewhere, for example on the NeMo-Run command line. Changes nothing. sbatch itself refuses a wrong time
limit, account or option before the job is queued, so these are not checked here.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields

import nemo_run as run
from nemo_run.config import get_nemorun_home

from bridge_profiling.common.errors import require
from bridge_profiling.plugins.batch_script import RUNDIR, arrives_unchanged, exports, names_another_path
from bridge_profiling.plugins.executors import check_launcher
from bridge_profiling.settings.profiling import check_flag

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

#: Text that a shell reads as one word; variables are expanded.
_PATH = r"(?:[\w./@#%+=~-]|\$\w+|\$\{\w+\})+"
_IMAGE = re.compile(rf"(?:{_PATH}|[:,])+", re.ASCII)
_MOUNT = re.compile(rf"{_PATH}:{_PATH}(?::[\w,+-]+)?", re.ASCII)

#: One argument, with quotes where it holds spaces. Nothing in it runs a command, or ends one.
_ARGUMENT = re.compile(r"""(?:[^\s\0'"\\`;&|<>()]|'[^\n\r\0'`;&|<>()]*'|"[^\n\r\0"\\`;&|<>()]*")+""")

_JOB_NAME = re.compile(r"[\w.+=@:-]+", re.ASCII)

#: Allowed characters of a directory: NeMo-Run passes it to a shell unquoted, Slurm reads % as a pattern, Pyxis : and , too.
_DIRECTORY = re.compile(r"/[\w./@+=-]*", re.ASCII)


def check_executor(executor: run.Executor) -> None:
    """Refuse an executor whose job would fail, or run wrongly, after submission.

    Raises:
        ProfilingConfigError: names the field, the reason, and what to type.
    """
    for name in ("nodes", "ntasks_per_node", "gpus_per_node"):
        value = getattr(executor, name, None)
        require(value is None or value >= 1, f"{name}={value} starts no job", instead=f"Type {name}=1 or more")
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
    if bare:
        _check_replacement("an argument", arguments, "Use another path, or a run.Partial, whose config is sent unchanged")


def check_variable(name: object, value: object) -> None:
    """Refuse variables that no environment can hold.

    Raises:
        ProfilingConfigError: the name is invalid, or the value is not text.
    """
    require(
        isinstance(name, str) and _ENV_NAME.fullmatch(name) and isinstance(value, str) and "\0" not in value,
        f"the environment variable {name!r}={value!r} cannot be set",
        why="a name has letters, digits and _, and a value is text without null characters",
        instead=f"Choose another name, or type {name}={str(value)!r}",
    )


def _check_slurm(executor: run.SlurmExecutor) -> None:
    bare = executor.container_image is None
    options = executor.additional_parameters or {}
    lines = {name: f"{name}={value}" for name, value in options.items()}
    for field in fields(executor):
        value = getattr(executor, field.name)
        if isinstance(field.default, bool):
            check_flag(value, field.name)
        elif isinstance(value, str) and field.name != "setup_lines":
            lines[field.name] = value
    for name, line in lines.items():
        require(
            line.isprintable(),
            f"{name} holds {line!r}, which is not one line of text",
            why="it becomes one line of the batch script, and a second line would be run",
            instead="Leave line breaks and control characters out",
        )
    for name, value in executor.env_vars.items():
        require(
            arrives_unchanged(name, value, container=not bare),
            f"the environment variable {name}={value!r} would not arrive in the job unchanged",
            why="NeMo-Run writes its name in capitals and its value unquoted, and replaces the text /nemo_run in it",
            instead=f"Type slurm(env={{{name!r}: {value!r}}}), which quotes it, or setup_lines={exports({name: value})[0]!r}",
        )
    for name, text, pattern, instead in _unquoted(executor):
        require(
            isinstance(text, str) and pattern.fullmatch(text),
            f"{name} holds {text!r}, which cannot be written into a batch script",
            why="NeMo-Run writes it there unquoted, and a shell would split, run or change it",
            instead=instead,
        )
    for mount in executor.container_mounts:
        require(
            not bare,
            f"the mount {mount!r} has no container",
            why="without container_image the job runs on the node itself, and mounts are dropped",
            instead="Give container_image, or leave the mounts out",
        )
        require(
            not f"{os.path.normpath(mount.split(':')[1])}/".startswith(f"{RUNDIR}/"),
            f"the mount {mount!r} goes to {RUNDIR}",
            why="NeMo-Run mounts the job's own directory there, over whatever is mounted before",
            instead="Choose another destination",
        )
    _check_tunnel(executor.tunnel, bare=bare)
    for name in ("setup_lines", "comment", "job_name_prefix", "srun_args", "additional_parameters") if bare else ():
        instead = "Write it with quotes between: /''nemo_run" if name == "setup_lines" else "Use another path"
        _check_replacement(name, getattr(executor, name), instead)


def _unquoted(executor: run.SlurmExecutor) -> Iterator[tuple[str, object, re.Pattern[str], str]]:
    """The texts that NeMo-Run writes unquoted: the field, the text, the pattern that it must have, and what to type."""
    letters = "Choose one of letters, digits and ._+=@:-"
    yield "account", executor.account, _JOB_NAME, 'Type account="…", which also begins the job\'s name'
    if executor.job_name_prefix is not None:
        yield "job_name_prefix", executor.job_name_prefix, _JOB_NAME, letters
    if executor.job_details.job_name is not None:
        yield "job_details.job_name", executor.job_details.job_name, _JOB_NAME, letters
    for step in (executor, *executor.resource_group):
        if step.container_image is not None:
            link = "Type letters, digits and ._/:@#%+,=~-; a variable as $NAME. Link a file of another name"
            yield "container_image", step.container_image, _IMAGE, link
        for name in ("container_env", "srun_args"):
            # A text in place of a list would be read character by character.
            given = getattr(step, name) or []
            one_each = "Give a list, each argument an entry of its own, in quotes if it holds a space: [\"--comment='my run'\"]"
            for text in given if isinstance(given, list) else [None]:
                yield name, text, _ARGUMENT, one_each
    for mount in executor.container_mounts:
        yield "container_mounts", mount, _MOUNT, 'Type for example mounts=["/data:/data"], without commas, spaces or quotes'


def _check_replacement(name: str, value: object, instead: str) -> None:
    """Refuse text of a batch script in which NeMo-Run would replace a part of a path."""
    require(
        not names_another_path(str(value)),
        f"{name} holds {value!r}, and a path in it contains {RUNDIR!r}",
        why="without a container NeMo-Run replaces that text by the job's directory everywhere in the batch script",
        instead=instead,
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
    require(
        isinstance(job_dir, str) and _DIRECTORY.fullmatch(job_dir) and not (bare and RUNDIR in job_dir),
        f"the job directory {job_dir!r} is not an absolute path of letters, digits and ./_@+=-, without {RUNDIR}",
        why="NeMo-Run and Slurm read it unquoted, Slurm reads % in it as a pattern, and NeMo-Run replaces the text /nemo_run",
        instead=f"Choose another with {setting}",
    )
