"""What NeMo-Run's launch scripts contain: quoting, `/nemo_run`, and the number of ranks. Imports no nemo_run.

NeMo-Run writes `export NAME=value` with the name in capitals and the value unquoted. For a job without a container it also
replaces the text `/nemo_run` by the job's directory everywhere in the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

#: NeMo-Run's name for the job's directory: a mount in a container, replaced by the real path in a script without one.
RUNDIR = "/nemo_run"

#: `/nemo_run` as a path of its own, as in `/nemo_run/code:/data`; elsewhere it is part of another name.
_JOB_DIRECTORY = r"""(?:^|(?<=[\s:=,;"'(\[{]))/nemo_run(?=$|[\s/:=,;"')\]}])"""
_OTHER_PATH = re.compile(rf"{_JOB_DIRECTORY}|(?P<other>/nemo_run)")

_UNQUOTED = re.compile(r"[\w./:@%+,=-]*", re.ASCII)


def path_in_job(path: str) -> str | None:
    """The part of `path` below `/nemo_run`; None for other paths."""
    return path.removeprefix(RUNDIR).lstrip("/") if f"{path}/".startswith(f"{RUNDIR}/") else None


def names_another_path(text: str) -> bool:
    """Whether NeMo-Run's replacement would change a path of the user's, such as `/home/me/nemo_run/data`."""
    return any(match["other"] for match in _OTHER_PATH.finditer(text))


def arrives_unchanged(name: str, value: str, *, container: bool = False) -> bool:
    """Whether NeMo-Run's unquoted `export NAME=value` keeps name and value. In a container it replaces no `/nemo_run`."""
    replaced = not container and names_another_path(value)
    return name == name.upper() and _UNQUOTED.fullmatch(value) is not None and not replaced


def quoted(value: str) -> str:
    """Quote a value for the script; the shell and NeMo-Run's replacement leave it unchanged.

    `/nemo_run` as a path of its own still becomes the job's directory.
    """
    # A quote closes and another opens between `/` and `nemo_run`, which the shell ignores.
    cuts = [0, *(match.start() + 1 for match in _OTHER_PATH.finditer(value) if match["other"]), len(value)]
    return "".join("'" + value[start:end].replace("'", "'\"'\"'") + "'" for start, end in pairwise(cuts))


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines for `setup_lines` that set these variables in the job."""
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]


def world_size(kind: str, field: Callable[[str, Any], Any], *, launched: bool, undecided: bool) -> int | None:
    """The number of ranks that an executor starts; None if something else decides.

    `field` reads a field of the executor; ranks are `launched` by torchrun or ft_launcher, else their number may be
    `undecided`.
    """
    tasks: object = None
    if launched or not undecided:
        if kind == "LocalExecutor":
            tasks = field("ntasks_per_node", 1) if launched else 1
        elif kind == "SlurmExecutor" and not field("heterogeneous", False):
            tasks = (field("torchrun_nproc_per_node", None) if launched else None) or field("ntasks_per_node", 1)
    nodes = field("nodes", 1)
    return tasks * nodes if isinstance(tasks, int) and isinstance(nodes, int) else None
