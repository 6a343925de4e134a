"""Profiles Lightning's Trainer, from either of its two packages.

    trainer = Trainer(callbacks=[ProfilingCallback(use_pytorch_profiler=True, profile_step_start=10, profile_step_end=12)])

Phases come from the actions that Lightning announces to the Trainer's own profiler. That profiler stays in place and still
receives every announcement.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from bridge_profiling.common.errors import require
from bridge_profiling.frameworks.parallel_layout import size_of_model
from bridge_profiling.frameworks.phases import PhaseWatch
from bridge_profiling.frameworks.session import Job, OutputDir, Session, config_from, loader_facts, world_size
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import ProfilingConfig
from bridge_profiling.settings.window import TRAINER

#: Lightning's two packages: the same code under two names, each with its own `Callback`.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

#: Phases of the actions that Lightning announces to a Trainer's profiler, by the action's last word.
_PHASES = {
    "train_dataloader_next": "data-loading",
    "batch_to_device": "host-to-device",
    "training_step": "forward",
    "save_checkpoint": "checkpoint",
}


def _callback_classes() -> tuple[Any, ...]:
    """The `Callback` of each package that the program has imported, else of each installed package.

    A Trainer checks for its own package's class in some places.
    """
    imported = [name for name in _PACKAGES if name in sys.modules]
    found = []
    for name in imported or _PACKAGES:
        with suppress(ModuleNotFoundError):
            found.append(import_module(name).Callback)
    if not found:
        raise ImportError("neither lightning nor pytorch_lightning is installed. Type pip install lightning.")
    return tuple(found)


class ProfilingCallback(*_callback_classes()):  # type: ignore[misc]
    """A callback for `Trainer(callbacks=[…])` that captures a window of iterations of `fit`.

    An iteration is one optimizer step, so with `accumulate_grad_batches=4` it contains four batches. With manual optimization,
    where one batch may step any number of optimizers, it is one batch. Iterations are counted from 0 over the whole training,
    including a resume through `ckpt_path`.

    Args:
        output_dir: root of captures; overrides the settings' and BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: an invalid request, or an unknown setting.
    """

    def __init__(self, *, output_dir: OutputDir = None, **settings: Any) -> None:
        super().__init__()
        self._session = Session(config_from("ProfilingCallback", settings), output_dir)
        self._automatic = True

    # -- called by Lightning -----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the hook: the ranks are connected, and the model is not on its device yet."""
        if stage != "fit":
            return
        self._automatic = pl_module.automatic_optimization
        # With manual optimization `max_steps` counts steps of the optimizers, and an iteration is a batch. `fast_dev_run` sets
        # it to 1 for any script that is tried out.
        limited = self._automatic and not trainer.fast_dev_run and trainer.max_steps > 0
        train_iters = trainer.max_steps if limited else None
        _check(self._session.config, trainer, train_iters)
        job = self._session.guard(_describe, trainer, pl_module, train_iters)
        # On SIGTERM, Lightning itself finishes the batch, ends the training and calls `on_exception`.
        self._session.open(job, watch=partial(self._listen, trainer), exit_signal=None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loader is there, and the model's parameters are those that are trained."""
        self._session.describe(self._session.guard(size_of_model, pl_module))
        self._session.describe(loader_facts(trainer.train_dataloader))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch was fetched; the iteration begins, unless it began with the fetching."""
        self._begin_iteration(trainer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """A backward pass begins."""
        self._begin_phase("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward pass is over."""
        self._session.end_phase("backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are ready: clipping and the optimizer's own work follow."""
        self._begin_phase("optimizer")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over, and so is the iteration unless gradients are being accumulated."""
        accumulating = self._automatic and trainer.global_step == self._session.iteration
        if self._session.in_iteration and not accumulating:
            self._session.end_iteration()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation between two iterations; inside the window it is a range of its own."""
        if not trainer.sanity_checking:
            self._begin_phase("evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The validation is over."""
        self._session.end_phase("evaluation")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The training is complete, or was stopped."""
        self._session.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """An exception ended the training, possibly because of a signal or the keyboard."""
        self._session.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The last call, also for a `fit` that had nothing to train."""
        if stage == "fit":
            self._session.close()

    # -- iterations and phases ---------------------------------------------------------------------------------------

    def _begin_iteration(self, trainer: Any) -> None:
        """Begin the next iteration, unless one is open for accumulation."""
        if not self._session.in_iteration:
            # Both count complete iterations, including those before a resume.
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self._session.begin_iteration(trainer.global_step if self._automatic else progress.total.completed)

    def _begin_phase(self, phase: str) -> None:
        """Begin a phase. It interrupts an optimizer that recomputes its gradients in its step (LBFGS)."""
        self._session.end_phase("optimizer")
        self._session.begin_phase(phase)

    def _listen(self, trainer: Any, phases: PhaseWatch) -> None:
        """Receive announcements to the Trainer's profiler. Changes this object only, no class."""
        profiler = trainer.profiler
        start, stop = profiler.start, profiler.stop

        def started(action: str) -> None:
            start(action)
            word = action.rpartition(".")[2]
            # A search for a learning rate trains with other callbacks meanwhile; its iterations are not of this training.
            if word in _PHASES and self in trainer.callbacks:
                self._announced(word, trainer)

        def stopped(action: str) -> None:
            word = action.rpartition(".")[2]
            if word in _PHASES or word == "optimizer_step":
                phases.end(_PHASES.get(word, "optimizer"))
            stop(action)

        # Lightning's `Profiler.profile` and everything else looks them up on the object.
        phases.replace(profiler, "start", started)
        phases.replace(profiler, "stop", stopped)

    def _announced(self, word: str, trainer: Any) -> None:
        if word == "train_dataloader_next":
            self._begin_iteration(trainer)
        # A validation's batch; or manual optimization, where the training step is the whole iteration.
        validates = word == "batch_to_device" and not self._session.in_iteration
        if not validates and (word != "training_step" or self._automatic):
            self._begin_phase(_PHASES[word])


def _check(config: ProfilingConfig, trainer: Any, train_iters: int | None) -> None:
    """Check that this Trainer can be profiled, before it trains."""
    own = type(trainer.profiler)
    require(
        not (config.use_pytorch_profiler or config.use_nsys_profiler)
        or all(one.__name__ != "PyTorchProfiler" for one in own.__mro__),
        f"the Trainer runs {own.__name__}, and ProfilingCallback has a profiler too",
        why="both need CUPTI and the torch profiler, which serve one at a time",
        instead='Create the Trainer without profiler="pytorch", or without ProfilingCallback',
    )
    config.finalize(train_iters=train_iters, world_size=world_size(), spelled=TRAINER)


def _describe(trainer: Any, pl_module: Any, train_iters: int | None) -> Job:
    # A Trainer may be a subclass of the user's.
    package = next(one.__module__.partition(".")[0] for one in type(trainer).__mro__ if one.__module__.startswith(_PACKAGES))
    # Data-parallel except for tensor parallelism among neighbours.
    tensor_parallel = getattr(trainer.strategy, "_tensor_parallel_size", 1)
    layout = ParallelLayout(world_size=world_size(), tp=tensor_parallel if isinstance(tensor_parallel, int) else 1)
    facts = {
        "name": package,
        "version": sys.modules[package].__version__,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "gradient_accumulation": trainer.accumulate_grad_batches,
        "iteration": "optimizer step" if pl_module.automatic_optimization else "batch",
    }
    return Job(layout, facts, train_iters)
