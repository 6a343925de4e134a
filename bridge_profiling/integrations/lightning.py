"""Runs the profiling hook in Lightning's Trainer, whichever of its two packages is installed.

    trainer = Trainer(callbacks=[ProfilingCallback(use_pytorch_profiler=True, profile_step_start=10, profile_step_end=12)])

Phases come from the actions that Lightning announces to the Trainer's own profiler, whatever that is: it stays in place and
is told of everything as before.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, nullcontext, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.integrations.callback_hook import CallbackHook, config_from, world_size
from bridge_profiling.integrations.communication_ranges import Undo, replace
from bridge_profiling.integrations.max_steps import check_max_steps
from bridge_profiling.integrations.torch_phases import PhaseWatch
from bridge_profiling.layout import ParallelLayout

#: Lightning's two packages: the same code under two names, each with a `Callback` of its own.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

#: Actions that Lightning announces to a Trainer's profiler, by their last word, and the phases that they are.
_PHASES = {
    "train_dataloader_next": "data-loading",
    "batch_to_device": "host-to-device",
    "training_step": "forward",
    "save_checkpoint": "checkpoint",
}

#: Where no hook is open.
_NONE = PhaseWatch(nullcontext)


def _callback_classes() -> tuple[Any, ...]:
    """The `Callback` of each package that the program has imported; where it has none yet, of each that is installed."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    found = []
    for name in imported or _PACKAGES:
        with suppress(ModuleNotFoundError):
            found.append(import_module(name).Callback)
    if not found:
        raise ImportError("neither lightning nor pytorch_lightning is installed: pip install 'bridge-profiling[lightning]'")
    return tuple(found)


if TYPE_CHECKING:
    from lightning.pytorch import Callback

    _CALLBACKS = (Callback,)
else:
    # A Trainer asks for its own package's class here and there.
    _CALLBACKS = _callback_classes()


