"""How NeMo-Run writes a Slurm batch script, and how to write a value so that the job gets it unchanged.

NeMo-Run writes `export NAME=value` with the name in capitals and the value unquoted, and, for a job without a container,
replaces the text `/nemo_run` by the job's directory all over the script. Knows text alone; never touches an executor.
"""

import re
from collections.abc import Mapping
from itertools import pairwise

#: NeMo-Run's name for the job's directory: a mount in a container, replaced by the real path in a script without.
RUNDIR = "/nemo_run"

#: `/nemo_run` where it is a path of its own, as in `/nemo_run/code:/data`; anywhere else it is a part of another name.
_JOB_DIRECTORY = r"""(?:^|(?<=[\s:=,;"'(\[{]))/nemo_run(?=$|[\s/:=,;"')\]}])"""
_OTHER_PATH = re.compile(rf"{_JOB_DIRECTORY}|(?P<other>/nemo_run)")

_UNQUOTED = re.compile(r"[\w./:@%+,=-]*", re.ASCII)


def names_another_path(text: str) -> bool:
    """Whether NeMo-Run's replacement would hit a path of the user's, such as `/home/me/nemo_run/data`."""
    return any(match["other"] for match in _OTHER_PATH.finditer(text))


def arrives_as_it_is(name: str, value: str, *, container: bool = False) -> bool:
    """Whether `export NAME=value`, as NeMo-Run writes it, sets this name to this value.

    Args:
        name: the variable's.
        value: the variable's.
        container: the job runs in one, where nothing is replaced.
    """
    unchanged = container or not names_another_path(value)
    return name == name.upper() and _UNQUOTED.fullmatch(value) is not None and unchanged


def quoted(value: str) -> str:
    """The value as a word of the script that the shell reads back unchanged, and that the replacement passes over.

    `/nemo_run` as a path of its own stays what NeMo-Run's users know it as: the job's directory.
    """
    # A quote closes and another opens between `/` and `nemo_run`, which is nothing to a shell.
    cuts = [0, *(match.start() + 1 for match in _OTHER_PATH.finditer(value) if match["other"]), len(value)]
    return "".join("'" + value[start:end].replace("'", "'\"'\"'") + "'" for start, end in pairwise(cuts))


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines that set these variables in the job, for `setup_lines`."""
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]
