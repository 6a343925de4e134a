"""A thread that calls a function at fixed times, so that a training pays nothing for what is sampled beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import TIMEOUT_MAX, Event, Thread
from time import monotonic, thread_time

from bridge_profiling.errors import ProfilingConfigError

logger = logging.getLogger(__name__)

#: Seconds that the end waits for a reading: many times what any takes.
_PATIENCE = 10.0


def check_interval(interval: float) -> None:
    """Refuse what nobody can wait for between two samples.

    Raises:
        ProfilingConfigError: it is no number of seconds, or none that passes.
    """
    if not 0 < interval <= TIMEOUT_MAX:
        raise ProfilingConfigError(f"interval={interval} is no time between two samples", instead="Give seconds, such as 1.0")


class Ticking:
    """Calls `function` every `interval` seconds from a thread of its own, the first time at once.

    A call that fails is logged, the first time, and the next one comes all the same. A call that takes longer than the
    interval delays the next; what was missed is not made up for.

    Args:
        function: what to call.
        interval: seconds from one call's begin to the next one's.
        name: the thread's name.
        most: share of the time that the thread may compute, beyond which calls come more rarely; None lets it.
        apart: seconds of computing so far that are in nobody's way, and do not count.
    """

    def __init__(
        self,
        function: Callable[[], object],
        interval: float,
        name: str,
        most: float | None = None,
        apart: Callable[[], float] = float,
    ) -> None:
        self._function, self._interval, self._most, self._failed = function, interval, most, False
        self._apart = apart
        self._stopped = Event()
        # A daemon: an interpreter that exits does not wait for it.
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start calling."""
        self._thread.start()

    def stop(self) -> bool:
        """Stop calling, and wait for a call that is under way, but not for ever.

        Returns:
            Whether it has stopped: a driver that hangs must not keep a training from ending.
        """
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            logger.warning("monitoring: a reading has not ended in %.0f s, and is left behind", _PATIENCE)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = monotonic()
        while True:
            before = thread_time() - self._apart()
            self.call()
            now, computed = monotonic(), thread_time() - self._apart() - before
            due = max(due + self._interval, now if self._most is None else now + computed / self._most)
            if self._stopped.wait(due - now):
                return

    def call(self) -> None:
        """Call it once, now."""
        try:
            self._function()
        except Exception as error:
            if not self._failed:
                logger.warning("monitoring: %s: %s. Training goes on.", type(error).__name__, error)
            self._failed = True
