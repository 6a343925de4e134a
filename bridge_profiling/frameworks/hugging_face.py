"""Profiles Hugging Face's Trainer, and Trainers derived from it (Seq2SeqTrainer, TRL's, …).

    with ProfilingCallback(trainer, use_pytorch_profiler=True, profile_step_start=10, profile_step_end=12):
        trainer.train()

In code that only accepts a list of callbacks, `ProfilingCallback(use_pytorch_profiler=True, …)` works without a Trainer. It
then sees less: the Trainer fetches the batches of an iteration before it announces that the iteration begins.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState

from bridge_profiling.frameworks.accelerate import facts_of, layout_of
from bridge_profiling.frameworks.parallel_layout import size_of_model
from bridge_profiling.frameworks.phases import PhaseWatch
from bridge_profiling.frameworks.session import Closing, Job, OutputDir, Session, config_from, loader_facts
from bridge_profiling.settings.window import TRAINER

#: Methods of a Trainer that are phases.
_PHASES = {
    "get_batch_samples": "data-loading",
    "compute_loss": "forward",
    "evaluate": "evaluation",
    "log": "logging",
    "_save_checkpoint": "checkpoint",
}


class ProfilingCallback(transformers.TrainerCallback, Closing):
    """A Trainer's callback that captures a window of its iterations.

    An iteration is one optimizer step, so with `gradient_accumulation_steps=4` it contains four batches. Iterations are counted
    from 0 over the whole training, including a resume through `resume_from_checkpoint`.

    Use it as a context manager around `train()`, because a Trainer does not report exceptions to callbacks; without `with`, the
    capture is still written when the process exits.

    Args:
        trainer: the Trainer; the callback adds itself to it. Without one, give the callback to a Trainer: iterations then begin
            after their batches are fetched, and fetching, evaluation, logging and saving have no ranges.
        output_dir: root of captures; overrides the settings' and BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: an invalid request, or an unknown setting. The Trainer is unchanged then.
    """

    def __init__(self, trainer: transformers.Trainer | None = None, *, output_dir: OutputDir = None, **settings: Any) -> None:
        train_iters = trainer.args.max_steps if trainer is not None and trainer.args.max_steps > 0 else None
        config = config_from("ProfilingCallback", settings, train_iters=train_iters, spelled=TRAINER)
        self._session = Session(config, output_dir)
        self._trainer = trainer
        self._epoch = "begins"
        if trainer is not None:
            trainer.add_callback(self)

    def _close(self, error: BaseException | None) -> None:
        super()._close(error)
        if self._trainer is not None:
            self._trainer.remove_callback(self)

    # -- called by the Trainer ---------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **objects: Any) -> None:
        """Open the hook: the model is built and wrapped, and the first iteration is known."""
        job = self._session.guard(self._describe, args, state, model, objects.get("train_dataloader"))
        self._session.open(job, watch=partial(self._watch, model), range_of=partial(self._range_of_phase, state))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """An epoch begins."""
        self._epoch = "begins"

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """An iteration begins, unless it began when its batches were fetched."""
        self._begin_iteration(state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Gradients are ready and clipped."""
        self._session.begin_phase("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The optimizer has stepped."""
        self._session.end_phase("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """An iteration is over. Logging, evaluation and checkpoints follow."""
        self._session.end_iteration()

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The training is complete, or was stopped."""
        self._session.close()

    # -- iterations and phases ---------------------------------------------------------------------------------------

    def _describe(self, args: Any, state: Any, model: torch.nn.Module, loader: Any) -> Job:
        accelerate_state = AcceleratorState()
        facts = facts_of(accelerate_state) | {
            "name": "transformers",
            "version": transformers.__version__,
            "gradient_accumulation": args.gradient_accumulation_steps,
        }
        facts |= loader_facts(loader) | (self._session.guard(size_of_model, model) or {})
        return Job(layout_of(accelerate_state), facts, train_iters=state.max_steps or None)

    def _begin_iteration(self, state: Any) -> None:
        if not self._session.in_iteration:
            self._session.begin_iteration(state.global_step)

    def _range_of_phase(self, state: Any, phase: str) -> AbstractContextManager:
        # An iteration begins when its batches are fetched.
        if phase == "data-loading" and not self._epoch_is_over():
            self._begin_iteration(state)
        return self._session.phase(phase)

    def _watch(self, model: torch.nn.Module, phases: PhaseWatch) -> None:
        trainer = self._trainer
        if trainer is None:
            phases.model(model)
            phases.backward()
            return
        # On this one object; no class is changed.
        for name, phase in _PHASES.items():
            if hasattr(trainer, name):
                phases.function(trainer, name, phase)
        phases.function(trainer.accelerator, "backward", "backward")
        phases.function(accelerate.data_loader, "send_to_device", "host-to-device")

    def _epoch_is_over(self) -> bool:
        """Whether the epoch's last batch was fetched; without a length, a Trainer asks for another nevertheless."""
        if self._epoch == "begins":
            # Accelerate's mark of the last batch is still the previous epoch's.
            self._epoch = "continues"
        elif self._trainer is not None and self._trainer.accelerator.gradient_state.end_of_dataloader:
            self._epoch = "is over"
        return self._epoch == "is over"
