"""PreemptionPlugin: Slurm sends SIGTERM before the job's time limit, and the training ends cleanly on it.

Edits the executor's signal and the task's `train` section, and leaves the launcher unchanged.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

import logging
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import nemo_run as run

from bridge_profiling.errors import require
from bridge_profiling.plugins import nemo_run_patches  # noqa: F401  # its checks of a task come before this plugin's
from bridge_profiling.plugins.checks import check_executor, check_flags
from bridge_profiling.plugins.task import Task, check_task, has_field, read_setting, script_arguments, write_settings

logger = logging.getLogger(__name__)

#: Seconds between torchrun's signal to its ranks and the kill; older versions do not read it.
TORCHRUN_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

#: Maximum number of seconds of `sbatch --signal`.
_LONGEST = 65535

#: Slurm's forms of a time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass
class PreemptionPluginScriptArgs:
    """The argument of PreemptionPlugin's `script_args_converter_fn`."""

    enable_exit_handler: bool
    enable_exit_handler_for_data_loader: bool


@dataclass(kw_only=True)
class PreemptionPlugin(run.Plugin):
    """End a job cleanly before its time limit: the capture and a checkpoint are written.

    Args:
        preempt_time: seconds before the time limit at which Slurm sends SIGTERM; Slurm may send it up to a minute earlier.
        enable_exit_handler: on the signal the training finishes its iteration, saves and exits. Otherwise the task is
            unchanged, and the signal ends the process.
        enable_exit_handler_for_data_loader: keep the data loader's processes alive when they receive the signal.
        script_args_converter_fn: makes a run.Script's arguments, in place of the overrides.
    """

    preempt_time: int = 60
    enable_exit_handler: bool = True
    enable_exit_handler_for_data_loader: bool = False
    script_args_converter_fn: Optional[Callable[[PreemptionPluginScriptArgs], list[str]]] = None  # noqa: UP045

    def setup(self, task: Task, executor: Any) -> None:
        """Edit the executor and the task, or raise ProfilingConfigError and change nothing; a second call changes nothing."""
        self._check(task, executor)
        script_args = PreemptionPluginScriptArgs(self.enable_exit_handler, self.enable_exit_handler_for_data_loader)
        converter = self.script_args_converter_fn if self.enable_exit_handler else None
        arguments = script_arguments(task, converter, script_args)

        if self.enable_exit_handler:
            settings: dict[str, object] = {"exit_signal_handler": True}
            # A user's config may lack this field, and does not need it where it is off.
            if self.enable_exit_handler_for_data_loader or has_field(task, "train", "exit_signal_handler_for_dataloader"):
                settings["exit_signal_handler_for_dataloader"] = self.enable_exit_handler_for_data_loader
            if isinstance(task, run.Script):
                # Megatron Bridge's plugin writes these two with a capital, and a user's script may compare text.
                settings = {name: str(value) for name, value in settings.items()}
            write_settings(task, "train", settings, arguments)
        self._set_signal(executor)
        workers = read_setting(task, "dataset", "num_workers")
        if isinstance(workers, int) and workers and self.enable_exit_handler and not self.enable_exit_handler_for_data_loader:
            logger.warning(
                "PreemptionPlugin: dataset.num_workers=%d; the signal kills these processes, and then the training before its"
                " checkpoint. Pass enable_exit_handler_for_data_loader=True.",
                workers,
            )

    def _set_signal(self, executor: Any) -> None:
        if not isinstance(executor, run.SlurmExecutor):
            logger.warning(
                "PreemptionPlugin: nothing sends a signal %d seconds before the end of this job, since %s has no time limit;"
                " only Slurm does. A SIGTERM from elsewhere is still handled.",
                self.preempt_time,
                type(executor).__name__,
            )
            return
        wanted = f"TERM@{self.preempt_time}"
        if executor.signal not in (None, wanted):
            logger.warning("PreemptionPlugin replaces the executor's signal=%r by %r", executor.signal, wanted)
        executor.signal = wanted
        # torchrun forwards the signal to its ranks, and kills them after 30 s by default.
        if isinstance(getattr(executor, "env_vars", None), dict):  # a mocked executor has none
            executor.env_vars.setdefault(TORCHRUN_GRACE_VARIABLE, str(self.preempt_time))

    def _check(self, task: Task, executor: Any) -> None:
        check_flags(self)
        check_executor(self, executor)
        fields = ["exit_signal_handler"] if self.enable_exit_handler else []
        if fields and self.enable_exit_handler_for_data_loader:
            fields.append("exit_signal_handler_for_dataloader")
        check_task(task, "PreemptionPlugin", {"train": fields})
        time = self.preempt_time
        require(
            isinstance(time, int) and not isinstance(time, bool) and 1 <= time <= _LONGEST,
            f"PreemptionPlugin(preempt_time={time!r}) is not an integer from 1 to {_LONGEST}",
            why="it is the number of seconds between Slurm's signal and the time limit",
            instead="Type for example preempt_time=60",
        )
        limit = time_limit_seconds(executor.time) if isinstance(executor, run.SlurmExecutor) else None
        require(
            limit is None or time < limit,
            f"PreemptionPlugin(preempt_time={time}) is not less than the job's time limit of {limit} seconds",
            why="the signal would end the job as soon as it starts",
            instead="Raise the executor's time, or lower preempt_time",
        )
        handled = str(read_setting(task, "train", "exit_signal"))
        require(
            not self.enable_exit_handler or handled in ("None", "SIGTERM", "Signals.SIGTERM", str(int(signal.SIGTERM))),
            f"PreemptionPlugin sends SIGTERM, and train.exit_signal={handled} handles another signal",
            why="a SIGTERM without a handler kills the job at once",
            instead="Leave train.exit_signal out, or set the executor's signal yourself and leave out PreemptionPlugin",
        )


def time_limit_seconds(limit: object) -> int | None:
    """A Slurm time limit in seconds, or None for `UNLIMITED` and other text."""
    match = _LIMIT.fullmatch(limit) if isinstance(limit, str) else None
    if match is None:
        return None
    days, *parts = (None if part is None else int(part) for part in match.group("days", "first", "second", "third"))
    first, second, third = (part or 0 for part in parts)
    if days is not None:
        return 86400 * days + 3600 * first + 60 * second + third
    return 60 * first + second if match["third"] is None else 3600 * first + 60 * second + third
