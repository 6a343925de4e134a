"""Profiles Megatron Bridge's own training loop through its callbacks, in place of its built-in profiling.

Never imports Megatron Bridge, which finds a callback's methods by name: the same code serves Bridge 0.5 and 0.6. It changes
only the switches of the built-in profiling and, before Bridge 0.6, the handler of the exit signal.

    with ProfilingCallback(config) as profiling:
        pretrain(config=config, forward_step_func=forward_step, callbacks=[profiling])
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from typing import Any

from bridge_profiling.common.errors import TrainingLogger
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.frameworks.session import SETTINGS, Closing, Job, OutputDir, Session, config_from, world_size
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import DEFAULT_MEMORY_SNAPSHOT_PATH, PROFILERS

logger = TrainingLogger(__name__)


class ProfilingCallback(Closing):
    """A callback for Megatron Bridge's `pretrain`, `finetune` and the like.

    Create it from the config that `pretrain` gets, when that is complete, including overrides. It takes the request from
    `config.profiling`, and switches Bridge's built-in profiling off there. Use it as a context manager around `pretrain`,
    because Bridge does not report exceptions or early exits to callbacks; without `with`, the capture is still written when the
    process exits.

    Args:
        config: Megatron Bridge's ConfigContainer.
        output_dir: root of captures; overrides the settings' and BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig` that override those of `config.profiling`, for fields that
            Bridge's section lacks (`profile_ranks="pp"`, `pytorch_profiler_profile_memory=True`, …).

    Raises:
        ProfilingConfigError: an invalid request, or an unknown setting. Nothing is changed then.
    """

    def __init__(self, config: Any, *, output_dir: OutputDir = None, **settings: Any) -> None:
        changed = _changed(config.profiling)
        for name in changed.keys() - set(SETTINGS) if LaunchEnv.read().rank == 0 else ():
            # Only a newer release of Bridge has this field.
            logger.warning("profiling.%s=%r has no effect: ProfilingCallback does not know this field", name, changed[name])
        if "memory_snapshot_path" not in changed:
            # Bridge's default differs between releases, and the folder in 0.6's exists only in NeMo-Run's containers.
            settings.setdefault("memory_snapshot_path", DEFAULT_MEMORY_SNAPSHOT_PATH)
        profiling = config_from("ProfilingCallback", settings, given=config.profiling, train_iters=_train_iters(config))
        if getattr(getattr(config, "ft", None), "enable_ft_package", False) is True:
            profiling.disable_nsys()
        self._session = Session(profiling, output_dir)
        for name in _switched_on(config.profiling):
            setattr(config.profiling, name, False)

    # -- called by Megatron Bridge -----------------------------------------------------------------------------------

    def on_train_start(self, context: Any) -> None:
        """Open the hook: the ranks are connected, the model is built, and the first iteration is known."""
        # The hook is still open if Bridge's in-process restart has discarded a failed training.
        self._session.close(RuntimeError("the training was started again in the same process"))
        config = context.state.cfg
        still_on = _switched_on(config.profiling)
        if still_on:
            logger.error(
                "nothing will be captured by this callback: profiling.%s is on in the config that Megatron Bridge trains with,"
                " so its built-in profiling runs. Create ProfilingCallback from the same config that pretrain() gets, after its"
                " last change. Training goes on.",
                still_on[0],
            )
            return
        layout = self._session.guard(_layout, config)
        if layout is None:
            return
        number = signal.Signals(getattr(config.train, "exit_signal", signal.SIGTERM))
        # With `train.exit_signal_handler`, Bridge itself finishes the iteration, saves and exits.
        handled = getattr(config.train, "exit_signal_handler", False)
        facts = self._session.guard(_facts, context) or {}
        opened = self._session.open(Job(layout, facts, _train_iters(config)), exit_signal=None if handled else number)
        main_thread = threading.current_thread() is threading.main_thread()
        if opened and handled and main_thread and signal.getsignal(number) is signal.SIG_DFL:
            # Releases before 0.6 create the handler and do not install it.
            context.state.signal_handler.__enter__()
            self._session.signals.callback(signal.signal, number, signal.SIG_DFL)

    def on_train_step_start(self, context: Any) -> None:
        """An iteration begins; Bridge counts complete iterations, including those before a resume."""
        self._session.begin_iteration(context.state.train_state.step)

    def on_train_step_end(self, context: Any) -> None:
        """An iteration is over. Logging, evaluation and checkpoints follow."""
        self._session.end_iteration()

    def on_eval_start(self, context: Any) -> None:
        """An evaluation between two iterations; inside the window it is a range of its own."""
        self._session.begin_phase("evaluation")

    def on_eval_end(self, context: Any) -> None:
        """The evaluation is over."""
        self._session.end_phase("evaluation")

    def on_train_end(self, context: Any) -> None:
        """The last iteration is over."""
        self._session.close()


def _facts(context: Any) -> dict[str, object]:
    """The manifest's `framework` section. `parameters` are those of this rank's model."""
    from bridge_profiling.frameworks.parallel_layout import size_of  # on use: it imports torch

    train = context.state.cfg.train
    names = {"batch_size": "micro_batch_size", "global_batch_size": "global_batch_size"}
    sizes = {name: getattr(train, theirs, None) for name, theirs in names.items()}
    models: Any = getattr(context, "model", None)
    modules = models if isinstance(models, list | tuple) else [models] * hasattr(models, "parameters")
    counted = size_of(one for module in modules for one in module.parameters()) if modules else {}
    return {"name": "megatron-bridge", **{name: size for name, size in sizes.items() if size is not None}, **counted}


def _train_iters(config: Any) -> int | None:
    iterations = getattr(config.train, "train_iters", None)
    return iterations if isinstance(iterations, int) else None


def _switched_on(profiling: Any) -> list[str]:
    """Switches of Megatron Bridge's own profiling that are on: it would run next to ours."""
    return [name for name in PROFILERS.values() if getattr(profiling, name, False)]


def _changed(section: Any) -> dict[str, Any]:
    """Public fields of a dataclass that differ from their defaults, with their values."""
    changed = {}
    for field in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if not field.name.startswith("_") and getattr(section, field.name) != default:
            changed[field.name] = getattr(section, field.name)
    return changed


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
