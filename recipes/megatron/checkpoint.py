"""Checkpoints by megatron-core's dist_checkpointing: a training resumes from one as if it had never stopped.

    <save>/iter_0000010/    the state after 10 iterations; `training.json` describes the training

A checkpoint holds the model, the optimizer, the schedule's position, the random generators and the number of iterations,
which determines the data's position. Settings (learning rate, weight decay, …) always come from the configuration. Every
rank takes part in saving and loading; nothing here runs on a rank that has failed, since the others would wait for it.

It is written into a hidden folder, which is renamed when every rank is done. So whenever the job is killed, a folder named
`iter_…` is complete, and a training resumes from the newest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from bridge_profiling.common.atomic import write_json
from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.settings.overrides import format_override, format_value
from recipes.config import ConfigContainer
from recipes.megatron.setup import parameters_gathered
from recipes.releases import find_groups_by_structure

#: Layout of the distributed optimizer's state: as its buckets hold it, so nothing is gathered or copied.
_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}

#: The settings of the training that wrote a checkpoint.
DESCRIPTION = "training.json"

#: Settings that must not change at a resume, and whose change megatron-core would not notice as it loads: the division of
#: tensors among ranks, their precision, and the position in the data.
_FIXED = (
    "model.seq_length",
    "model.bf16",
    "model.fp16",
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "model.expert_tensor_parallel_size",
    "train.global_batch_size",
    "optimizer.use_distributed_optimizer",
    # The distributed optimizer's buckets depend on it.
    "ddp.overlap_grad_reduce",
)


@dataclass(frozen=True)
class TrainingState:
    """The parts of a training that change in each iteration."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    """The folder of the checkpoint made when `iteration` iterations were complete."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """The number of iterations in the newest checkpoint under `root`, or None if it holds none yet.

    Raises:
        ProfilingConfigError: the directory cannot be read.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProfilingConfigError(
            f"checkpoint.load={root} cannot be read", why=str(error), instead="Name a directory of checkpoints"
        ) from None
    return max((int(name[5:]) for name in names if re.fullmatch(r"iter_\d+", name)), default=None)


def iteration_to_resume(config: ConfigContainer) -> int | None:
    """The number of iterations in the newest checkpoint under `checkpoint.load`. All ranks get rank 0's answer.

    Args:
        config: a finalized configuration.

    Returns:
        None if `checkpoint.load` is unset or holds no checkpoint yet: training starts from scratch.

    Raises:
        ProfilingConfigError: on all ranks: the checkpoint is broken, some rank cannot see it, or another training wrote
            it.
    """
    root = config.checkpoint.load
    if root is None:
        return None
    # Only rank 0 looks, so that all ranks get the same answer.
    iteration = _agree(lambda: latest_iteration(root) if torch.distributed.get_rank() == 0 else None)[0]
    if iteration is not None:
        _agree(lambda: _check_description(checkpoint_folder(root, iteration), config))
    return iteration


def _agree(step: Callable[[], object]) -> list[Any]:
    """Run `step()` on every rank; returns all results. If any rank refuses, all raise its error, so that none waits."""
    result, refusal = None, None
    try:
        result = step()
    except ProfilingConfigError as error:
        refusal = error
    results: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, refusal or result)
    for other in results:
        if isinstance(other, ProfilingConfigError):
            raise other from refusal
    return results


def _description(config: ConfigContainer) -> dict[str, object]:
    """The number of ranks, and the settings of the sections that shape a training's state: numbers and text, by full names."""
    sections = {name: vars(getattr(config, name)) for name in ("model", "train", "optimizer", "ddp")}
    settings = {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}
    plain = {name: value for name, value in settings.items() if isinstance(value, int | float | str | None)}
    return {"world_size": torch.distributed.get_world_size()} | plain


def _read_description(folder: Path) -> dict[str, object]:
    try:
        return json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(folder, error) from None


