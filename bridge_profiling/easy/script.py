"""Runs a script, or a module, as Python itself would: its arguments, its search path, its exit code, its tracebacks."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from bridge_profiling.errors import ProfilingConfigError

#: Frames of these files are ours: they stand between the script and what it called.
_OURS = (str(Path(__file__).parents[1]) + os.sep, "<frozen runpy>", runpy.__file__)

#: Endings of scripts that Python cannot run.
_OF_A_SHELL = frozenset({".sh", ".bash", ".slurm", ".sbatch"})


def check_script(script: str, *, module: bool) -> None:
    """Refuse a script that is not there, or none of Python's.

    Raises:
        ProfilingConfigError: there is no such file, or Python cannot run it. A module is looked for when it is run.
    """
    if module:
        return
    path, instead = Path(script), "Type the path of a script, or -m and a module's name"
    if not path.exists():
        raise ProfilingConfigError(f"{script} does not exist", instead=instead)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ProfilingConfigError(f"{script} is a directory without a __main__.py", instead=instead)
    if path.suffix in _OF_A_SHELL:
        instead = "Type the Python script that it runs, or write bridge-profiling run into it where it says python"
        raise ProfilingConfigError(f"{script} is a shell's script", instead=instead)


def run_script(script: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run it as `__main__` of this process, and come back when its last line is done.

    Args:
        script: path of the script, or the module's name.
        arguments: the script's own.
        module: whether `script` names a module.

    Raises:
        BaseException: whatever the script raises, SystemExit among it.
    """
    sys.argv = [script, *arguments]
    # The first place of the search path is where -m looked for us: the directory that we were started in.
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    elif os.path.isdir(script) or script.endswith((".zip", ".pyz")):
        runpy.run_path(script, run_name="__main__")
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(script))
        _run_file(os.path.abspath(script))


def _run_file(path: str) -> None:
    """Not by runpy: it would change `__file__` and argv[0], and take `__main__` away before the last thread has ended."""
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = builtins
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def without_our_frames(error: BaseException) -> None:
    """Take our frames out of an exception's traceback, and out of those that led to it, so that they are the script's alone."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _theirs(one.__traceback__)
            todo += [one.__cause__, one.__context__]


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our frames; none where it has no other, as of a script that does not compile."""
    frames = []
    frame = trace
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    kept = [one for one in frames if not one.tb_frame.f_code.co_filename.startswith(_OURS)]
    following = None
    for one in reversed(kept):
        one.tb_next = following
        following = one
    return following