class ProfilingCallback(*_CALLBACKS):  # type: ignore[misc]
    """A callback for `Trainer(callbacks=[…])` that captures a window of iterations of `fit`.

    An iteration is one optimizer step, so with `accumulate_grad_batches=4` it holds four batches. With manual optimization,
    where one batch may step any number of optimizers, it is one batch. Iterations are counted from 0 over the whole
    training, a resume through `ckpt_path` included.

    Args:
        output_dir: root of what is written; wins over the settings' and over BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: a request that cannot work, or a setting that does not exist.
    """

    def __init__(self, *, output_dir: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__()
        self._config = config_from("ProfilingCallback", settings)
        self._hook = CallbackHook(self._config, output_dir)
        self._phases = _NONE
        self._unlisten: Undo = _nothing
        self._automatic = True
        self._iteration: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # As the hook's copy, which captures nothing yet.
        return vars(self) | {"_phases": _NONE, "_unlisten": _nothing, "_iteration": None}

    # -- what Lightning calls ----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the hook: the ranks are connected, and the model is not on its device yet.

        Raises:
            ProfilingConfigError: the Trainer runs a profiler of its own that cannot run beside ours, or ends before the window.
        """
        if stage != "fit":
            return
        iterations = _max_steps(trainer, pl_module)
        _check(self._config, trainer, iterations)
        self._leave(RuntimeError("the training was started anew in the same process"))
        # Lightning ends a training by SIGTERM itself: it finishes the batch, and tells `on_exception`.
        self._hook.open(_layout(trainer), exit_signal=None, train_iters=iterations)
        if self._hook.hook is None:
            return
        self._hook.hook.facts.update(_facts(trainer, pl_module))
        self._automatic = pl_module.automatic_optimization
        self._phases = PhaseWatch(self._hook.phase)
        self._listen(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch was fetched; the iteration begins here where its fetching was not announced."""
        self._begin_iteration(trainer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """A backward pass begins."""
        self._begin("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward pass is over."""
        self._phases.end("backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are ready: what follows is clipping them, and the optimizer's own work."""
        self._begin("optimizer")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over, and with it the iteration unless gradients are being accumulated."""
        if self._iteration is None or (self._automatic and trainer.global_step == self._iteration):
            return
        self._iteration = None
        self._phases.end_open()
        self._hook.end_iteration()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation between two iterations; inside the window it is a range of its own."""
        if not trainer.sanity_checking:
            self._begin("evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The validation is over."""
        self._phases.end("evaluation")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training reached its end, or was told to stop."""
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training was ended by an exception: a signal or the keyboard may be behind it."""
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The last call, also of a `fit` that had nothing to train."""
        if stage == "fit":
            self._leave(None)

    # -- iterations and phases ---------------------------------------------------------------------------------------

    def _begin_iteration(self, trainer: Any) -> None:
        """The next iteration begins, unless one is open: its batches are being accumulated."""
        if self._hook.hook is None or self._iteration is not None:
            return
        # Both count what is complete, that before a resume included.
        self._iteration = trainer.global_step if self._automatic else trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self._hook.begin_iteration(self._iteration)

    def _begin(self, phase: str) -> None:
        """A phase begins. An optimizer that computes its gradients anew in its step (LBFGS) is interrupted by that."""
        self._phases.end("optimizer")
        self._phases.begin(phase)

    def _listen(self, trainer: Any) -> None:
        """Hear what is announced to the Trainer's profiler, until `_leave`. Only this object is changed, no class."""
        profiler = trainer.profiler
        start, stop = profiler.start, profiler.stop

        def started(action: str) -> None:
            start(action)
            word = action.rpartition(".")[2]
            # A search for a learning rate trains with other callbacks in between: those are no iterations of this training.
            if word in _PHASES and self in trainer.callbacks:
                self._announced(word, trainer)

        def stopped(action: str) -> None:
            word = action.rpartition(".")[2]
            if word in _PHASES:
                self._phases.end(_PHASES[word])
            elif word == "optimizer_step":
                self._phases.end("optimizer")
            stop(action)

        # Lightning's `Profiler.profile` and everything else looks them up on the object.
        undo = ExitStack()
        undo.callback(replace(profiler, "start", started))
        undo.callback(replace(profiler, "stop", stopped))
        self._unlisten = undo.close

    def _announced(self, word: str, trainer: Any) -> None:
        if word == "train_dataloader_next":
            self._begin_iteration(trainer)
        elif word == "batch_to_device" and self._iteration is None:
            # A validation's batch.
            return
        elif word == "training_step" and not self._automatic:
            # It holds the whole iteration: forward, backward and optimizer steps.
            return
        self._begin(_PHASES[word])

    def _leave(self, error: BaseException | None) -> None:
        self._unlisten()
        self._unlisten = _nothing
        self._phases.detach()
        if self._iteration is not None:
            # It was begun and never stepped.
            self._iteration = None
            self._hook.end_iteration(error or StopIteration())
        self._hook.close(error)


def _nothing() -> None:
    """There is nothing to undo."""


def _check(config: ProfilingConfig, trainer: Any, iterations: int | None) -> None:
    """Refuse what cannot work with this Trainer, before it trains."""
    own = type(trainer.profiler)
    if (config.use_pytorch_profiler or config.use_nsys_profiler) and any(
        one.__name__ == "PyTorchProfiler" for one in own.__mro__
    ):
        raise ProfilingConfigError(
            f"the Trainer runs {own.__name__}, and ProfilingCallback is to profile as well",
            why="both need CUPTI and the torch profiler, which serve one at a time",
            instead='Make the Trainer without profiler="pytorch", or without ProfilingCallback',
        )
    check_max_steps(config, iterations)
    config.finalize(world_size=world_size())


def _max_steps(trainer: Any, pl_module: Any) -> int | None:
    """Iterations that the Trainer runs at most; None where it does not tell.

    With manual optimization `max_steps` are the optimizers' steps, and an iteration is a batch. `fast_dev_run` sets it to 1,
    for whatever script is tried out.
    """
    told = pl_module.automatic_optimization and not trainer.fast_dev_run and trainer.max_steps > 0
    return trainer.max_steps if told else None


def _layout(trainer: Any) -> ParallelLayout:
    """Where the Trainer's strategy puts each rank: data-parallel but for tensor parallelism within neighbours."""
    tensor_parallel = getattr(trainer.strategy, "_tensor_parallel_size", 1)
    return ParallelLayout(world_size=world_size(), tp=tensor_parallel if isinstance(tensor_parallel, int) else 1)


def _facts(trainer: Any, pl_module: Any) -> dict[str, object]:
    package = type(trainer).__module__.partition(".")[0]
    return {
        "name": package,
        "version": sys.modules[package].__version__,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "gradient_accumulation": trainer.accumulate_grad_batches,
        "iteration": "optimizer step" if pl_module.automatic_optimization else "batch",
    }
