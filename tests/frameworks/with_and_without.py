"""Runs an example of docs/examples as it is, and then once more without its profiling: arguments are the script, and a folder.

In one process each, since importing the frameworks takes longer than the trainings.
"""

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import torch


class Nothing(nullcontext):
    """Stands in for every integration's class, and does nothing."""

    phase = nullcontext
    steps = staticmethod(iter)

    def __init__(self, *objects: object, **settings: object) -> None:
        super().__init__(self)


def take_profiling_out() -> None:
    """Put something that does nothing in the place of each integration that the example has imported."""
    for module in [module for name, module in sys.modules.items() if ".frameworks." in name]:
        for name in {"ProfilingCallback", "Profiling"} & vars(module).keys():
            setattr(module, name, Nothing)
        if module.__name__.endswith(".lightning"):
            module.ProfilingCallback = lambda **settings: sys.modules["lightning.pytorch"].Callback()


def leave_deepspeed_uncompiled() -> None:
    """On CPUs DeepSpeed compiles an operator for ranks of one host, for minutes; without it they communicate by gloo."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forget_the_training() -> None:
    """Accelerate keeps what an Accelerator was made with for the next one. The ranks stay connected."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


if __name__ == "__main__":
    script, folder = sys.argv[1], Path(sys.argv[2])
    rank = os.environ["RANK"]
    # Both trainings use one connection: ranks that have parted cannot meet again under torchrun.
    part, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *group: None
    if "deepspeed" in script:
        leave_deepspeed_uncompiled()
    for kind in ("with", "without"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        os.chdir(folder / kind)
        # A file a rank: lines of two ranks on one pipe run into each other.
        with open(f"rank-{rank}.out", "w") as sys.stdout:
            runpy.run_path(script, run_name="__main__")
        sys.stdout = sys.__stdout__
        take_profiling_out()
        forget_the_training()
        torch.distributed.init_process_group = lambda *backend: None
    part()
