"""Runs an example of docs/examples as it is, and then once more without its profiling: arguments are the script, and a folder.

In one process each, since importing the frameworks takes longer than the trainings.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch


def take_profiling_out() -> None:
    """Put something that does nothing in the place of each integration that the example has imported."""
    integrations = {name.rpartition(".")[2]: module for name, module in sys.modules.items() if ".integrations." in name}
    stand_ins = {
        "lightning": _no_lightning,
        "hugging_face": _no_hugging_face,
        "accelerate": _no_accelerate,
        "ddp_fsdp": _no_loop,
        "deepspeed": _no_loop,
    }
    for name, stand_in in stand_ins.items():
        if name in integrations:
            stand_in(integrations[name])


def _no_lightning(module: ModuleType) -> None:
    from lightning.pytorch import Callback

    module.ProfilingCallback = lambda **settings: Callback()


def _no_hugging_face(module: ModuleType) -> None:
    module.ProfilingCallback = lambda trainer, **settings: nullcontext()


def _no_accelerate(module: ModuleType) -> None:
    class Loop(nullcontext):
        def __enter__(self):
            return self

        batches = staticmethod(iter)

    module.AccelerateProfiling = lambda accelerator, **settings: Loop()


def _no_loop(module: ModuleType) -> None:
    class Loop(nullcontext):
        def __enter__(self):
            return self

        steps = staticmethod(iter)
        phase = nullcontext

    module.Profiling = lambda *model_and_optimizer, **settings: Loop()


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
