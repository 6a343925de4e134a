"""A rank that starts itself under nsys and then sleeps its iterations away, so that nsys and its supervisor are all there is.

    RANK=0 nsys_loop.py FOLDER [NAME=VALUE …]      profiling settings; the window is 2-4 of 6 iterations of 0.1 s, or ITERATIONS

It says `iteration N` when one begins, and a file FOLDER/hold makes iteration 3 wait until the file is gone. OWN_RANGE=name
opens a range of the package nvtx around the loop.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ParallelLayout, ProfilingHook, start_under_nsys
from bridge_profiling.nsys.launch import report_exit_code
from bridge_profiling.settings.overrides import apply_overrides


def unwind(number, frame):
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, unwind)
    folder, *settings = sys.argv[1:]
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    config = ProfilingConfig(use_nsys_profiler=True, profile_step_start=2, profile_step_end=4, profile_ranks="all")
    apply_overrides(config, settings)
    config.output_dir = folder
    config.finalize()
    layout = ParallelLayout(world_size=world_size)
    start_under_nsys(config, rank=rank, layout=layout, local_rank=rank, cuda=False)
    if "OWN_RANGE" in os.environ:
        import nvtx

        nvtx.push_range(os.environ["OWN_RANGE"])
    with ProfilingHook(config, rank=rank, layout=layout) as hook:
        for iteration in range(int(os.environ.get("ITERATIONS", 6))):
            with hook.iteration(iteration), hook.range("work"):
                print(f"rank {rank}: iteration {iteration} of {os.getpid()}", flush=True)
                time.sleep(0.1)
                while iteration == 3 and (Path(folder) / "hold").exists():
                    time.sleep(0.02)
    print(f"rank {rank}: the loop is done", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with report_exit_code():
        main()
