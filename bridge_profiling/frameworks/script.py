"""Profiles an unchanged script: finds its iterations, and drives a hook from one to the next.

An iteration ends with a step of the optimizer, and the next begins there; the first begins with the first call of a model that
has something to train. Of several optimizers, the first to step is the leader, so a GAN has one iteration for both; another
takes over when the leader is gone or left behind. A step that GradScaler skips counts, as it does in the script's own loop.
Not found: iterations in the script's processes or threads (only the first thread of this process is watched), and iterations
without `torch.optim`.

Nothing here raises into the script or waits for another rank: ranks need not step together, or at all.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import warnings
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bridge_profiling.capture.signals import raised_by_handler
from bridge_profiling.common.errors import TrainingLogger
from bridge_profiling.frameworks.session import Job, Session
from bridge_profiling.settings.profiling import ProfilingConfig

if TYPE_CHECKING:
    import torch

    from bridge_profiling.frameworks.phases import ForwardCalls

logger = TrainingLogger(__name__)

#: Another optimizer becomes the leader after this many steps without one of the leader: a training in phases may keep the
#: first phase's optimizer. Alternating schemes make fewer steps in a row (a critic's 80 or 100).
_LEFT_BEHIND = 101

_USE_AUTO_PROFILE = "put @auto_profile() from bridge_profiling.easy on the function that does one step"


class ScriptProfiling:
    """The profile of a script in this process."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._session = Session(config)
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._calls: ForwardCalls | None = None
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        #: Steps of other optimizers since the leader's last.
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        #: Steps of the leader; of all optimizers; and those in threads of the script.
        self._steps = self._all_steps = self._steps_in_threads = 0
        self._opened = self._over = False

    def watch(self) -> None:
        """Wait for the script to import torch, and then for its iterations."""
        when_imported("torch.optim.optimizer", self._watch_optimizers)
        when_imported("torch.nn.modules.module", self._watch_models)
        when_imported("torch.amp.grad_scaler", self._watch_scalers)

    def close(self, error: BaseException | None) -> None:
        """Write the capture at the end of the script, which `error` ended, if given."""
        if not self._session.in_own_process or self._over:
            return
        self._over = True
        try:
            self._session.guard(self._session.close, error)
        finally:
            if error is None or isinstance(error, SystemExit):
                self._report_missed()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch_optimizers(self, optimizers: ModuleType) -> None:
        def stepped(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
            self._steps_in_threads += not self._session.in_own_thread
            self._safely(self._stepped, optimizer)

        # torch.compile leaves such a function out of its graphs.
        stepped._torchdynamo_disable = True  # type: ignore[attr-defined]
        optimizers.register_optimizer_step_post_hook(stepped)

    def _watch_models(self, modules: ModuleType) -> None:
        """Watch all modules until the first call of a model; later calls cost nothing."""

        def called(module: torch.nn.Module, inputs: Any) -> None:
            # Graphs have no room for a hook that is left out of them, if one whole graph is required.
            if modules.torch.compiler.is_compiling() or not self._watches():
                return
            if modules.torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
                handle.remove()
                self._safely(self._first_call, module)

        handle = modules.register_module_forward_pre_hook(called)
        # A compiled module warns that such hooks run once more, which is harmless for this one.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        if self._session.config.record_memory_history:
            # A memory history must include the weights, which are built long before the first call.
            def registered(*_: Any) -> None:
                if self._watches():
                    built.remove()
                    self._safely(self._open)

            built = modules.register_module_parameter_registration_hook(registered)

    def _watch_scalers(self, scalers: ModuleType) -> None:
        step = scalers.GradScaler.step

        @functools.wraps(step)
        def counted(scaler: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
            before = self._all_steps
            result = step(scaler, optimizer, *arguments, **keywords)
            if self._all_steps == before:
                self._safely(self._stepped, optimizer)
            return result

        scalers.GradScaler.step = counted

    def _watches(self) -> bool:
        """Whether this is the watched thread: not in a process forked by the script, nor in a thread that it started."""
        return self._session.in_own_thread and not self._over

    def _safely(self, act: Callable[..., None], *arguments: Any) -> None:
        if not self._watches():
            return
        try:
            act(*arguments)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._over = True
            logger.exception("profiling failed; the script continues without it")

    # -- iterations --------------------------------------------------------------------------------------------------

    def _first_call(self, model: torch.nn.Module) -> None:
        if self._steps:
            return  # The script trained without modules before; those steps count already.
        self._open()
        self._model = weakref.ref(model)
        self._session.describe(self._session.guard(_size_of_model, model))
        self._begin(0)
        if self._calls is not None:
            self._calls.running()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped; a step of the leader ends an iteration."""
        self._all_steps += 1
        if not self._leads(optimizer):
            return
        self._open()
        if self._session.hook is not None:
            self._session.hook.facts["iterations"] = f"steps of {type(optimizer).__name__}"
        self._session.end_iteration()
        self._steps += 1
        self._begin(self._steps)

    def _leads(self, optimizer: torch.optim.Optimizer) -> bool:
        leader = self._leader() if self._leader is not None else None
        if leader is not None and leader is not optimizer:
            self._others[optimizer] = self._others.get(optimizer, 0) + 1
            if self._others[optimizer] < _LEFT_BEHIND:
                return False
        self._others.clear()
        self._leader = weakref.ref(optimizer)
        return True

    def _open(self) -> None:
        """Open the hook, once torch is loaded and, usually, the ranks are connected."""
        if not self._opened:
            self._opened = True
            self._session.open(Job(facts={"name": "script"}), independent=True, owns_process=True)

    def _begin(self, iteration: int) -> None:
        """Begin an iteration. The model's calls are watched during a capture; at other times nothing stays in the model."""
        self._session.begin_iteration(iteration)
        capturing, phases = self._session.capturing, self._session.phases
        if self._calls is not None and not capturing:
            self._calls.remove()
            self._calls = None
        model = self._model() if self._model is not None else None
        if self._calls is None and capturing and model is not None and phases is not None:
            self._calls = phases.calls_of(model)

    def _report_missed(self) -> None:
        """Log why nothing was captured and what to type instead, on one rank."""
        # A script that configures logging silences existing loggers.
        logger.logger.disabled = False
        steps, window = self._steps, self._session.config.window
        if steps > window.start or not self._session.on_first_rank:
            return
        if steps:
            others = max(self._others.values(), default=0)
            since = f". Another optimizer has made {others} since, which count from {_LEFT_BEHIND} on" if others > 1 else ""
            reason = (
                f"the script made {steps} optimizer steps, iterations 0 to {steps - 1}, and the window is"
                f" {window.start}:{window.end}. Type --steps {max(steps - 1, 0) // 2}:{steps}{since}"
            )
        elif self._steps_in_threads:
            reason = (
                "the optimizer steps in a thread that the script has started, and only the first thread is profiled;"
                f" {_USE_AUTO_PROFILE}"
            )
        else:
            reason = (
                "no optimizer stepped in this process, so no iterations were found. Does the script only infer, or train"
                f" without torch.optim? Then {_USE_AUTO_PROFILE}. Does it start its ranks itself (mp.spawn)?"
                " Then let --nproc start them"
            )
        logger.warning("%s was captured: %s", "no whole iteration" if steps == window.start and steps else "nothing", reason)


def _size_of_model(model: torch.nn.Module) -> dict[str, object]:
    from bridge_profiling.frameworks.parallel_layout import size_of_model  # on use: the script decides when torch loads

    return size_of_model(model)


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with module `name` once it is imported, which may be now.

    The script itself decides whether and when to load torch, so variables that it sets before (threads, allocator, visible
    devices) still work.
    """
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportWatch(name, act))


class _ImportWatch(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Now the other finders are asked.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                del vars(loader)["exec_module"]
                execute(module)
                self._act(module)

            vars(loader)["exec_module"] = execute_and_act
        return spec
