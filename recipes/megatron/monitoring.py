"""The monitor beside a training, where the `monitor` section asks for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.config import resolve_output_dir
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.monitor import Monitor
from recipes.config import ConfigContainer
from recipes.megatron.setup import rank_device


def monitored(config: ConfigContainer, env: LaunchEnv, hook: ProfilingHook) -> AbstractContextManager[Monitor | None]:
    """A block in which this rank is monitored, as the config says; it gives None where nothing is asked for.

    Args:
        config: a finalized configuration.
        env: this rank's place in the job.
        hook: times the iterations.
    """
    wanted = config.monitor
    if not (wanted.jsonl or wanted.tensorboard or wanted.port is not None):
        return nullcontext()
    folder = resolve_output_dir(config.profiling) / "monitor"
    return Monitor(
        hook=hook,
        tokens_per_iteration=config.train.global_batch_size * config.model.seq_length,
        jsonl=folder / f"rank-{env.rank}.jsonl" if wanted.jsonl else None,
        port=wanted.port + env.device_index if wanted.port is not None else None,
        bind=wanted.bind,
        tensorboard=folder / "tensorboard" / f"rank-{env.rank}" if wanted.tensorboard else None,
        interval=wanted.interval,
        gpus=_own_gpu(rank_device(env)),
        rank=env.rank,
    )


def _own_gpu(device: torch.device) -> list[int | str] | None:
    """The rank's GPU by its UUID, since the driver numbers them in its own way."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"]
