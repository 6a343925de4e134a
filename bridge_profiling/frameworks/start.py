"""Starts a rank: runs a PyTorch script unchanged, and profiles some of its iterations.

    python -m bridge_profiling.frameworks.start --steps 3:8 train.py --lr 0.1
    torchrun --nproc-per-node 2 -m bridge_profiling.frameworks.start --steps 3:8 train.py --lr 0.1

`bridge-profiling run` starts it on each rank. The exit code is the script's, or 2 for an invalid request.
"""

from __future__ import annotations

import builtins
import logging
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from bridge_profiling.capture.nsys_profiler import start_under_nsys
from bridge_profiling.common.errors import ProfilingConfigError, print_error
from bridge_profiling.common.launch_env import LaunchEnv, export_for_torch
from bridge_profiling.frameworks.launch_name import name_launch, restored
from bridge_profiling.frameworks.run_request import Request, parse
from bridge_profiling.frameworks.script import ScriptProfiling
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.launch import report_exit_code
from bridge_profiling.settings.profiling import ProfilingConfig, resolve_output_dir

#: Files whose frames stand between the script and the code that it calls.
_OWN_FILES = (str(Path(__file__).parents[1]) + os.sep, "<frozen runpy>", runpy.__file__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script from its rank's command line; exits with the script's code, or 2 for an invalid request."""
    try:
        request = parse(sys.argv[1:] if arguments is None else arguments)
        request.check_script()
        export_for_torch()
        world_size = LaunchEnv.current().world_size
        if world_size > 1:
            name_launch()
        config = request.config(world_size)
    except ProfilingConfigError as error:
        if not LaunchEnv.read().local_rank:
            print_error(error)
        sys.exit(2)
    # The script may change its directory.
    config = replace(config, output_dir=str(resolve_output_dir(config)))
    _show_messages()
    if config.use_nsys_profiler:
        _start_under_nsys(config)
    profiling = ScriptProfiling(config)
    profiling.watch()
    with report_exit_code():
        try:
            _run_script(request)
        except SystemExit as error:
            profiling.close(error)
            raise
        except BaseException as error:
            profiling.close(error)
            _remove_own_frames(error)
            sys.excepthook(type(error), error, error.__traceback__)
            # The exit code that a shell reports for a script ended by Ctrl-C.
            sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
        else:
            profiling.close(None)


def _run_script(request: Request) -> None:
    """Run the script as `__main__` of this process, as Python would: its arguments, search path, exit code and tracebacks."""
    script = request.script
    sys.argv = [script, *request.arguments]
    # The search path begins with the directory of this process's start, where -m searches.
    if request.module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    elif os.path.isdir(script) or script.endswith((".zip", ".pyz")):
        runpy.run_path(script, run_name="__main__")
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(script))
        # runpy would change `__file__` and argv[0], and remove `__main__` before the last thread has ended.
        path = os.path.abspath(script)
        main = ModuleType("__main__")
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__dict__["__builtins__"] = builtins
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)


def _remove_own_frames(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an exception and of those that caused it."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _script_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our frames; None for a script that does not compile."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for one in reversed(entries):
        if not one.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            one.tb_next, trace = trace, one
    return trace


def _start_under_nsys(config: ProfilingConfig) -> None:
    here = LaunchEnv.current()
    # Counting GPUs through the driver's library leaves CUDA uninitialized, so the script may fork first.
    with restored("PYTORCH_NVML_BASED_CUDA_CHECK"):
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        import torch

        cuda = torch.cuda.is_available()
    layout = ParallelLayout(world_size=here.world_size)
    start_under_nsys(config, rank=here.rank, layout=layout, local_rank=here.device_index, cuda=cuda)


def _show_messages() -> None:
    """Print the hook's messages on standard error; standard output is the script's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("bridge-profiling: %(message)s"))
    logger = logging.getLogger("bridge_profiling")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    main()
