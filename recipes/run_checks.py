"""What `checkpoint`, `monitor` and the exits of `train` must satisfy, each refusal with the mend in it. Changes nothing."""

from __future__ import annotations

import importlib.util

from bridge_profiling.errors import ProfilingConfigError
from recipes.config import ConfigContainer, MonitorConfig, TrainConfig


def check_exits(train: TrainConfig) -> None:
    """Refuse exits that would come before the first iteration."""
    for name, counts in (("exit_interval", "iterations"), ("exit_duration_in_mins", "minutes")):
        value = getattr(train, name)
        if value is not None and value <= 0:
            raise ProfilingConfigError(
                f"train.{name}={value} is too small",
                why=f"it counts the {counts} after which the training stops",
                instead=f"Type train.{name}=null to train to the end",
            )


def check_monitor(monitor: MonitorConfig) -> None:
    """Refuse a monitor that could not sample or serve, also for want of a package."""
    if monitor.interval is not None and not monitor.interval > 0:
        raise ProfilingConfigError(
            f"monitor.interval={monitor.interval} is no time between two samples", instead="Type monitor.interval=null"
        )
    if monitor.port is not None and not 0 < monitor.port < 65536:
        raise ProfilingConfigError(
            f"monitor.port={monitor.port} is no port", instead="Type monitor.port=9400, or monitor.port=null to serve nothing"
        )
    needed = (("port", monitor.port is not None, "prometheus_client"), ("tensorboard", monitor.tensorboard, "tensorboard"))
    for field, asked, package in needed:
        if asked and importlib.util.find_spec(package) is None:
            raise ProfilingConfigError(
                f"monitor.{field} needs {package}, which is not installed", instead=f"Install it: pip install {package}"
            )


def check_checkpoint(config: ConfigContainer) -> None:
    """Refuse settings of checkpoints that contradict each other, or that would fail only when one is written."""
    checkpoint, start = config.checkpoint, config.train.start_iteration
    for name in ("save_interval", "most_recent_k"):
        value = getattr(checkpoint, name)
        if value is None:
            continue
        if value < 1:
            raise ProfilingConfigError(f"checkpoint.{name}={value} is too small", instead=f"Type checkpoint.{name}=null")
        if checkpoint.save is None:
            raise ProfilingConfigError(
                f"checkpoint.{name}={value} without checkpoint.save",
                why="no checkpoint is written",
                instead="Type checkpoint.save=DIRECTORY as well",
            )
    if checkpoint.load is not None and start > 0:
        raise ProfilingConfigError(
            f"train.start_iteration={start} beside checkpoint.load={checkpoint.load}",
            why="where to start is what the checkpoint says",
            instead="Type train.start_iteration=0, or checkpoint.load=null to start there with new weights",
        )
    if checkpoint.save is None and checkpoint.load is None:
        return
    if config.optimizer.optimizer != "adam":
        raise ProfilingConfigError(
            f"checkpoints with optimizer.optimizer={config.optimizer.optimizer}",
            why="megatron-core can put back the state of adam only",
            instead="Type optimizer.optimizer=adam, or checkpoint.save=null checkpoint.load=null",
        )
    if importlib.util.find_spec("psutil") is None:
        raise ProfilingConfigError(
            "checkpoints need psutil, which is not installed",
            why="megatron-core's writers would wait for ever without it",
            instead="Install it: pip install psutil",
        )
