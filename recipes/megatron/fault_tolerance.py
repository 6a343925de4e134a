"""The rank's side of `ft_launcher` (nvidia-resiliency-ext): heartbeats to the monitor that kills a rank which hangs.

Restarting is the launcher's, resuming the checkpoint's, and nothing here starts or ends a process. Without
`ft.enable_ft_package` nothing is imported or sent.

The time-outs are the launcher's (FaultTolerancePlugin sets them). With `ft.calc_ft_timeouts` shorter ones are calculated from
what was observed, at each checkpoint, and kept beside the checkpoints in ft_state.json, as Megatron Bridge does. They hold
only where they are true: not before the profiler's window lies behind, because a trace takes longer to write than an iteration
takes to run, and a monitor that does not know that would kill the rank.
"""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bridge_profiling.config import FaultToleranceConfig
from bridge_profiling.errors import ProfilingConfigError
from recipes.config import ConfigContainer

#: Where ft_launcher tells a rank how to reach its monitor.
MONITOR_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"

#: Megatron's name for the calculated time-outs, in the directory of the checkpoints.
STATE_FILE = "ft_state.json"

#: Where NeMo-Run's batch script looks for a file that says that all is trained; without it, it queues the job again.
FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"

#: Heartbeats to see before a time-out is calculated from them, as in Megatron Bridge.
_MIN_ITERATIONS = 16


def check_installed(ft: FaultToleranceConfig) -> None:
    """Refuse to train unwatched where heartbeats are asked for.

    Raises:
        ProfilingConfigError: nvidia-resiliency-ext is missing.
    """
    if ft.enable_ft_package and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise ProfilingConfigError(
            "ft.enable_ft_package=true, and nvidia-resiliency-ext is not installed",
            why="its client sends the heartbeats by which the fault-tolerance launcher notices a rank that hangs",
            instead="Type pip install 'nvidia-resiliency-ext>=0.4.1' where the job runs, or ft.enable_ft_package=false",
        )


def tell_finished(rank: int) -> None:
    """Say to a batch script that would queue the job again, also after a success, that nothing is left to train."""
    flag = os.environ.get(FINISHED_FLAG)
    if flag and rank == 0:
        Path(flag).touch()


class RankMonitor:
    """This rank's line to its monitor, while it is open. Without a monitor every call does nothing.

    Args:
        config: a finalized configuration, `train.start_iteration` included.
        rank: global rank; rank 0 speaks, and keeps the calculated time-outs.
        resumed: whether this process loads a checkpoint.
    """

    def __init__(self, config: ConfigContainer, *, rank: int, resumed: bool) -> None:
        self._ft, self._rank, self._resumed = config.ft, rank, resumed
        self._evaluation_ahead = config.train.eval_interval is not None
        self._start = config.train.start_iteration
        #: The first number of completed iterations after which no profiler makes an iteration longer.
        self._settled_from = config.profiling.profile_step_end if config.profiling.enabled else 0
        save, load = config.checkpoint.save, config.checkpoint.load
        self._state_file = Path(save) / STATE_FILE if save is not None and save == load else None
        self._iterations = 0
        self._client: Any = None

    def __enter__(self) -> RankMonitor:
        if not self._ft.enable_ft_package or MONITOR_SOCKET not in os.environ:
            return self
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        if self._ft.calc_ft_timeouts and self._resumed and self._start >= self._settled_from:
            self._restore(client)
        client.init_workload_monitoring()
        self._client = client
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        client, self._client = self._client, None
        if client is not None:
            # The launcher closes this line first when it stops the ranks of an attempt.
            with suppress(OSError):
                client.shutdown_workload_monitoring()

    def describe(self) -> str | None:
        """One line on who watches this rank; None where nobody was asked to."""
        if not self._ft.enable_ft_package:
            return None
        if self._client is None:
            return (
                f"fault tolerance: nobody watches these ranks, since {MONITOR_SOCKET} is not set; ft_launcher sets it, as"
                " FaultTolerancePlugin starts it"
            )
        line = f"fault tolerance: {self._describe_timeouts()}"
        if self._ft.calc_ft_timeouts and self._state_file is None:
            line += "; they stay as they are, since checkpoint.save and checkpoint.load are not one directory"
        return line

    def iteration_done(self) -> None:
        """Tell the monitor, after each iteration, that this rank is alive."""
        self._iterations += 1
        self._beat()

    def evaluation_done(self) -> None:
        """Tell it after an evaluation too: one that follows an iteration then has its own time."""
        self._evaluation_ahead = False
        self._beat()

    def checkpoint_done(self, completed: int) -> None:
        """Tell it after a checkpoint; and calculate the time-outs, where that was asked for. All ranks call it.

        Args:
            completed: number of iterations complete.
        """
        self._beat()
        seen = self._iterations >= _MIN_ITERATIONS and not self._evaluation_ahead and completed >= self._settled_from
        if self._client is not None and self._ft.calc_ft_timeouts and self._state_file is not None and seen:
            self._calculate(self._state_file)

    def _beat(self) -> None:
        if self._client is not None:
            self._client.send_heartbeat()

    def _calculate(self, state_file: Path) -> None:
        client, initial = self._client, self._client.hb_timeouts.initial
        client.calculate_and_set_hb_timeouts()
        state = client.state_dict()
        timeouts = state[client.CURRENT_TIMEOUTS_STATE_KEY]["heartbeat"]
        if not self._resumed and initial is not None:
            # A start from scratch says nothing of how long it takes to load a checkpoint.
            timeouts["initial"] = initial
        # The monitor looks that often: in less than that a rank cannot be late.
        timeouts["subsequent"] = max(timeouts["subsequent"], client.cfg.workload_check_interval)
        client.load_state_dict(state)
        if self._rank == 0:
            temporary = state_file.with_name(f".{STATE_FILE}.incomplete")
            temporary.write_text(json.dumps(client.state_dict()), encoding="utf-8")
            temporary.replace(state_file)
            print(f"fault tolerance: calculated time-outs, {self._describe_timeouts()}; kept in {state_file}", flush=True)

    def _restore(self, client: Any) -> None:
        """Load the calculated time-outs, where there are some; a file that cannot be read leaves the launcher's."""
        if self._state_file is None or not self._state_file.exists():
            return
        try:
            client.load_state_dict(json.loads(self._state_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            if self._rank == 0:
                print(f"fault tolerance: {self._state_file} is not used, it cannot be read: {error}", flush=True)

    def _describe_timeouts(self) -> str:
        timeouts = self._client.hb_timeouts
        first, later = (
            "any time" if seconds is None else f"{seconds:.4g} s" for seconds in (timeouts.initial, timeouts.subsequent)
        )
        return f"a rank is killed without a first heartbeat after {first}, or a later one after {later}"
