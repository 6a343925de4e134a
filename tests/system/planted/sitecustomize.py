"""On PYTHONPATH, plants the fault that PLANTED_FAULT names (`kill 1 5`: what, on which rank, in which iteration) in a rank.

The command that a user types stays as it is: Python imports this module when a rank starts. Only a job's first attempt is
struck, so that the one which a launcher starts after it can finish.
"""

from __future__ import annotations

import os
import signal
import threading

STRIKES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": threading.Event().wait,
    # As scancel, or a NeMo-Run that is told to stop, reaches the launcher; the rank gets on until it hears of it.
    "terminate the launcher": lambda: os.kill(os.getppid(), signal.SIGTERM) or signal.pause(),
}


def plant(fault: str) -> None:
    """Have this rank struck, if it is the one."""
    what, rank, iteration = fault.rsplit(" ", 2)
    if os.environ.get("RANK") != rank or os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        return
    from recipes.megatron.train import Loop

    step, steps = Loop._step, iter(range(1000))

    def struck(self: Loop, *arguments: object) -> object:
        if self.config.train.start_iteration + next(steps) == int(iteration):
            STRIKES[what]()
        return step(self, *arguments)

    Loop._step = struck


if "PLANTED_FAULT" in os.environ:
    plant(os.environ["PLANTED_FAULT"])
