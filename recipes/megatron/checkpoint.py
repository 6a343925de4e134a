"""Checkpoints by megatron-core's dist_checkpointing: all that a training needs to go on as if it had never stopped.

That is the model, the optimizer, the schedule's position, the random generators and the number of iterations, from which
the data's position follows. Settings (learning rate, weight decay, …) are the configuration's, never a checkpoint's. Every
rank takes part in saving and in loading; nothing here runs on a rank that has failed, since the others would wait for it.
"""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.overrides import format_override, format_value
from recipes.config import ConfigContainer
from recipes.megatron import checkpoint_files as files
from recipes.releases import find_groups_by_structure

#: How the distributed optimizer lays its state out: as its buckets hold it, so that nothing is gathered or copied. Of
#: megatron-core 0.16's layouts it is the only one that torch's own Adam resumes from to the bit.
_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}

#: Settings that a checkpoint and the training that resumes from it must share, because of the shapes of tensors, their
#: division among ranks, or the position in the data.
_SHARED = {
    "model": (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "vocab_size",
        "seq_length",
        "position_embedding_type",
        "share_embeddings_and_output_weights",
        "transformer_impl",
        "normalization",
        "qk_layernorm",
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_grouped_gemm",
        "bf16",
        "fp16",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ),
    "dist": ("use_tp_pp_dp_mapping",),
    "train": ("global_batch_size",),
    "optimizer": ("optimizer", "use_distributed_optimizer"),
    # The distributed optimizer's buckets depend on it.
    "ddp": ("overlap_grad_reduce",),
}


@dataclass(frozen=True)
class TrainingState:
    """What changes from iteration to iteration."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def iteration_to_resume(config: ConfigContainer) -> int | None:
    """The number of iterations that the newest checkpoint under `checkpoint.load` holds. All ranks get rank 0's answer.

    Args:
        config: a finalized configuration.

    Returns:
        None where there is no checkpoint yet, or none is asked for: training starts from scratch.

    Raises:
        ProfilingConfigError: on all ranks alike: the checkpoint is broken, some rank cannot see it, or the training that
            wrote it was another one.
    """
    root = config.checkpoint.load
    if root is None:
        return None
    answer: list[int | ProfilingConfigError | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            answer = [files.latest_iteration(root)]
        except ProfilingConfigError as error:
            answer = [error]
    torch.distributed.broadcast_object_list(answer, src=0)
    [iteration] = answer
    if isinstance(iteration, ProfilingConfigError):
        raise iteration
    if iteration is not None:
        _agree(lambda: _check_description(files.checkpoint_folder(root, iteration), config))
    return iteration


def _agree(step: Callable[[], None]) -> None:
    """Run `step()` on every rank; when it refuses on any, raise the first refusal on all, so that none waits for another."""
    refusal: ProfilingConfigError | None = None
    try:
        step()
    except ProfilingConfigError as error:
        refusal = error
    refusals: list[object] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(refusals, refusal)
    for other in refusals:
        if isinstance(other, ProfilingConfigError):
            raise other from refusal


def _description(config: ConfigContainer) -> dict[str, object]:
    """The settings of `_SHARED` by their full names, and the number of ranks."""
    values: dict[str, object] = {"world_size": torch.distributed.get_world_size()}
    for section, names in _SHARED.items():
        for name in names:
            values[f"{section}.{name}"] = getattr(getattr(config, section), name)
    return values


def _check_description(folder: Path, config: ConfigContainer) -> None:
    saved, own = files.read_description(folder).get("settings"), _description(config)
    if not isinstance(saved, dict):
        raise files.broken(folder, ValueError(f"{files.DESCRIPTION} holds no settings"))
    for name, value in own.items():
        # A setting that a newer version of this loop added is not in an older checkpoint.
        if saved.get(name, value) != value:
            written = format_override(name, saved[name])
            start = f"Start {saved[name]} ranks" if name == "world_size" else f"Type {written}"
            raise ProfilingConfigError(
                f"the checkpoint {folder} was written with {written}, and this run has {format_value(value)}",
                why="the shapes and the division of its tensors, or its position in the data, would not fit",
                instead=f"{start}, or name another checkpoint.load",
            )


def save(config: ConfigContainer, state: TrainingState, iteration: int) -> None:
    """Write a checkpoint under `checkpoint.save`. All ranks call it between two iterations, and return when it is whole.

    Args:
        config: the finalized configuration.
        state: what to save.
        iteration: number of iterations complete.

    Raises:
        OSError, megatron-core's CheckpointingException: it could not be written. The one before stays the newest.
    """
    root, started, first = config.checkpoint.save, perf_counter(), torch.distributed.get_rank() == 0
    assert root is not None
    if first:
        files.prepare(root, iteration)
    torch.distributed.barrier()
    strategy = FullyParallelSaveStrategyWrapper(
        # Replicas share the writing, instead of leaving it to the first of them.
        get_default_save_sharded_strategy("torch_dist"),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    with _parameters_whole(config, state.model), none_left_behind():
        dist_checkpointing.save(_sharded_state(state, is_loading=False), str(files.unfinished(root, iteration)), strategy)
    torch.distributed.barrier()
    if first:
        consumed = iteration * config.train.global_batch_size
        description = {"iteration": iteration, "consumed_samples": consumed, "settings": _description(config)}
        folder = files.publish(root, iteration, description)
        if config.checkpoint.most_recent_k is not None:
            files.keep_most_recent(root, config.checkpoint.most_recent_k)
        print(f"checkpoint of {iteration} iterations written in {perf_counter() - started:.1f} s: {folder}", flush=True)
    # No rank may end the job while the checkpoint has not got its name.
    torch.distributed.barrier()


@contextmanager
def none_left_behind() -> Iterator[None]:
    """End the processes that the block has started when it is broken off, by SIGTERM or by a data loader that lost a worker.

    megatron-core writes with processes of its own. One that it had no time to take note of would be waited for at this
    process's exit, for ever.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


