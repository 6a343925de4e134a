"""The training loop: megatron-core's steps under tensor, pipeline and data parallelism, with evaluations between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic, perf_counter

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model

from bridge_profiling.capture import ProfilingHook, start_under_nsys
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.megatron_versions import tested_requirement, untested
from bridge_profiling.frameworks.parallel_layout import size_of
from bridge_profiling.monitor import Monitor
from recipes.config import ConfigContainer
from recipes.counts import iteration_work
from recipes.finalize import finalize
from recipes.megatron import checkpoint
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu
from recipes.megatron.data import Batch, build_data, check_data
from recipes.megatron.fault_tolerance import RankMonitor, check_installed, mark_finished
from recipes.megatron.layers import choose_transformer_impl, describe_layers
from recipes.megatron.loop_tools import Progress, early_exits, manual_gc, monitored
from recipes.megatron.setup import build_model, build_optimizer, distributed, parameters_gathered, rank_device
from recipes.releases import context_parallel_share


def pretrain(config: ConfigContainer, *, may_restart: bool = False) -> list[float]:
    """Train as the config says, on the ranks that the launcher's environment names.

    Args:
        config: a configuration, finalized or not; it is left as it is.
        may_restart: whether this process may start itself again, as a rank that nsys profiles does.

    Returns:
        The loss of every iteration, the mean over the global batch's tokens; empty on ranks outside the last pipeline
        stage.

    Raises:
        ProfilingConfigError: the configuration does not fit together, or does not fit this job. Nothing has started then.
    """
    started = monotonic()
    config, env = copy.deepcopy(config), LaunchEnv.read()
    device = rank_device(env)
    changed = adapt_to_cpu(config) if device.type == "cpu" else []
    choose_transformer_impl(config, device)
    finalize(config, env.world_size)
    if config.ft.enable_ft_package:
        config.profiling.disable_nsys()
    check_data(config)
    check_installed(config.ft)
    train, layout = config.train, config.layout(env.world_size)
    if may_restart:
        start_under_nsys(
            config.profiling, rank=env.rank, layout=layout, local_rank=env.device_index, cuda=device.type == "cuda"
        )
    with ExitStack() as stack:
        stack.enter_context(megatron_on_cpu())
        stack.enter_context(distributed(config, env))
        resumed = checkpoint.iteration_to_resume(config)
        if resumed is not None:
            # Data, learning rate, progress and the profiler's window all count from here.
            train.start_iteration = resumed
        heartbeats = stack.enter_context(RankMonitor(config.ft))
        if env.rank == 0:
            print("\n".join(_opening_lines(config, env, changed, heartbeats)), flush=True)
        progress = stack.enter_context(Progress(config))
        hook = stack.enter_context(
            ProfilingHook(
                config.profiling,
                rank=env.rank,
                world_size=env.world_size,
                layout=layout,
                work=iteration_work(config, env.world_size),
                train_iters=train.train_iters,
            )
        )
        monitor = stack.enter_context(monitored(config, env, hook))
        completed = train.start_iteration
        if completed < train.train_iters:
            loop = Loop(config, env, hook, progress, heartbeats, monitor)
            if resumed is not None:
                checkpoint.load(config, loop.state, resumed)
            with early_exits(train, device, started) as exit_reason:
                completed = loop.run(exit_reason)
    if completed >= train.train_iters:
        mark_finished(env.rank)
    return progress.losses


def _opening_lines(config: ConfigContainer, env: LaunchEnv, changed_for_cpu: list[str], monitor: RankMonitor) -> Iterator[str]:
    """The lines that a run prints before its first iteration."""
    layout, train, root = config.layout(env.world_size), config.train, config.checkpoint.load
    if (problem := untested(megatron.core.__version__)) is not None:
        yield f"warning: {problem}; if the training fails, type pip install {tested_requirement()}"
    if train.start_iteration >= train.train_iters:
        yield f"nothing is left to train: the checkpoint under {root} holds {train.start_iteration} iterations"
        return
    if root is not None:
        yield (
            f"resuming at iteration {train.start_iteration}, from the checkpoint under {root}"
            if train.start_iteration
            else f"no checkpoint under {root} yet: training starts from scratch"
        )
    yield (
        f"training iterations {train.start_iteration} to {train.train_iters - 1} on {env.world_size}"
        f" {rank_device(env).type} rank(s): tp={layout.tp} pp={layout.pp} dp={layout.dp},"
        f" {config.num_microbatches(env.world_size)} microbatches of {train.micro_batch_size} x"
        f" {config.model.seq_length} tokens, {str(config.model.params_dtype).removeprefix('torch.')}"
    )
    yield describe_layers(config.model)
    if changed_for_cpu:
        yield f"on CPU: {', '.join(changed_for_cpu)}"
    if watched := monitor.describe():
        yield watched


class Loop:
    """The state of one training: model, optimizer, schedule and data, and the steps over them.

    Args:
        config: a finalized configuration.
        env: this rank's place in the job.
        hook: an open profiling hook; opened before the model is built, so that memory histories hold the weights.
        progress: receives the losses.
        heartbeats: reports to the fault-tolerance launcher's monitor that this rank is alive.
        monitor: measures how long the loop waits for data, or None.
    """

    def __init__(
        self,
        config: ConfigContainer,
        env: LaunchEnv,
        hook: ProfilingHook,
        progress: Progress,
        heartbeats: RankMonitor,
        monitor: Monitor | None,
    ) -> None:
        self.config, self.device, self.hook, self.progress = config, rank_device(env), hook, progress
        self.heartbeats, self.monitor = heartbeats, monitor
        self.num_microbatches = config.num_microbatches(env.world_size)
        self.model = build_model(config, self.device)
        hook.facts |= {
            "name": "recipe",
            "batch_size": config.train.micro_batch_size,
            "global_batch_size": config.train.global_batch_size,
            "gradient_accumulation": self.num_microbatches,
            **size_of(one for module in self.model for one in module.parameters()),
        }
        self.optimizer, self.scheduler = build_optimizer(config, self.model)
        #: The part of this training that a checkpoint holds.
        self.state = checkpoint.TrainingState(self.model, self.optimizer, self.scheduler)
        self.data = build_data(config)
        self.forward_backward = get_forward_backward_func()

    def run(self, exit_reason: Callable[[], str | None]) -> int:
        """Every iteration from `train.start_iteration` to the last, or until there is a reason to stop.

        Args:
            exit_reason: yielded by `early_exits`.

        Returns:
            The number of iterations that are complete then.
        """
        train = self.config.train
        completed = train.start_iteration
        iterators = self._iterators(self._training_batches)
        with manual_gc(train) as collect_garbage:
            for iteration in range(train.start_iteration, train.train_iters):
                with self.hook.iteration(iteration):
                    started = perf_counter()
                    loss = self._step(iterators)
                    self.progress.iteration(iteration, loss, perf_counter() - started)
                    collect_garbage(iteration)
                self.heartbeats.send()
                if train.eval_interval is not None and (iteration + 1) % train.eval_interval == 0:
                    with self.hook.range("evaluation"):
                        self.progress.evaluation(iteration, self._evaluate())
                    self.heartbeats.send()
                completed = iteration + 1
                reason = exit_reason()
                self._save_if_due(completed, exiting=reason is not None)
                if reason is not None:
                    if torch.distributed.get_rank() == 0:
                        print(f"training stops after iteration {iteration}: {reason}", flush=True)
                    break
        return completed

    def _save_if_due(self, completed: int, *, exiting: bool) -> None:
        settings = self.config.checkpoint
        if settings.save is None:
            return
        regular = settings.save_interval is not None and completed % settings.save_interval == 0
        if exiting or regular or completed == self.config.train.train_iters:
            with self.hook.range("checkpoint"):
                checkpoint.save(self.config, self.state, completed)
            self.heartbeats.send()

    def _step(self, iterators: Sequence[Iterator[Batch] | None]) -> torch.Tensor | None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.hook.range("forward-backward"):
            reports = self._run_schedule(iterators, forward_only=False)
        with self.hook.range("optimizer"):
            updated, _, _ = self.optimizer.step()
            if updated:
                self.scheduler.step(1)
        return _mean_loss(reports)

    def _evaluate(self) -> torch.Tensor | None:
        for chunk in self.model:
            chunk.eval()
        iterators = self._iterators(self.data.evaluation_batches)
        reports = []
        # Outside a training step, nothing starts the overlapped gathers that the forward pass would wait for.
        with parameters_gathered(self.config, self.model), torch.no_grad():
            for _ in range(self.config.train.eval_iters):
                reports += self._run_schedule(iterators, forward_only=True)
        for chunk in self.model:
            chunk.train()
        return _mean_loss(reports)

    def _run_schedule(self, iterators: Sequence[Iterator[Batch] | None], *, forward_only: bool) -> list[torch.Tensor]:
        """Run all microbatches of one global batch; returns their (summed loss, tokens) on the last pipeline stage."""
        return self.forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=list(iterators) if len(iterators) > 1 else iterators[0],
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=self.num_microbatches,
            seq_length=self.config.model.seq_length,
            micro_batch_size=self.config.train.micro_batch_size,
            forward_only=forward_only,
        )

    def _training_batches(self) -> Iterator[Batch]:
        batches = self.data.train_batches(self.config.train.start_iteration)
        return batches if self.monitor is None else self.monitor.training.loading(batches)

    def _iterators(self, batches: Callable[[], Iterator[Batch]]) -> list[Iterator[Batch] | None]:
        """One iterator per model chunk; chunks in the middle of the pipeline need none, except for an attention mask."""
        everywhere = self.config.dataset.reset_attention_mask
        ends = [
            get_attr_wrapped_model(chunk, "pre_process") or get_attr_wrapped_model(chunk, "post_process")
            for chunk in self.model
        ]
        return [batches() if end or everywhere else None for end in ends]

    def _forward_step(self, batches: Iterator[Batch] | None, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        """Run one microbatch through one chunk; returns the output and the function that turns it into a loss."""
        batch: Batch = {}
        if batches is not None:
            with self.hook.range("data-loading"):
                batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in next(batches).items()}
                batch = context_parallel_share(batch)
        output = chunk(batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels"))
        return output, partial(_loss, batch.get("loss_mask"))


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss of a microbatch, its tokens, and both as a report."""
    mask = mask.float().view(-1)
    loss, tokens = (output.float().view(-1) * mask).sum(), mask.sum()
    return loss, tokens.int(), torch.stack([loss.detach(), tokens])


def _mean_loss(reports: list[torch.Tensor]) -> torch.Tensor | None:
    """The loss per token over all microbatches of all data-parallel ranks; None outside the last pipeline stage."""
    if not reports:
        return None
    total = torch.stack(reports).double().sum(dim=0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total[0] / total[1].clamp(min=1)
