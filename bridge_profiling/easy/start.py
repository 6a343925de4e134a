"""A rank's start: runs a PyTorch script as it is, and profiles some of its iterations.

    python -m bridge_profiling.easy.start --steps 3:8 train.py --lr 0.1
    torchrun --nproc-per-node 2 -m bridge_profiling.easy.start --steps 3:8 train.py --lr 0.1

`bridge-profiling run` starts it on each rank. Exit codes are the script's; 2 is also a request that cannot be carried out.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from bridge_profiling.capture.nsys_profiler import start_under_nsys
from bridge_profiling.config import ProfilingConfig, resolve_output_dir
from bridge_profiling.easy.launch import name_the_launch
from bridge_profiling.easy.request import Request, parse
from bridge_profiling.easy.script import check_script, run_script, without_our_frames
from bridge_profiling.easy.session import Session
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.launch_env import LaunchEnv, export_for_torch
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.launch import report_exit_code


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script from the command line of its rank.

    Args:
        arguments: without the program's name; None takes the process's own.

    Raises:
        SystemExit: the script's, or with code 2 for a request that cannot be carried out.
    """
    try:
        request, config = _prepare(sys.argv[1:] if arguments is None else arguments)
    except ProfilingConfigError as error:
        if not LaunchEnv.read().local_rank:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    _show_messages()
    if config.use_nsys_profiler:
        _start_under_nsys(config)
    session = Session(config)
    session.watch()
    with report_exit_code():
        _run(request, session)


def _prepare(arguments: Sequence[str]) -> tuple[Request, ProfilingConfig]:
    request = parse(arguments)
    check_script(request.script, module=request.module)
    export_for_torch()
    if LaunchEnv.current().world_size > 1:
        name_the_launch()
    config = request.config(LaunchEnv.current().world_size)
    # The script may change its directory.
    return request, replace(config, output_dir=str(resolve_output_dir(config)))


def _run(request: Request, session: Session) -> None:
    try:
        run_script(request.script, request.arguments, module=request.module)
    except SystemExit as error:
        session.close(error)
        raise
    except BaseException as error:
        session.close(error)
        without_our_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        # As a shell tells of a script that Ctrl-C has ended.
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    else:
        session.close(None)


def _start_under_nsys(config: ProfilingConfig) -> None:
    here = LaunchEnv.current()
    # Counting GPUs by the driver's library leaves CUDA itself untouched: a script may fork before it starts it.
    asked = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        import torch

        cuda = torch.cuda.is_available()
    finally:
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        if asked is not None:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = asked
    layout = ParallelLayout(world_size=here.world_size)
    start_under_nsys(config, rank=here.rank, layout=layout, local_rank=here.device_index, cuda=cuda)


def _show_messages() -> None:
    """Print what the hook reports on standard error: standard output is the script's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("bridge-profiling: %(message)s"))
    logger = logging.getLogger("bridge_profiling")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    main()
