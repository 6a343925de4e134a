"""Runs the profiling hook in Hugging Face's Trainer, and in Trainers made from it (Seq2SeqTrainer, TRL's, …).

    with ProfilingCallback(trainer, use_pytorch_profiler=True, profile_step_start=10, profile_step_end=12):
        trainer.train()

Where only a list of callbacks can be given, `ProfilingCallback(use_pytorch_profiler=True, …)` without a Trainer is one. It sees
less: the Trainer fetches an iteration's batches before it tells its callbacks that the iteration begins.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState

from bridge_profiling.integrations.accelerate import facts_of, layout_of
from bridge_profiling.integrations.callback_hook import CallbackHook, config_from
from bridge_profiling.integrations.max_steps import check_max_steps
from bridge_profiling.integrations.torch_phases import PhaseWatch

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

#: Methods of a Trainer that are phases.
_PHASES = {
    "get_batch_samples": "data-loading",
    "compute_loss": "forward",
    "evaluate": "evaluation",
    "log": "logging",
    "_save_checkpoint": "checkpoint",
}


class ProfilingCallback(transformers.TrainerCallback):
    """A Trainer's callback that captures a window of its iterations.

    An iteration is one optimizer step, so with `gradient_accumulation_steps=4` it holds four batches. Iterations are counted
    from 0 over the whole training, a resume through `resume_from_checkpoint` included.

    Use it as a context manager around `train()`, since a Trainer tells no callback of an exception; without `with`, the
    capture is still written when the process exits.

    Args:
        trainer: the Trainer; the callback adds itself to it. Without one, give the callback to a Trainer: its iterations
            begin after their batches are fetched then, and there is no range for fetching, evaluation, logging or saving.
        output_dir: root of what is written; wins over the settings' and over BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: a request that cannot work, or a setting that does not exist. The Trainer is unchanged then.
    """

    def __init__(
        self, trainer: Trainer | None = None, *, output_dir: str | os.PathLike[str] | None = None, **settings: Any
    ) -> None:
        steps = trainer.args.max_steps if trainer is not None else 0
        config = config_from("ProfilingCallback", settings)
        check_max_steps(config, steps if steps > 0 else None)
        self._hook = CallbackHook(config, output_dir)
        self._trainer = trainer
        self._phases = PhaseWatch(nullcontext)
        self._iteration: int | None = None
        self._epoch = "begins"
        if trainer is not None:
            trainer.add_callback(self)

    def __getstate__(self) -> dict[str, Any]:
        # As the hook's copy, which captures nothing yet.
        return vars(self) | {"_phases": PhaseWatch(nullcontext), "_iteration": None}

    # -- around train() ----------------------------------------------------------------------------------------------

    def __enter__(self) -> ProfilingCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(error)
        if self._trainer is not None:
            self._trainer.remove_callback(self)

    # -- what the Trainer calls --------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **objects: Any
    ) -> None:
        """Open the hook: the model is built and wrapped, and the iteration to start with is known."""
        self._leave(RuntimeError("the training was started anew in the same process"))
        accelerate_state = AcceleratorState()
        self._hook.open(layout_of(accelerate_state), train_iters=state.max_steps or None)
        if self._hook.hook is None:
            return
        self._hook.hook.facts.update(
            facts_of(accelerate_state)
            | {
                "name": "transformers",
                "version": transformers.__version__,
                "accelerate": accelerate.__version__,
                "gradient_accumulation": args.gradient_accumulation_steps,
            }
        )
        self._watch(state, model)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Batches come again."""
        self._epoch = "begins"

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """An iteration begins, unless it has with the fetching of its batches."""
        self._begin_iteration(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Gradients are ready, and clipped."""
        self._phases.begin("optimizer")

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """The optimizer has stepped."""
        self._phases.end("optimizer")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """An iteration is over. Logging, evaluation and checkpoints come after it."""
        self._iteration = None
        self._phases.end_open()
        self._hook.end_iteration()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Training reached its end, or was told to stop."""
        self._leave(None)

    # -- iterations and phases ---------------------------------------------------------------------------------------

    def _begin_iteration(self, state: TrainerState) -> None:
        if self._hook.hook is not None and self._iteration is None:
            self._iteration = state.global_step
            self._hook.begin_iteration(self._iteration)

    def _watch(self, state: TrainerState, model: torch.nn.Module) -> None:
        """Name what is done in this training, until `_leave`."""

        def range_or_iteration(phase: str) -> AbstractContextManager:
            if phase == "data-loading" and not self._no_batch_left():
                # Fetching its batches is how an iteration begins.
                self._begin_iteration(state)
            return self._hook.phase(phase)

        self._phases = PhaseWatch(range_or_iteration)
        trainer = self._trainer
        if trainer is None:
            self._phases.model(model)
            self._phases.backward()
            return
        # On this one object; no class is changed.
        for name, phase in _PHASES.items():
            if hasattr(trainer, name):
                self._phases.function(trainer, name, phase)
        self._phases.function(trainer.accelerator, "backward", "backward")
        self._phases.function(accelerate.data_loader, "send_to_device", "host-to-device")

    def _no_batch_left(self) -> bool:
        """Whether the epoch's last batch was fetched. Of a dataset without a length a Trainer asks for more all the same."""
        if self._epoch == "begins":
            # The last batch that Accelerate knows of is the one before's.
            self._epoch = "goes on"
        elif self._trainer is not None and self._trainer.accelerator.gradient_state.end_of_dataloader:
            self._epoch = "is over"
        return self._epoch == "is over"

    def _leave(self, error: BaseException | None) -> None:
        self._phases.detach()
        if self._iteration is not None:
            # It was begun and never stepped.
            self._iteration = None
            self._hook.end_iteration(error or StopIteration())
        self._hook.close(error)