def _check_description(folder: Path, config: ConfigContainer) -> None:
    saved, now = _read_description(folder), _description(config)
    for name in ("world_size", *_FIXED):
        # A checkpoint of another release of this loop or of megatron-core may lack it.
        before = saved.get(name, now[name])
        written = format_override(name, before)
        fix = f"Start {before} ranks" if name == "world_size" else f"Type {written}"
        require(
            before == now[name],
            f"the checkpoint {folder} was written with {written}, and this run has {format_value(now[name])}",
            why="the division of its tensors among ranks, or its position in the data, would not fit",
            instead=f"{fix}, or name another checkpoint.load",
        )


def _check_model(folder: Path, config: ConfigContainer, state: TrainingState) -> None:
    """Refuse another model's checkpoint: megatron-core would leave out parameters that only the checkpoint has."""
    saved, now = _read_description(folder), _description(config)
    parameters = _parameters(state)
    differing = [
        format_override(name, value)
        for name, value in saved.items()
        if name.startswith("model.") and now.get(name, value) != value
    ]
    require(
        torch.distributed.get_rank() or saved.get("parameters", parameters) == parameters,
        f"the checkpoint {folder} holds {saved.get('parameters')} parameters of rank 0, and this model has {parameters}",
        why="it was written with other settings of the model",
        instead=f"Type {' '.join(differing)}, or name another checkpoint.load",
    )


def _parameters(state: TrainingState) -> int:
    return sum(parameter.numel() for chunk in state.model for parameter in chunk.parameters())


def _broken(folder: Path, error: BaseException) -> ProfilingConfigError:
    """The error for a checkpoint that cannot be loaded."""
    # The last line says what happened; the lines before it are a traceback in torch.
    reason = str(error).strip().rpartition("\n")[2][:400]
    return ProfilingConfigError(
        f"the checkpoint {folder} cannot be loaded",
        why=f"{type(error).__name__}: {reason}",
        instead=f"Delete {folder} to resume from an older checkpoint, or name another checkpoint.load",
    )


def save(config: ConfigContainer, state: TrainingState, iteration: int) -> None:
    """Write a checkpoint under `checkpoint.save`. All ranks call it between two iterations, and return when it is complete.

    Args:
        config: the finalized configuration.
        state: what to save.
        iteration: number of iterations complete.

    Raises:
        OSError, megatron-core's CheckpointingException: it could not be written. The previous one stays the newest.
    """
    root, started, first = config.checkpoint.save, perf_counter(), torch.distributed.get_rank() == 0
    assert root is not None
    folder = checkpoint_folder(root, iteration)
    unfinished = folder.with_name(f".{folder.name}.incomplete")
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    with parameters_gathered(config, state.model), none_left_behind():
        dist_checkpointing.save(_sharded_state(state, is_loading=False), str(unfinished))
    torch.distributed.barrier()
    if first:
        write_json(unfinished / DESCRIPTION, _description(config) | {"parameters": _parameters(state)})
        _publish(unfinished, folder)
        print(f"checkpoint of {iteration} iterations written in {perf_counter() - started:.1f} s: {folder}", flush=True)
    # No rank may end the job before the checkpoint has its final name.
    torch.distributed.barrier()


def _publish(unfinished: Path, folder: Path) -> None:
    """Give a checkpoint its name. One of the same iteration is replaced: its half-deleted rest must not have that name."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.deleted")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    unfinished.rename(folder)


@contextmanager
def none_left_behind() -> Iterator[None]:
    """Terminate the processes that the block has started if it raises (SIGTERM, a data loader that lost a worker).

    megatron-core writes in processes of its own. At exit, Python would wait forever for one that megatron-core has not
    recorded yet.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


def load(config: ConfigContainer, state: TrainingState, iteration: int) -> None:
    """Restore `state` and the random generators from the checkpoint of `iteration`.

    Args:
        config: the finalized configuration.
        state: a newly built state, before any step; changed in place.
        iteration: returned by `iteration_to_resume`.

    Raises:
        ProfilingConfigError: the checkpoint is damaged, or belongs to another training.
    """
    root, started = config.checkpoint.load, perf_counter()
    assert root is not None
    folder = checkpoint_folder(root, iteration)
    _agree(lambda: _check_model(folder, config, state))
    _agree(lambda: _load(folder, state))
    if torch.distributed.get_rank() == 0:
        print(f"checkpoint of {iteration} iterations loaded in {perf_counter() - started:.1f} s: {folder}", flush=True)


