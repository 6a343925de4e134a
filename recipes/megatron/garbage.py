"""Python's garbage collection at iterations of our choice, the same on every rank. Never touches the device's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recipes.config import TrainConfig


@contextmanager
def manual_gc(train: TrainConfig) -> Iterator[Callable[[int], None]]:
    """Collect at `train.manual_gc_interval` only, if `train.manual_gc` is on; afterwards as it was before.

    Yields:
        To be called with each iteration that is complete.
    """
    if not train.manual_gc:
        yield lambda iteration: None
        return
    interval, enabled = train.manual_gc_interval, gc.isenabled()
    gc.disable()
    # What setting up left behind would otherwise stay for the whole training.
    gc.collect()

    def collect(iteration: int) -> None:
        if interval and (iteration + 1) % interval == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if enabled:
            gc.enable()
