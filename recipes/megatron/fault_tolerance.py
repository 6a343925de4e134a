"""The rank's side of `ft_launcher` (nvidia-resiliency-ext): heartbeats to the monitor that kills a rank which hangs.

The launcher restarts ranks and the checkpoint resumes them; nothing here starts or ends a process. Without
`ft.enable_ft_package` nothing is imported or sent.

The launcher sets the time-outs (through FaultTolerancePlugin). With `ft.calc_ft_timeouts`, shorter ones are calculated from
observed times at each checkpoint and kept next to the checkpoints in ft_state.json, as in Megatron Bridge. They apply only
after the profiler's window: writing a trace takes longer than an iteration, and the monitor would kill the rank.
"""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bridge_profiling.common.atomic import write_json
from bridge_profiling.common.errors import require
from bridge_profiling.common.launch_env import MONITOR_VARIABLE
from bridge_profiling.settings.profiling import FaultToleranceConfig
from recipes.config import ConfigContainer

#: Megatron's name for the calculated time-outs, in the directory of the checkpoints.
STATE_FILE = "ft_state.json"

#: Variable with the path of a file that marks the training as finished; without the file, NeMo-Run's batch script queues the
#: job again.
FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"

#: Number of iterations before time-outs are calculated, as in Megatron Bridge.
_MIN_ITERATIONS = 16


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
    """The connection of this rank to its monitor, while it is open. Without a monitor every call does nothing.

    Args:
        config: a finalized configuration, `train.start_iteration` included.
        rank: global rank; rank 0 prints, and writes the calculated time-outs.
        resumed: whether this process loads a checkpoint.
    """

    def __init__(self, config: ConfigContainer, *, rank: int, resumed: bool) -> None:
        self._ft, self._rank, self._resumed = config.ft, rank, resumed
        self._evaluation_ahead = config.train.eval_interval is not None
        self._start = config.train.start_iteration
        #: Number of completed iterations after which no profiler makes an iteration longer.
        self._settled_from = config.profiling.profile_step_end if config.profiling.enabled else 0
        save, load = config.checkpoint.save, config.checkpoint.load
        self._state_file = Path(save) / STATE_FILE if config.ft.calc_ft_timeouts and save and save == load else None
        self._iterations = 0
        self._client: Any = None

    def __enter__(self) -> RankMonitor:
        if not self._ft.enable_ft_package or MONITOR_VARIABLE not in os.environ:
            return self
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        if self._resumed and self._start >= self._settled_from:
            self._restore(client)
        client.init_workload_monitoring()
        self._client = client
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        client, self._client = self._client, None
        if client is not None:
            # When the launcher stops the ranks of an attempt, it closes the connection first.
            with suppress(OSError):
                client.shutdown_workload_monitoring()

    def describe(self) -> str | None:
        """One line about the monitor of this rank; None if fault tolerance is off."""
        if not self._ft.enable_ft_package:
            return None
        if self._client is None:
            return (
                f"fault tolerance: these ranks are not monitored, since {MONITOR_VARIABLE} is not set; ft_launcher sets it, as"
                " FaultTolerancePlugin starts it"
            )
        line = f"fault tolerance: {self._describe_timeouts()}"
        if self._ft.calc_ft_timeouts and self._state_file is None:
            line += "; they stay as they are, since checkpoint.save and checkpoint.load are not one directory"
        return line

    def iteration_done(self) -> None:
        """Send a heartbeat after an iteration."""
        self._iterations += 1
        self._beat()

    def evaluation_done(self) -> None:
        """Send a heartbeat after an evaluation, so that its time does not count to the next iteration."""
        self._evaluation_ahead = False
        self._beat()

    def checkpoint_done(self, completed: int) -> None:
        """Send a heartbeat after a checkpoint; with `ft.calc_ft_timeouts`, calculate the time-outs. All ranks call it.

        Args:
            completed: number of iterations complete.
        """
        self._beat()
        seen = self._iterations >= _MIN_ITERATIONS and not self._evaluation_ahead and completed >= self._settled_from
        if self._client is not None and self._state_file is not None and seen:
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
            # A start from scratch does not show how long it takes to load a checkpoint.
            timeouts["initial"] = initial
        # The monitor checks at this interval, so it cannot notice a shorter delay.
        timeouts["subsequent"] = max(timeouts["subsequent"], client.cfg.workload_check_interval)
        client.load_state_dict(state)
        if self._rank == 0:
            write_json(state_file, client.state_dict())
            print(f"fault tolerance: calculated time-outs, {self._describe_timeouts()}; kept in {state_file}", flush=True)

    def _restore(self, client: Any) -> None:
        """Load the calculated time-outs if there are any; if the file cannot be read, the launcher's stay."""
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
