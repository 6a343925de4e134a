"""Runs the profiling hook in Megatron Bridge's own training loop, through its callbacks, in place of its built-in profiling.

Never imports Megatron Bridge, which finds a callback's methods by their names: the same code serves Bridge 0.3 to 0.6. The
only changes to a training are the switches of the built-in profiling and, before Bridge 0.6, the handler of the exit signal.

    with ProfilingCallback(config) as profiling:
        pretrain(config=config, forward_step_func=forward_step, callbacks=[profiling])
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from types import TracebackType
from typing import Any

from bridge_profiling.config import DEFAULT_MEMORY_SNAPSHOT_PATH, ProfilingConfig
from bridge_profiling.integrations.callback_hook import CallbackHook, config_from, world_size
from bridge_profiling.layout import ParallelLayout

logger = logging.getLogger(__name__)

#: What switches on Megatron Bridge's own profiling, which would start beside ours.
_BUILT_IN = ("use_nsys_profiler", "use_pytorch_profiler", "record_memory_history")


class ProfilingCallback:
    """A callback for Megatron Bridge's `pretrain`, `finetune` and the like.

    Make it from the config that `pretrain` is given, when that is complete (overrides included). It takes over what
    `config.profiling` asks for, and switches Bridge's built-in profiling off there. Use it as a context manager around
    `pretrain`, since Bridge tells no callback of an exception or an early exit; without `with`, the capture is still
    written when the process exits.

    Args:
        config: Megatron Bridge's ConfigContainer.
        output_dir: root of what is written; wins over the settings' and over BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig` that win over those of `config.profiling`, for what
            Bridge's own does not know (`profile_ranks="pp"`, `pytorch_profiler_profile_memory=True`, …).

    Raises:
        ProfilingConfigError: a request that cannot work, or a setting that does not exist. Nothing is changed then.
    """

    def __init__(self, config: Any, *, output_dir: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        _warn_of_unknown(config.profiling)
        if not _changed(config.profiling, "memory_snapshot_path"):
            # Bridge's default differs between releases, and 0.6's names a folder that exists in NeMo-Run's containers alone.
            settings.setdefault("memory_snapshot_path", DEFAULT_MEMORY_SNAPSHOT_PATH)
        train_iters = getattr(config.train, "train_iters", None)
        profiling = config_from(
            "ProfilingCallback",
            settings,
            given=config.profiling,
            train_iters=train_iters if isinstance(train_iters, int) else None,
        )
        self._hook = CallbackHook(profiling, output_dir)
        self._signal: int | None = None
        for name in _switched_on(config.profiling):
            setattr(config.profiling, name, False)

    # -- around pretrain ---------------------------------------------------------------------------------------------

    def __enter__(self) -> ProfilingCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(error)

    # -- what Megatron Bridge calls ----------------------------------------------------------------------------------

    def on_train_start(self, context: Any) -> None:
        """Open the hook: the ranks are connected, the model is built, and the iteration to start with is known."""
        # Still open when Bridge's in-process restart has thrown away a training that failed.
        self._leave(RuntimeError("the training was started anew in the same process"))
        still_on = _switched_on(context.state.cfg.profiling)
        if still_on:
            logger.error(
                "nothing will be captured by this callback: profiling.%s is on in the config that Megatron Bridge trains with,"
                " so its built-in profiling runs. Make ProfilingCallback from the very config that pretrain() is given,"
                " after its last change. Training goes on.",
                still_on[0],
            )
            return
        try:
            layout = _layout(context.state.cfg)
        except Exception as error:
            logger.error("nothing will be captured: %s: %s. Training goes on.", type(error).__name__, error)
            return
        iterations = getattr(context.state.cfg.train, "train_iters", None)
        self._hook.open(
            layout,
            exit_signal=self._exit_signal(context.state),
            train_iters=iterations if isinstance(iterations, int) else None,
        )

    def on_train_step_start(self, context: Any) -> None:
        """An iteration begins: Bridge counts the complete ones, a resume's included."""
        self._hook.begin_iteration(context.state.train_state.step)

    def on_train_step_end(self, context: Any) -> None:
        """An iteration is over. Logging, evaluation and checkpoints come after it."""
        self._hook.end_iteration()

    def on_eval_start(self, context: Any) -> None:
        """An evaluation between two iterations; inside the window it is a range of its own."""
        self._hook.begin_phase("evaluation")

    def on_eval_end(self, context: Any) -> None:
        """The evaluation is over."""
        self._hook.end_iteration()

    def on_train_end(self, context: Any) -> None:
        """Training reached its last iteration."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        self._hook.close(error)
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)
            self._signal = None

    def _exit_signal(self, state: Any) -> int | None:
        """See to it that the exit signal ends the training, and not the process in the middle of the window.

        With `train.exit_signal_handler`, Bridge itself finishes the iteration, saves and leaves. Releases before 0.6 create
        its handler and do not install it, so this does, on every rank, and nothing is left to the hook. A handler that is
        already installed is left alone.

        Returns:
            The signal that the hook is to turn into a SystemExit on profiled ranks, or None.
        """
        train = state.cfg.train
        number = signal.Signals(getattr(train, "exit_signal", signal.SIGTERM))
        if not getattr(train, "exit_signal_handler", False):
            return number
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            state.signal_handler.__enter__()
            self._signal = number
        return None


def _switched_on(profiling: Any) -> list[str]:
    return [name for name in _BUILT_IN if getattr(profiling, name, False)]


def _changed(section: Any, name: str) -> bool:
    """Whether a field of a dataclass has another value than its own default."""
    fields = dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()
    for field in fields:
        if field.name == name:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            return getattr(section, name) != default
    return hasattr(section, name)


def _warn_of_unknown(section: Any) -> None:
    """Name the fields that a release newer than this module may have, and that the user has set; once a job."""
    if os.environ.get("RANK", "0") != "0":
        return
    known = {field.name for field in dataclasses.fields(ProfilingConfig)}
    names = [field.name for field in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
    for name in names:
        if name not in known and not name.startswith("_") and _changed(section, name):
            logger.warning(
                "profiling.%s=%r has no effect: ProfilingCallback does not know this field", name, getattr(section, name)
            )


def _layout(config: Any) -> ParallelLayout:
    """Where Megatron Bridge puts each rank."""
    model = config.model
    return ParallelLayout(
        world_size=world_size(),
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        # Providers of models without these layers lack the fields.
        cp=getattr(model, "context_parallel_size", None) or 1,
        ep=getattr(model, "expert_model_parallel_size", None) or 1,
        etp=getattr(model, "expert_tensor_parallel_size", None),
        order="tp-cp-ep-pp-dp" if config.dist.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