def load(config: ConfigContainer, state: TrainingState, iteration: int) -> None:
    """Put `state` and the random generators where they were when the checkpoint of `iteration` was written.

    Args:
        config: the finalized configuration.
        state: a state just built, before any step; it is changed in place.
        iteration: what `iteration_to_resume` gave.

    Raises:
        ProfilingConfigError: the checkpoint is damaged, or not of this training after all.
    """
    root, started = config.checkpoint.load, perf_counter()
    assert root is not None
    folder = files.checkpoint_folder(root, iteration)
    _agree(lambda: _load(folder, state))
    if torch.distributed.get_rank() == 0:
        print(f"checkpoint of {iteration} iterations loaded in {perf_counter() - started:.1f} s: {folder}", flush=True)


def _load(folder: Path, state: TrainingState) -> None:
    own = [_hyperparameters(group) for group in state.optimizer.param_groups]
    try:
        with warnings.catch_warnings():
            # Of torch's functions that megatron-core calls, on every rank.
            warnings.simplefilter("ignore", FutureWarning)
            saved = dist_checkpointing.load(_sharded_state(state, is_loading=True), str(folder))
        for name, chunk in _named(state.model):
            chunk.module.load_state_dict(saved[name])
        find_groups_by_structure(state.optimizer.param_groups, saved["optimizer"])
        _load_optimizer(state.optimizer, saved["optimizer"])
        _set_random_states(saved["rng"])
        state.scheduler.num_steps = saved["scheduler_steps"]
    except (Exception, CheckpointException) as error:
        # megatron-core and torch have an exception of its own for each way in which a checkpoint is damaged or foreign, and
        # torch's, which says what happened on any rank, is no Exception.
        raise files.broken(folder, error) from error
    for group, settings in zip(state.optimizer.param_groups, own, strict=True):
        group.update(settings)
    # Learning rate and weight decay of that many steps.
    state.scheduler.step(0)


def _hyperparameters(group: dict[str, object]) -> dict[str, object]:
    """A parameter group's settings; what else is in it belongs to the optimizer's state."""
    return {name: value for name, value in group.items() if name not in ("params", "step")}


def _sharded_state(state: TrainingState, *, is_loading: bool) -> dict[str, object]:
    """Everything to save, or the same in the shape to load into."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for optimizer in _distributed_optimizers(state.optimizer):
        _begin_optimizer_state(optimizer)
    # megatron-core adds process groups to a dict that it is given, so each call gets its own.
    model = {name: chunk.module.sharded_state_dict(metadata=dict(_METADATA)) for name, chunk in _named(state.model)}
    return {
        **model,
        "optimizer": state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_METADATA)),
        "scheduler_steps": state.scheduler.num_steps,
        "rng": ShardedObject("rng", _random_states(), (ranks,), (rank,)),
    }


def _named(model: list[DistributedDataParallel]) -> Iterator[tuple[str, DistributedDataParallel]]:
    """The model's chunks under the names that Megatron gives them in checkpoints."""
    for index, chunk in enumerate(model):
        yield (f"model{index}" if len(model) > 1 else "model"), chunk


@contextmanager
def _parameters_whole(config: ConfigContainer, model: list[DistributedDataParallel]) -> Iterator[None]:
    """Gather parameters that would otherwise be gathered in the next forward pass."""
    overlapped = config.ddp.overlap_param_gather
    for chunk in model if overlapped else ():
        chunk.disable_forward_pre_hook()
    yield
    for chunk in model if overlapped else ():
        chunk.enable_forward_pre_hook()


def _distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in every if isinstance(one, DistributedOptimizer)]


def _begin_optimizer_state(optimizer: DistributedOptimizer) -> None:
    """Give parameters that no step has touched the state that the first step would: the sharded state needs all of it."""
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
        # megatron-core gives all parameters one and the same `step` tensor, which each of them would then count up, and
        # overwrites it with what it was before loading. The number saved is in the groups.
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
        # In place: CUDA graphs are bound to this very generator.
        generator.set_state(saved[name])
    if not generators:
        tracker.set_states(saved)
