"""The rank's side of `ft_launcher` (nvidia-resiliency-ext): heartbeats to the monitor that kills a rank which hangs.

The launcher restarts ranks and the checkpoint resumes them; nothing here starts or ends a process. Without
`ft.enable_ft_package` nothing is imported or sent. The launcher sets the time-outs (through FaultTolerancePlugin).
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bridge_profiling.common.errors import require
from bridge_profiling.common.launch_env import MONITOR_VARIABLE
from bridge_profiling.settings.profiling import FaultToleranceConfig

#: Variable with the path of a file that marks the training as finished; without the file, NeMo-Run's batch script queues the
#: job again.
FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"


def check_installed(ft: FaultToleranceConfig) -> None:
    """Refuse to train without heartbeats if they are asked for.

    Raises:
        ProfilingConfigError: nvidia-resiliency-ext is missing.
    """
    require(
        not ft.enable_ft_package or importlib.util.find_spec("nvidia_resiliency_ext"),
        "ft.enable_ft_package=true, and nvidia-resiliency-ext is not installed",
        why="its client sends the heartbeats that show the fault-tolerance launcher that a rank is alive",
        instead="Type pip install 'nvidia-resiliency-ext>=0.4.1' where the job runs, or ft.enable_ft_package=false",
    )


def mark_finished(rank: int) -> None:
    """Create the file without which a batch script would queue the job again, even after a success."""
    flag = os.environ.get(FINISHED_FLAG)
    if flag and rank == 0:
        Path(flag).touch()


class RankMonitor:
    """The connection of this rank to its monitor, while it is open. Without a monitor every call does nothing."""

    def __init__(self, ft: FaultToleranceConfig) -> None:
        self._enabled = ft.enable_ft_package
        self._client: Any = None

    def __enter__(self) -> RankMonitor:
        if self._enabled and MONITOR_VARIABLE in os.environ:
            from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

            self._client = RankMonitorClient()
            self._client.init_workload_monitoring()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        client, self._client = self._client, None
        if client is not None:
            # When the launcher stops the ranks of an attempt, it closes the connection first.
            with suppress(OSError):
                client.shutdown_workload_monitoring()

    def describe(self) -> str | None:
        """One line about the monitor of this rank; None if fault tolerance is off."""
        if not self._enabled:
            return None
        if self._client is None:
            return (
                f"fault tolerance: these ranks are not monitored, since {MONITOR_VARIABLE} is not set; ft_launcher sets it, as"
                " FaultTolerancePlugin starts it"
            )
        timeouts = self._client.hb_timeouts
        first, later = (
            "any time" if seconds is None else f"{seconds:.4g} s" for seconds in (timeouts.initial, timeouts.subsequent)
        )
        return f"fault tolerance: a rank is killed without a first heartbeat after {first}, or a later one after {later}"

    def send(self) -> None:
        """Report that the rank is alive, after an iteration, an evaluation, a checkpoint."""
        if self._client is not None:
            self._client.send_heartbeat()
