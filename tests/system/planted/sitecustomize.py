"""On PYTHONPATH, plants the fault that PLANTED_FAULT names (`kill 1 5`: what, on which rank, in which iteration) in a rank.

`*` is every rank. PLANTED_LOCAL_RANK=0 gives all ranks that local rank, and so the same GPU. The command that a user types
stays as it is: Python imports this module when a rank starts. Only a job's first attempt is struck, so that the one which a
launcher starts after it can finish.
"""

import os
import signal
import sys
import threading


def fail() -> None:
    """What a bug in somebody's training raises."""
    raise ValueError("planted: the training broke")


def leak_all_memory() -> None:
    """A leak, until the GPU has no more: what fails is an allocation of this function, and so is most of what is there."""
    import torch

    kept = []
    while True:
        kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


STRIKES = {
    "fail": fail,
    "leak": leak_all_memory,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": threading.Event().wait,
    # As scancel, or a NeMo-Run that is told to stop, reaches the launcher; the rank gets on until it hears of it.
    "terminate the launcher": lambda: os.kill(os.getppid(), signal.SIGTERM) or signal.pause(),
}


def plant(fault: str) -> None:
    """Have this rank struck, if it is the one."""
    what, rank, iteration = fault.rsplit(" ", 2)
    if rank not in ("*", os.environ.get("RANK", "0")) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    from recipes.megatron.train import Loop

    step, steps = Loop._step, iter(range(1000))

    def struck(self: Loop, *arguments: object) -> object:
        if self.config.train.start_iteration + next(steps) == int(iteration):
            STRIKES[what]()
        return step(self, *arguments)

    Loop._step = struck


if "RANK" in os.environ and "PLANTED_LOCAL_RANK" in os.environ:
    os.environ["LOCAL_RANK"] = os.environ["PLANTED_LOCAL_RANK"]

# A rank; not the one that submits it, and not what a rank starts itself (`python -c …`).
is_rank = "RANK" in os.environ or any(argument.endswith("pretrain.py") for argument in sys.orig_argv[1:2])
if is_rank and "PLANTED_FAULT" in os.environ and "-c" not in sys.orig_argv:
    plant(os.environ["PLANTED_FAULT"])
