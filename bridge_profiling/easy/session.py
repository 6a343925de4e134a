"""Profiles a script that knows nothing of it: finds the iterations, and moves a hook from one to the next.

An iteration ends with a step of the optimizer, and the next begins there; the first begins with the first call of a model that
has something to train. With several optimizers the first to step counts, so that a GAN has one iteration for both, until it is
gone or left behind. A step that GradScaler leaves out counts as well: the script's own loop counts it. What is not found:
iterations of a script whose processes or threads train (only the first thread of this process is watched), and of one that
trains without `torch.optim`.

Nothing here raises into the script, and nothing waits for another rank: ranks need not step together, or at all.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import warnings
import weakref
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.signals import raised_by_handler
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.easy import current
from bridge_profiling.easy.imports import when_imported
from bridge_profiling.easy.launch import launch_named
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout, select_ranks

if TYPE_CHECKING:
    import torch

    from bridge_profiling.easy.model_calls import ModelCalls
    from bridge_profiling.integrations.torch_phases import PhaseWatch

logger = logging.getLogger(__name__)

#: So many steps of another optimizer, none of the one that counts among them, and the other one counts: a training in phases
#: whose first optimizer is still there. More than any scheme of two that take turns makes in a row (a critic's 80 or 100).
_LEFT_BEHIND = 101


class Session:
    """The profile of a script in this process.

    Args:
        config: what to profile.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self._config = config
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._hook: ProfilingHook | None = None
        self._phases: PhaseWatch | None = None
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._calls: ModelCalls | None = None
        self._iteration: AbstractContextManager | None = None
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        #: Steps of others since that one's last, and of all, also by threads of the script.
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._seen = self._in_threads = 0
        self._over = False
        #: Steps of the optimizer that counts.
        self.steps = 0

    def watch(self) -> None:
        """Wait for the script to import torch, and then for its iterations."""
        when_imported("torch.optim.optimizer", self._watch_optimizers)
        when_imported("torch.nn.modules.module", self._watch_models)
        when_imported("torch.amp.grad_scaler", self._watch_scalers)

    def close(self, error: BaseException | None) -> None:
        """The script has ended, by an exception or not: what was captured is written."""
        if os.getpid() != self._process or self._over:
            return
        self._over = True
        hook = self._hook
        try:
            if hook is None:
                return
            if self._iteration is not None:
                # No step ended it, so it is none.
                self._iteration.__exit__(SystemExit, error or SystemExit(), None)
            self._watch_calls(False)
            if self._phases is not None:
                self._phases.detach()
            hook.__exit__(type(error) if error else None, error, None)
            current.closed(hook)
        except Exception as failure:
            if raised_by_handler(failure):
                raise
            logger.exception("profiling failed at its end")
        finally:
            if error is None or isinstance(error, SystemExit):
                self._say_what_was_missed()

    # -- what to watch -----------------------------------------------------------------------------------------------

    def _watch_optimizers(self, optimizers: ModuleType) -> None:
        def stepped(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
            self._in_threads += threading.get_ident() != self._thread
            self._safely(self._stepped, optimizer)

        optimizers.register_optimizer_step_post_hook(_not_compiled(stepped))

    def _watch_models(self, modules: ModuleType) -> None:
        """Until the first call of a model: afterwards no module pays for being watched."""

        def called(module: torch.nn.Module, inputs: Any) -> None:
            # What torch.compile traces has no room for a hook that it must leave out, where one whole graph is asked for.
            if modules.torch.compiler.is_compiling():
                return
            if self._is_mine() and self._trains(module):
                handle.remove()
                self._safely(self._first_call, module)

        handle = modules.register_module_forward_pre_hook(called)
        # A compiled module warns of any such hook: that it is called once more, which is all the same to this one.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        if self._config.record_memory_history:
            # A memory history has to see the weights, and these are built long before the first call.
            def registered(*_: Any) -> None:
                if self._is_mine():
                    built.remove()
                    self._safely(self._open)

            built = modules.register_module_parameter_registration_hook(registered)

    def _watch_scalers(self, scalers: ModuleType) -> None:
        step = scalers.GradScaler.step

        @functools.wraps(step)
        def counted(scaler: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
            before = self._seen
            result = step(scaler, optimizer, *arguments, **keywords)
            if self._seen == before:
                self._safely(self._stepped, optimizer)
            return result

        scalers.GradScaler.step = counted

    # -- what is seen ------------------------------------------------------------------------------------------------

    def _is_mine(self) -> bool:
        """Not a process that the script forked, nor a thread that it started."""
        return os.getpid() == self._process and threading.get_ident() == self._thread and not self._over

    def _safely(self, act: Any, *arguments: Any) -> None:
        if not self._is_mine():
            return
        try:
            act(*arguments)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._over = True
            logger.exception("profiling failed; the script goes on without")

    def _trains(self, module: torch.nn.Module) -> bool:
        import torch

        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())

    def _first_call(self, model: torch.nn.Module) -> None:
        if self.steps:
            return  # Something without modules trained before; its steps count already.
        self._open()
        self._model = weakref.ref(model)
        self._begin(0)
        if self._calls is not None:
            self._calls.begun()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: if it is the one that counts, an iteration is over."""
        self._seen += 1
        if not self._counts(optimizer):
            return
        self._open()
        assert self._hook is not None
        self._hook.facts["iterations"] = f"steps of {type(optimizer).__name__}"
        self._end()
        self.steps += 1
        self._begin(self.steps)

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether iterations end with this optimizer's steps."""
        leader = self._leader() if self._leader is not None else None
        if leader is not None and leader is not optimizer:
            self._others[optimizer] = self._others.get(optimizer, 0) + 1
            if self._others[optimizer] < _LEFT_BEHIND:
                return False
        self._others.clear()
        self._leader = weakref.ref(optimizer)
        return True

    def _begin(self, iteration: int) -> None:
        if self._hook is not None:
            self._iteration = self._hook.iteration(iteration)
            self._iteration.__enter__()
            self._watch_calls(self._hook.capturing)

    def _end(self) -> None:
        if self._phases is not None:
            self._phases.end_open()
        if self._iteration is not None:
            self._iteration.__exit__(None, None, None)
            self._iteration = None

    def _open(self) -> None:
        """Open the hook, once torch is there and, most often, the ranks are connected."""
        if self._hook is not None:
            return
        here = LaunchEnv.current()
        layout = ParallelLayout(world_size=here.world_size)
        with launch_named():
            self._hook = ProfilingHook(self._config, rank=here.rank, layout=layout, owns_process=True).__enter__()
        self._hook.facts["name"] = "script"
        current.opened(self._hook)
        if here.rank in select_ranks(self._config.profile_ranks, layout):
            self._watch_phases(self._hook)

    def _watch_phases(self, hook: ProfilingHook) -> None:
        from bridge_profiling.integrations.torch_phases import PhaseWatch

        self._phases = PhaseWatch(hook.range)
        self._phases.everything()

    def _watch_calls(self, capturing: bool) -> None:
        """While something is captured, calls of the model are found; at other times nothing of ours is in it."""
        model = self._model() if self._model is not None else None
        if not capturing and self._calls is not None:
            self._calls.remove()
            self._calls = None
        elif capturing and self._calls is None and self._phases is not None and model is not None:
            from bridge_profiling.easy.model_calls import ModelCalls

            self._calls = ModelCalls(model, self._phases)

    # -- how the script ends -------------------------------------------------------------------------------------------

    def _say_what_was_missed(self) -> None:
        """In plain words, from one rank: what a user of a script has to type for a capture."""
        # A script that configures logging silences the loggers that are there already.
        logger.disabled = False
        selected = select_ranks(self._config.profile_ranks, ParallelLayout(world_size=LaunchEnv.current().world_size))
        window = self._config.window
        if LaunchEnv.current().rank != selected[0] or self.steps > window.start:
            return
        if self.steps:
            start = max(self.steps - 1, 0) // 2
            others = max(self._others.values(), default=0)
            since = f". Another optimizer has made {others} since, which do not count before there are {_LEFT_BEHIND}"
            logger.warning(
                "%s was captured: the script made %d optimizer steps, iterations 0 to %d, and the window is %s."
                " Type --steps %d:%d%s",
                "nothing" if self.steps < window.start else "no whole iteration",
                self.steps,
                self.steps - 1,
                f"{window.start}:{window.end}",
                start,
                self.steps,
                since if others > 1 else "",
            )
        elif self._in_threads:
            logger.warning(
                "nothing was captured: the optimizer steps in a thread that the script has started, and only the first thread"
                " is profiled. Put @auto_profile() from bridge_profiling.easy on the function that does one step"
            )
        else:
            logger.warning(
                "nothing was captured: no optimizer stepped in this process, so no iterations were found. Does the script only"
                " infer, or train without torch.optim? Then put @auto_profile() from bridge_profiling.easy on the function that"
                " does one step. Does it start its ranks itself (mp.spawn)? Then let --nproc start them"
            )


def _not_compiled(hook: Any) -> Any:
    """The hook, as one that torch.compile leaves out of its graphs."""
    hook._torchdynamo_disable = True
    return hook
