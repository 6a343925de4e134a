"""When a training stops before its last iteration because it was asked to: by a signal, by the clock, by an iteration.

All ranks stop after the same iteration, by the loop's normal way out. Where `train.exit_signal_handler` is off nothing here
touches a signal.
"""

from __future__ import annotations

import signal
import threading
from time import monotonic
from types import FrameType, TracebackType

import torch

from recipes.config import TrainConfig


class Exits:
    """Watches for the exits that `train` asks for, while it is open.

    Args:
        train: the `train` section.
        device: where ranks exchange what they saw.
        started: `time.monotonic()` of the moment from which `exit_duration_in_mins` counts.
    """

    def __init__(self, train: TrainConfig, device: torch.device, started: float) -> None:
        self._train, self._device, self._started = train, device, started
        self._signal = signal.Signals[train.exit_signal]
        self._received = False
        self._previous: object = None

    def __enter__(self) -> Exits:
        # Python lets only the main thread handle signals; in another one, the exits that need none still work.
        if self._train.exit_signal_handler and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(self._signal, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(self._signal, self._previous)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def due(self, completed: int) -> str | None:
        """Why training should stop now, or None. All ranks call it after each iteration, and get the same answer.

        Where a signal or the clock may end the training, ranks exchange 8 bytes and wait for the device, since they may
        have seen the signal, or the time, in different iterations. Otherwise it costs nothing.

        Args:
            completed: number of iterations complete.
        """
        train = self._train
        if train.exit_signal_handler or train.exit_duration_in_mins is not None:
            limit = train.exit_duration_in_mins
            late = limit is not None and monotonic() - self._started >= 60 * limit
            seen = torch.tensor([self._received, late], dtype=torch.int32, device=self._device)
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
            received, late = (bool(one) for one in seen.tolist())
            if received:
                return f"{train.exit_signal} was received"
            if late:
                return f"train.exit_duration_in_mins={limit:g} is over"
        if train.exit_interval is not None and completed % train.exit_interval == 0:
            return f"{completed} iterations are a multiple of train.exit_interval={train.exit_interval}"
        return None