def _load(folder: Path, state: TrainingState) -> None:
    # Entries other than settings belong to the optimizer's state.
    own = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in state.optimizer.param_groups
    ]
    try:
        with warnings.catch_warnings():
            # From torch functions that megatron-core calls, on every rank.
            warnings.simplefilter("ignore", FutureWarning)
            saved = dist_checkpointing.load(_sharded_state(state, is_loading=True), str(folder))
        for name, chunk in _named(state.model):
            chunk.module.load_state_dict(saved[name])
        find_groups_by_structure(state.optimizer.param_groups, saved["optimizer"])
        _load_optimizer(state.optimizer, saved["optimizer"])
        _set_random_states(saved["rng"])
        state.scheduler.num_steps = saved["scheduler_steps"]
    except (Exception, CheckpointException) as error:
        # megatron-core and torch raise many types for damaged or foreign checkpoints, and torch's CheckpointException, which
        # reports errors of all ranks, does not derive from Exception.
        raise _broken(folder, error) from error
    for group, settings in zip(state.optimizer.param_groups, own, strict=True):
        group.update(settings)
    # Sets the learning rate and weight decay of that many steps.
    state.scheduler.step(0)


def _sharded_state(state: TrainingState, *, is_loading: bool) -> dict[str, object]:
    """Everything to save, or the same structure to load into."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for optimizer in _distributed_optimizers(state.optimizer):
        _begin_optimizer_state(optimizer)
    # megatron-core adds process groups to the dict it receives, so each call gets its own.
    model = {name: chunk.module.sharded_state_dict(metadata=dict(_METADATA)) for name, chunk in _named(state.model)}
    return {
        **model,
        "optimizer": state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_METADATA)),
        "scheduler_steps": state.scheduler.num_steps,
        "rng": ShardedObject("rng", _random_states(), (ranks,), (rank,)),
    }


def _named(model: list[DistributedDataParallel]) -> Iterator[tuple[str, DistributedDataParallel]]:
    """The model's chunks with the names that Megatron gives them in checkpoints."""
    for index, chunk in enumerate(model):
        yield (f"model{index}" if len(model) > 1 else "model"), chunk


def _distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in every if isinstance(one, DistributedOptimizer)]


def _begin_optimizer_state(optimizer: DistributedOptimizer) -> None:
    """Create the state of parameters before their first step: the sharded state needs all of it."""
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        for moments in inner.state.values():
            moments.setdefault("step", torch.tensor(0.0))


@torch.no_grad()
def _load_optimizer(optimizer: MegatronOptimizer, saved: dict[str, object]) -> None:
    optimizer.load_state_dict(saved)
    for distributed in _distributed_optimizers(optimizer):
        inner = distributed.optimizer
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            continue
        # megatron-core gives all parameters the same `step` tensor, which each of them would then increment, and overwrites
        # it with its value before loading. The saved number is in the groups.
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter]["step"] = torch.tensor(float(group["step"]))


def _random_states() -> dict[str, object]:
    tracked = get_cuda_rng_tracker().get_states()
    states: dict[str, object] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        # With CUDA graphs the tracker holds generators instead of states.
        "tracked": {name: one.get_state() if isinstance(one, torch.Generator) else one for name, one in tracked.items()},
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, object]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracker, saved = get_cuda_rng_tracker(), states["tracked"]
    generators = {name: one for name, one in tracker.get_states().items() if isinstance(one, torch.Generator)}
    for name, generator in generators.items():
        # In place: CUDA graphs are bound to this generator object.
        generator.set_state(saved[name])
    if not generators:
        tracker.set_states(saved)
