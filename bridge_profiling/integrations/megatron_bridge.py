"""Runs the profiling hook in Megatron Bridge's own training loop, through its callbacks, in place of its built-in profiling.

Never imports Megatron Bridge: its callbacks are found by their names, so the module also works where Bridge's other needs
(Transformer Engine) are missing. Changes nothing of a training but the built-in profiling's switches and, where Bridge
leaves out to do so, the handler of the exit signal.

    with ProfilingCallback(config) as profiling:
        pretrain(config=config, forward_step_func=forward_step, callbacks=[profiling])
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.ranks import ParallelLayout, select_ranks
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError

logger = logging.getLogger(__name__)

#: What switches on Megatron Bridge's own profiling, which would start beside ours.
_BUILT_IN = ("use_nsys_profiler", "use_pytorch_profiler", "record_memory_history")

_FIELDS = tuple(field.name for field in dataclasses.fields(ProfilingConfig))


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
        self._profiling = _taken_over(config, settings)
        self._output_dir = output_dir
        self._hook: ProfilingHook | None = None
        self._open: list[AbstractContextManager] = []
        self._signal: signal.Signals | None = None
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
            self._open_hook(context.state)
        except Exception as error:
            logger.error("nothing will be captured: %s: %s. Training goes on.", type(error).__name__, error)

    def on_train_step_start(self, context: Any) -> None:
        """An iteration begins: Bridge counts the complete ones, a resume's included."""
        if self._hook is not None:
            self._end(None)
            self._begin(self._hook.iteration(context.state.train_state.step))

    def on_train_step_end(self, context: Any) -> None:
        """An iteration is over. Logging, evaluation and checkpoints come after it."""
        self._end(None)

    def on_eval_start(self, context: Any) -> None:
        """An evaluation between two iterations; inside the window it is a range of its own."""
        if self._hook is not None:
            self._begin(self._hook.range("evaluation"))

    def on_eval_end(self, context: Any) -> None:
        """The evaluation is over."""
        self._end(None)

    def on_train_end(self, context: Any) -> None:
        """Training reached its last iteration."""
        self._leave(None)

    # -- the hook ----------------------------------------------------------------------------------------------------

    def _open_hook(self, state: Any) -> None:
        layout, rank = _layout(state.cfg), _rank()
        hook = ProfilingHook(self._profiling, rank=rank, layout=layout, output_dir=self._output_dir)
        self._hook = hook.__enter__()
        selected = self._profiling.enabled and rank in select_ranks(self._profiling.profile_ranks, layout)
        self._let_the_signal_unwind(state, selected)

    def _begin(self, one: AbstractContextManager) -> None:
        one.__enter__()
        self._open.append(one)

    def _end(self, error: BaseException | None) -> None:
        while self._open:
            self._open.pop().__exit__(type(error) if error else None, error, None)

    def _leave(self, error: BaseException | None) -> None:
        hook, self._hook = self._hook, None
        if hook is None:
            return
        self._end(error)
        hook.__exit__(type(error) if error else None, error, None)
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)
            self._signal = None

    # -- the exit signal ---------------------------------------------------------------------------------------------

    def _let_the_signal_unwind(self, state: Any, selected: bool) -> None:
        """See to it that the exit signal ends the training, and not the process in the middle of the window.

        With `train.exit_signal_handler`, Bridge itself is to finish the iteration, save and leave; but 0.3 makes its handler
        and never installs it, so that is done here, on every rank. Without, the signal would kill the process, so on a rank
        that is profiled it becomes a SystemExit. A handler that someone has installed is left alone.
        """
        train = state.cfg.train
        number = signal.Signals(getattr(train, "exit_signal", signal.SIGTERM))
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is not signal.SIG_DFL:
            return
        if getattr(train, "exit_signal_handler", False):
            state.signal_handler.__enter__()
        elif selected:
            signal.signal(number, _exit)
        self._signal = number


def _exit(number: int, frame: object) -> None:
    # A second signal ends the process at once.
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _switched_on(profiling: Any) -> list[str]:
    return [name for name in _BUILT_IN if getattr(profiling, name, False)]


def _taken_over(config: Any, settings: dict[str, Any]) -> ProfilingConfig:
    """What `config.profiling` and `settings` ask for, checked."""
    unknown = sorted(settings.keys() - set(_FIELDS))
    if unknown:
        raise ProfilingConfigError(
            f"ProfilingCallback got {unknown[0]!r}",
            why=f"the settings are {', '.join(_FIELDS)}",
            instead="Pass one of these, or leave it out",
        )
    given = {name: getattr(config.profiling, name) for name in _FIELDS if hasattr(config.profiling, name)}
    profiling = ProfilingConfig(**(given | settings))
    train_iters = getattr(config.train, "train_iters", None)
    profiling.finalize(train_iters=train_iters if isinstance(train_iters, int) else None, world_size=_announced_world_size())
    return profiling


def _announced_world_size() -> int | None:
    """The number of ranks where the launcher says it, before they are connected."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else None


def _connected() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _connected() else 0


def _layout(config: Any) -> ParallelLayout:
    """Where Megatron Bridge puts each rank."""
    model = config.model
    return ParallelLayout(
        world_size=torch.distributed.get_world_size() if _connected() else 1,
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        # Providers of models without these layers lack the fields.
        cp=getattr(model, "context_parallel_size", None) or 1,
        ep=getattr(model, "expert_model_parallel_size", None) or 1,
        etp=getattr(model, "expert_tensor_parallel_size", None),
        order="tp-cp-ep-pp-dp" if config.dist.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
