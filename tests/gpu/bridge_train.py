"""Trains a small GPT in Megatron Bridge's own `pretrain` on GPUs, with our callback or without a profiler.

    torchrun --nproc-per-node 2 tests/gpu/bridge_train.py OUT [--profiler torch] [--memory] [section.field=value …]

Bridge's defaults wherever nothing is set: Transformer Engine's layers, fused Adam, a distributed optimizer with overlap, bf16.
OUT/losses.jsonl holds each iteration's loss to the last bit; OUT/profiles what our callback captured, on every rank.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridge_profiling.capture import start_under_nsys
from bridge_profiling.frameworks.megatron_bridge import ProfilingCallback
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.launch import report_exit_code
from bridge_profiling.settings.overrides import parse_override
from bridge_profiling.settings.profiling import ProfilingConfig
from tests.frameworks.bridge_pretrain import Losses, configuration
from tests.gpu.bridge_imports import import_bridge

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

#: Its training, where Bridge's defaults will not do. Sections and fields are those of Bridge's ConfigContainer.
SETTINGS: dict[str, Any] = {
    "train.train_iters": 20,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 8,
    "validation.eval_interval": 1000,
    "validation.eval_iters": 0,
    "mixed_precision": "bf16_mixed",
    **dict.fromkeys(("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer"), True),
    **dict.fromkeys(("ddp.overlap_grad_reduce", "ddp.overlap_param_gather"), True),
    "scheduler.lr_warmup_iters": 2,
    "dataset.num_workers": 1,
    "tokenizer.vocab_size": 32000,
}

_MODEL: dict[str, Any] = {
    **{"num_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024},
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    # Bridge says of its fused cross entropy that it is not deterministic; two runs then differ in their last bits.
    "cross_entropy_loss_fusion": False,
    # Bridge 0.6 turns it on wherever Transformer Engine is installed, and megatron-core's output layer needs Apex for it.
    "gradient_accumulation_fusion": find_spec("fused_weight_gradient_mlp_cuda") is not None,
}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with `settings` as {"section.field": value}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profiler", choices=("torch", "nsys", "none"), default="none")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--window", default="8:12", help="first iteration, and the first after it")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    options.start, options.end = (int(part) for part in options.window.split(":"))
    options.settings = SETTINGS | {one.key: one.value for one in map(parse_override, options.settings)}
    return options


def _configuration(options: argparse.Namespace) -> Any:
    """What `pretrain` is given."""
    of_model = {name: value for name, value in options.settings.items() if name.startswith("model.")}
    model = _MODEL | {name.removeprefix("model."): value for name, value in of_model.items()}
    model.setdefault("sequence_parallel", model.get("tensor_model_parallel_size", 1) > 1)
    profiling = {
        "use_pytorch_profiler": options.profiler == "torch", "use_nsys_profiler": options.profiler == "nsys",
        "record_memory_history": options.memory, "profile_step_start": options.start, "profile_step_end": options.end,
        "profile_ranks": list(range(WORLD_SIZE)),
    }  # fmt: skip
    asked = {f"profiling.{name}": value for name, value in profiling.items()}
    asked |= {name: value for name, value in options.settings.items() if name not in of_model}
    return configuration(options.out, model, asked)


def _restart_under_nsys(options: argparse.Namespace) -> None:
    """Start this rank anew under nsys, as an experiment of ours does."""
    window = {"profile_step_start": options.start, "profile_step_end": options.end, "profile_ranks": "all"}
    output = str(options.out / "profiles")
    config = ProfilingConfig(use_nsys_profiler=True, nsys_export_sqlite=True, output_dir=output, **window)
    config.finalize(train_iters=options.settings["train.train_iters"], world_size=WORLD_SIZE)
    tp, cp = (options.settings.get(f"model.{name}_parallel_size", 1) for name in ("tensor_model", "context"))
    layout = ParallelLayout(world_size=WORLD_SIZE, tp=tp, cp=cp)
    start_under_nsys(config, rank=RANK, layout=layout, local_rank=int(os.environ.get("LOCAL_RANK", "0")), cuda=True)


def main() -> None:
    """Train as the command line says."""
    options = parsed()
    options.out = options.out.absolute()
    # As Bridge's performance plugin sets it: communication starts in the order in which it was launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if options.profiler == "nsys":
        _restart_under_nsys(options)
    pretrain, forward_step = import_bridge()
    config = _configuration(options)
    options.out.mkdir(parents=True, exist_ok=True)
    callbacks: list[Any] = [Losses(options.out / "losses.jsonl")] if RANK == 0 else []
    profiling: Any = nullcontext()
    if options.profiler != "none" or options.memory:
        settings = {"nsys_export_sqlite": True} if options.profiler == "nsys" else {}
        profiling = ProfilingCallback(config, output_dir=options.out / "profiles", profile_ranks="all", **settings)
        callbacks.append(profiling)
    with profiling:
        pretrain(config=config, forward_step_func=forward_step, callbacks=callbacks)


if __name__ == "__main__":
    # Under nsys, its supervisor learns how the training ended.
    with report_exit_code():
        sys.exit(main())
