"""PreemptionPlugin: have Slurm send SIGTERM some time before the job's limit, and the training end in order on it.

Edits the executor's signal and the task's `train` section; leaves the launcher as it is, and never sends a signal itself.
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

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins.task import (
    Task,
    append_arguments,
    check_converter,
    check_task,
    convert,
    has_field,
    read,
    read_integer,
    write,
)

logger = logging.getLogger(__name__)

#: Seconds that torchrun leaves its ranks between the signal and the kill; older ones do not read it.
TORCHRUN_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

#: The most seconds that `sbatch --signal` takes.
_LONGEST = 65535

#: Slurm's forms of a time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass
class PreemptionPluginScriptArgs:
    """What a `script_args_converter_fn` of PreemptionPlugin is given."""

    enable_exit_handler: bool
    enable_exit_handler_for_data_loader: bool


@dataclass(kw_only=True)
class PreemptionPlugin(run.Plugin):
    """End a job in order before its time limit kills it: the capture is written, and a checkpoint.

    Args:
        preempt_time: seconds before the time limit at which Slurm sends SIGTERM; Slurm may send it up to a minute earlier.
        enable_exit_handler: have the training finish its iteration, save and leave on the signal. Without it the task is
            left as it is, and the signal ends the process.
        enable_exit_handler_for_data_loader: keep the data loader's processes alive when the signal reaches them too.
        script_args_converter_fn: makes a run.Script's arguments, in place of the overrides.
    """

    preempt_time: int = 60
    enable_exit_handler: bool = True
    enable_exit_handler_for_data_loader: bool = False
    script_args_converter_fn: Optional[Callable[[PreemptionPluginScriptArgs], list[str]]] = None  # noqa: UP045

    def setup(self, task: Task, executor: Any) -> None:
        """Edit the executor and the task. A second call changes nothing.

        Raises:
            ProfilingConfigError: a request that cannot work. Nothing is changed then.
        """
        self._check(task, executor)
        script_args = PreemptionPluginScriptArgs(self.enable_exit_handler, self.enable_exit_handler_for_data_loader)
        arguments = None
        if self.enable_exit_handler and isinstance(task, run.Script) and self.script_args_converter_fn is not None:
            arguments = convert(self.script_args_converter_fn, script_args)

        if arguments is not None:
            append_arguments(task, arguments)
        elif self.enable_exit_handler:
            write(task, "train", self._settings(task))
        self._set_signal(executor)
        workers = read_integer(task, "dataset", "num_workers")
        if workers and self.enable_exit_handler and not self.enable_exit_handler_for_data_loader:
            logger.warning(
                "PreemptionPlugin: dataset.num_workers=%d, and the signal reaches these processes too; they die of it, and with"
                " them the training before its checkpoint. Pass enable_exit_handler_for_data_loader=True.",
                workers,
            )

    def _settings(self, task: Task) -> dict[str, object]:
        settings: dict[str, object] = {"exit_signal_handler": True}
        # A config of the user's own may have no such field, and needs none where it is off.
        if self.enable_exit_handler_for_data_loader or has_field(task, "train", "exit_signal_handler_for_dataloader"):
            settings["exit_signal_handler_for_dataloader"] = self.enable_exit_handler_for_data_loader
        return settings

    def _set_signal(self, executor: Any) -> None:
        if not isinstance(executor, run.SlurmExecutor):
            logger.warning(
                "PreemptionPlugin: nothing sends a signal %d seconds before the end of this job, since %s knows no time limit;"
                " only Slurm does. A SIGTERM from elsewhere is handled all the same.",
                self.preempt_time,
                type(executor).__name__,
            )
            return
        asked = f"TERM@{self.preempt_time}"
        if executor.signal not in (None, asked):
            logger.warning("PreemptionPlugin replaces the executor's signal=%r by %r", executor.signal, asked)
        executor.signal = asked
        # torchrun passes the signal on to its ranks, and kills them after 30 s of its own if it is not told otherwise.
        executor.env_vars.setdefault(TORCHRUN_GRACE_VARIABLE, str(self.preempt_time))

    def _check(self, task: Task, executor: Any) -> None:
        check_task(task, "PreemptionPlugin", {"train": self._needed_fields()})
        check_converter(self.script_args_converter_fn)
        time, example = self.preempt_time, "Type for example preempt_time=60"
        if isinstance(time, bool) or not isinstance(time, int) or not 1 <= time <= _LONGEST:
            raise ProfilingConfigError(
                f"PreemptionPlugin(preempt_time={time!r}) is not a whole number of seconds from 1 to {_LONGEST}",
                why="Slurm sends the signal so many seconds before the time limit",
                instead=example,
            )
        limit = time_limit_seconds(executor.time) if isinstance(executor, run.SlurmExecutor) else None
        if limit is not None and time >= limit:
            raise ProfilingConfigError(
                f"PreemptionPlugin(preempt_time={time}) is no less than the job's time limit of {limit} seconds",
                why="the signal would end the job as soon as it starts",
                instead="Raise the executor's time, or lower preempt_time",
            )
        handled = read(task, "train", "exit_signal")
        if self.enable_exit_handler and handled is not None and not _is_sigterm(handled):
            raise ProfilingConfigError(
                f"PreemptionPlugin sends SIGTERM, and train.exit_signal={handled} handles another signal",
                why="a SIGTERM that nothing handles kills the job at once",
                instead="Leave train.exit_signal out, or set the executor's signal yourself and leave out PreemptionPlugin",
            )

    def _needed_fields(self) -> tuple[str, ...]:
        if not self.enable_exit_handler:
            return ()
        other = ("exit_signal_handler_for_dataloader",) if self.enable_exit_handler_for_data_loader else ()
        return ("exit_signal_handler", *other)


def time_limit_seconds(limit: object) -> int | None:
    """A Slurm time limit in seconds, or None where it is not known (`UNLIMITED`, a form of another kind)."""
    match = _LIMIT.fullmatch(limit) if isinstance(limit, str) else None
    if match is None:
        return None
    days, first, second, third = (int(part) if part else None for part in match.group("days", "first", "second", "third"))
    if days is not None:
        return 86400 * days + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    if third is not None:
        return 3600 * (first or 0) + 60 * (second or 0) + third
    return 60 * (first or 0) + (second or 0)


def _is_sigterm(value: object) -> bool:
    """Whether a setting means SIGTERM: `SIGTERM`, 15 or the signal itself."""
    return str(value).strip("'\"") in ("SIGTERM", "Signals.SIGTERM", str(int(signal.SIGTERM)))
