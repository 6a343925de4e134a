"""Trains a small GPT in Megatron Bridge's own, whole, unmodified `pretrain()` on CPU ranks, once for each case.

    python tests/frameworks/bridge_pretrain.py OUT

Bridge is loaded once (10 s), and each training's ranks are forked from that process. A rank ends as any Python process does.
Writes `about.json`, what this release of Bridge offers to plugins and callbacks, and `exit_codes.json`, those of each case's
ranks. What a training leaves in its folder: `rank-N.log` (everything that it printed), `rank-N.jsonl` (each iteration's loss),
and `profiles`, which is what our callback captured.
"""

import dataclasses
import gc
import importlib.util
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ports import free_port

#: Many times what a training takes; a rank whose peer has died is left this long to find out, and killed by SIGALRM.
_PATIENCE_S = 300

#: The model, as small as it can be, with layers of megatron-core's own.
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "transformer_impl": "local"}
MODEL |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}

#: Its training. Sections and fields are those of Bridge's ConfigContainer.
_SMALL = {
    "train.train_iters": 12,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 2,
    "validation.eval_interval": 12,
    "validation.eval_iters": 0,
    # Without CUDA there are no generators of its to restore; nothing is dropped here either.
    "checkpoint.load_rng": False,
    "dist.distributed_backend": "gloo",
    "dist.disable_jit_fuser": True,
}

_TORCH = {"profiling.use_pytorch_profiler": True, "profiling.profile_step_start": 4, "profiling.profile_step_end": 6}
_HANDLED = {"train.exit_signal_handler": True}

#: What to set in Bridge's config, as {"section.field": value}; whether our callback is there; and the iteration in whose
#: forward step SIGTERM comes, to every rank or to `rank`. Two data-parallel ranks train, and both are captured.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"callback": False},
    "window": {"config": _TORCH | {"profiling.record_shapes": True}},
    "signal": {"config": _TORCH, "signal": 5},
    "handled_signal": {"config": _TORCH | _HANDLED, "signal": 4, "rank": 1},
    "exit_interval": {"config": _TORCH | {"train.exit_interval": 5}},
}

#: docs/examples/megatron_bridge.py as it is, with what a small model on CPUs needs as overrides on its command line.
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "megatron_bridge.py"
_SMALL_EXAMPLE = _SMALL | {"train.train_iters": 14, "dataset.seq_length": 32, "dataset.num_workers": 0}
_SMALL_EXAMPLE |= {"mixed_precision": None, "checkpoint.save": None}


class Losses:
    """A callback that writes each iteration's loss to the last bit, and does nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_step_end(self, context: Any) -> None:
        """Bridge counts the iteration after this event."""
        if not context.loss_dict:  # a pipeline's last stage alone has it
            return
        record = {"iteration": context.state.train_state.step, "hex": float(context.loss_dict["lm loss"]).hex()}
        with open(self._path, "a", encoding="utf-8") as file:
            print(json.dumps(record), file=file)


def configuration(out: Path | str, model: dict[str, Any], settings: dict[str, Any]) -> Any:
    """What `pretrain` is given: Bridge's own classes; `settings` are {"section.field": value}."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    sections = {
        "model": GPTModelProvider(**model),
        "train": bridge.TrainingConfig(),
        "optimizer": bridge.OptimizerConfig(optimizer="adam", lr=3e-4, min_lr=3e-5),
        "scheduler": bridge.SchedulerConfig(
            lr_decay_style="constant", lr_warmup_iters=0, start_weight_decay=0.1, end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        "ddp": bridge.DistributedDataParallelConfig(),
        "dataset": bridge.GPTDatasetConfig(
            seq_length=model["seq_length"], random_seed=1, reset_attention_mask=False, reset_position_ids=False,
            eod_mask_loss=False, split="2,1,1", num_dataset_builder_threads=1, dataloader_type="single", num_workers=0,
        ),
        "logger": bridge.LoggerConfig(log_interval=1, tensorboard_dir=f"{out}/tensorboard"),
        "tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        "checkpoint": bridge.CheckpointConfig(),
        "rng": bridge.RNGConfig(seed=1),
        "dist": bridge.DistributedInitConfig(),
        "profiling": bridge.ProfilingConfig(),
        "validation": bridge.ValidationConfig(),
    }  # fmt: skip
    config = bridge.ConfigContainer(**sections)
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        owner = getattr(config, section) if section else config
        if name not in {one.name for one in dataclasses.fields(owner)}:
            raise AttributeError(f"{type(owner).__name__} has no field {name}")
        setattr(owner, name, value)
    return config


