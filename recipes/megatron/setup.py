"""Setup before the first iteration: process groups, seeds, the model, its optimizer and its schedule."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module, MegatronModule

from bridge_profiling.common.errors import require
from bridge_profiling.common.launch_env import LaunchEnv
from recipes.config import ConfigContainer
from recipes.megatron.layers import compile_layers, layer_spec


def rank_device(env: LaunchEnv) -> torch.device:
    """The GPU of the rank's local rank; the CPU where there are no GPUs."""
    return torch.device("cuda", env.device_index) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def distributed(config: ConfigContainer, env: LaunchEnv) -> Iterator[None]:
    """Open process groups and set seeds for the block. A default group that exists already is used, and kept.

    Args:
        config: a finalized configuration.
        env: this rank's place in the job.

    Raises:
        ProfilingConfigError: there are more local ranks than GPUs.
    """
    on_gpu = rank_device(env).type == "cuda"
    if on_gpu:
        _select_device(config, env)
    ours = not torch.distributed.is_initialized()
    if ours:
        _init_process_group(config, env)
    succeeded = False
    try:
        _initialize_model_parallel(config)
        _seed(config)
        yield
        succeeded = True
    finally:
        parallel_state.destroy_model_parallel()
        # Closing NCCL waits for peers, and after an error they may never arrive.
        if ours and (succeeded or not on_gpu):
            torch.distributed.destroy_process_group()


def _init_process_group(config: ConfigContainer, env: LaunchEnv) -> None:
    device = rank_device(env)
    options: dict = {"timeout": timedelta(minutes=config.dist.distributed_timeout_minutes)}
    options |= {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    if env.world_size == 1:
        # A single rank needs no address or port.
        options |= {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    elif env.launcher != "torchrun" and env.rendezvous is not None:
        # torchrun sets the variables that torch reads; srun and mpirun do not.
        host, port = env.rendezvous
        options |= {"init_method": f"tcp://{host}:{port}", "rank": env.rank, "world_size": env.world_size}
    torch.distributed.init_process_group(**options)


def _select_device(config: ConfigContainer, env: LaunchEnv) -> None:
    count = torch.cuda.device_count()
    require(
        env.device_index < count,
        f"local rank {env.device_index} has no GPU",
        why=f"this machine has {count}",
        instead=f"Start at most {count} ranks on it",
    )
    # Variables that CUDA and its profiler read when they start, unless the user has set them. With one hardware queue,
    # communication starts in the order in which it was launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.model.cuda_graph_impl != "none":
        # A profiler that tears CUPTI down at the end of its window breaks the captured graphs.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
    torch.cuda.set_device(rank_device(env))


def _initialize_model_parallel(config: ConfigContainer) -> None:
    model = config.model
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        hierarchical_context_parallel_sizes=model.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=model.expert_model_parallel_size,
        expert_tensor_parallel_size=model.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.dist.distributed_timeout_minutes,
    )


def _seed(config: ConfigContainer) -> None:
    # Each pipeline stage has its own seed; otherwise their layers would start with equal weights.
    seed = config.rng.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    graphs = config.model.cuda_graph_impl != "none"
    model_parallel_cuda_manual_seed(
        seed,
        # During graph capture, Transformer Engine's attention accepts no other tracker.
        te_rng_tracker=graphs and config.model.transformer_impl == "transformer_engine",
        # megatron-core's training tracker reads CUDA's generators; the inference one does not.
        inference_rng_tracker=not torch.cuda.is_available(),
        use_cudagraphable_rng=graphs,
        # An earlier training of this process may have had another tracker.
        force_reset_rng=True,
    )


def build_model(config: ConfigContainer, device: torch.device) -> list[DistributedDataParallel]:
    """This rank's part of the model under Megatron's DDP: one chunk, or one per virtual pipeline stage."""
    virtual = config.model.virtual_pipeline_model_parallel_size
    chunks = []
    for index, stage in enumerate(range(virtual) if virtual else [None]):
        module: MegatronModule = build_chunk(config, stage).to(device)
        if config.model.torch_compile:
            compile_layers(module.decoder.layers)
        if config.model.bf16 or config.model.fp16:
            module = Float16Module(config.model, module)
        # Only the first chunk's buckets overlap with its own backward; the others overlap with the chunks before them.
        chunk = DistributedDataParallel(config.model, config.ddp, module, disable_bucketing=index > 0)
        chunk.broadcast_params()
        chunks.append(chunk)
    return chunks


def build_chunk(config: ConfigContainer, stage: int | None) -> GPTModel:
    """One chunk of this rank's part of the model, bare; `stage` is its virtual pipeline stage, or None without one."""
    model = config.model
    return GPTModel(
        config=model,
        transformer_layer_spec=layer_spec(model, stage),
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        vp_stage=stage,
    )


def build_optimizer(
    config: ConfigContainer, model: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer and its schedule at `train.start_iteration`; also connects them to the model's config."""
    optimizer = get_megatron_optimizer(config.optimizer, model)
    settings = config.scheduler
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=config.optimizer.weight_decay,
        end_wd=config.optimizer.weight_decay,
        wd_incr_steps=settings.lr_decay_iters,
        wd_incr_style="constant",
    )
    scheduler.step(config.train.start_iteration)
    _connect(config, model, optimizer)
    return optimizer, scheduler


def _connect(config: ConfigContainer, model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Set the functions that the pipeline schedules call around a step."""
    config.model.grad_scale_func = optimizer.scale_loss
    config.model.finalize_model_grads_func = finalize_model_grads
    hooks: dict[str, list] = {}
    if config.ddp.overlap_grad_reduce:
        hooks["no_sync_func"] = [chunk.no_sync for chunk in model]
        hooks["grad_sync_func"] = [chunk.start_grad_sync for chunk in model]
    if config.ddp.overlap_param_gather and config.ddp.align_param_gather:
        hooks["param_sync_func"] = [chunk.start_param_sync for chunk in model]
    for name, functions in hooks.items():
        setattr(config.model, name, functions if len(functions) > 1 else functions[0])


@contextmanager
def parameters_gathered(config: ConfigContainer, model: list[DistributedDataParallel]) -> Iterator[None]:
    """Gather parameters now that `ddp.overlap_param_gather` would gather in the next forward pass of a step."""
    overlapped = config.ddp.overlap_param_gather
    for chunk in model if overlapped else ():
        chunk.disable_forward_pre_hook()
    yield
    for chunk in model if overlapped else ():
        chunk.enable_forward_pre_hook()