def train(case: dict[str, Any], rank: int) -> None:
    """Train as `case` says, in this process and its working directory."""
    import torch
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.state import GlobalState

    from bridge_profiling.frameworks.megatron_bridge import ProfilingCallback
    from recipes.megatron.cpu import _WITHOUT_CUDA

    def step(state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        iteration = state.train_state.step
        if model.training and case.get("signal") == iteration and case.get("rank", rank) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        # Says in a trace of any profiler which iteration it stands in.
        with torch.profiler.record_function(f"forward of iteration {iteration}"):
            return forward_step(state, data_iterator, model, return_schedule_plan)

    out, on_cpu = Path.cwd(), {f"model.{name}": value for name, value in _WITHOUT_CUDA.items()}
    config = configuration(out, MODEL, on_cpu | _SMALL | case.get("config", {}))
    callbacks: list[Any] = [Losses(out / f"rank-{rank}.jsonl")]
    profiling: Any = nullcontext()
    if case.get("callback", True):
        profiling = ProfilingCallback(config, output_dir=out / "profiles", profile_ranks="all")
        callbacks.append(profiling)
    with profiling:
        pretrain(config=config, forward_step_func=step, callbacks=callbacks)


def run_example() -> None:
    """The documented script."""
    from recipes.megatron.cpu import _WITHOUT_CUDA

    settings = _SMALL_EXAMPLE | {f"model.{name}": value for name, value in (MODEL | _WITHOUT_CUDA).items()}
    sys.argv = [str(EXAMPLE), *(f"{name}={json.dumps(value)}" for name, value in settings.items())]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


#: Bridge's plugins, and their names in the names of functions.
PLUGINS = {
    "NsysPlugin": "nsys",
    "PyTorchProfilerPlugin": "pytorch_profiler",
    "FaultTolerancePlugin": "fault_tolerance",
}


def describe() -> dict[str, Any]:
    """What this release offers: the fields and defaults of sections and plugins, the plugins' overrides, the events."""
    import megatron.bridge
    from megatron.bridge.training import callbacks, config

    # By its file: the package around it loads every recipe, which takes a minute.
    file = Path(megatron.bridge.__path__[0]) / "recipes" / "run_plugins.py"
    spec = importlib.util.spec_from_file_location("run_plugins", file)
    assert spec is not None
    assert spec.loader is not None
    run_plugins = sys.modules["run_plugins"] = importlib.util.module_from_spec(spec)
    # Bridge does without it, and processes forked after it was loaded crash as they exit: it brings gRPC.
    sys.modules["nemo_run"] = None  # type: ignore[assignment]
    spec.loader.exec_module(run_plugins)

    def fields(owner: type) -> dict[str, Any]:
        found = {}
        for one in dataclasses.fields(owner):
            default = one.default_factory() if callable(one.default_factory) else one.default
            found[one.name] = "required" if default is dataclasses.MISSING else default
        return found

    plugins = {}
    for plugin, name in PLUGINS.items():
        arguments = getattr(run_plugins, f"{plugin}ScriptArgs")
        values = fields(getattr(run_plugins, plugin)) | {"profile_step_start": 4, "profile_step_end": 6, "profile_ranks": [0]}
        names = list(fields(arguments))
        converter = getattr(run_plugins, f"_default_{name}_converter")
        plugins[plugin] = {
            "arguments": fields(getattr(run_plugins, plugin)),
            "script_arguments": names,
            "overrides": converter(arguments(**{one: values[one] for one in names})),
        }
    return {
        "release": metadata.version("megatron-bridge"),
        "profiling": fields(config.ProfilingConfig),
        "train": list(fields(config.TrainingConfig)),
        "ft": list(fields(config.FaultToleranceConfig)),
        "plugins": plugins,
        "events": sorted(callbacks.VALID_EVENTS),
    }


def fork_ranks(out: Path, function: Callable[..., None], *arguments: Any) -> list[int] | None:
    """Call the function in two ranks that start in `out`, and wait for them.

    Returns:
        Their exit codes, negative for a signal; None in a rank itself, when it has returned.
    """
    from tests.frameworks.bridge_on_cpu import bridge_on_cpu

    out.mkdir(parents=True)
    port = free_port()
    running = []
    for rank in range(2):
        running.append(os.fork())
        if running[rank] == 0:
            _become_rank(out, rank, port)
            with bridge_on_cpu():
                function(*arguments, *([rank] if arguments else []))
            return None
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]


def _become_rank(out: Path, rank: int, port: int) -> None:
    signal.alarm(_PATIENCE_S)
    log = os.open(out / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(out)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def main() -> None:
    import torch

    from tests.frameworks.bridge_on_cpu import import_bridge

    out = Path(sys.argv[1]).absolute()
    torch.set_num_threads(1)
    import_bridge()
    about = describe()
    (out / "about.json").write_text(json.dumps(about))
    # What was loaded is never garbage: collecting it took half of a rank's time.
    gc.collect()
    gc.freeze()
    codes, trainings = {}, {name: (train, case) for name, case in CASES.items()}
    if about["release"] >= "0.6":  # for which the example is written
        trainings["example"] = (run_example,)  # type: ignore[assignment]
    for name, training in trainings.items():
        codes[name] = fork_ranks(out / name, *training)
        if codes[name] is None:
            return
    (out / "exit_codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
