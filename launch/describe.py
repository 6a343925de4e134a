"""Says what a recipe would train, without training: its sizes, its parameters, its layout. Allocates no model.

    python launch/describe.py --recipe llama3_8b
    python launch/describe.py --recipe llama3_8b --ranks 16 model.tensor_model_parallel_size=4
    bridge-profiling doctor $(python launch/describe.py --recipe llama3_8b --settings) profiling.use_pytorch_profiler=true

The configuration is checked as the job would check it; whether the job's machines have what it needs, only they can tell.
Exit code 2: it does not fit together, and one line says what to type instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Started by its path, Python looks for modules in launch/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bridge_profiling.errors import ProfilingConfigError

if TYPE_CHECKING:
    from recipes.config import ConfigContainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the description that the command line asks for."""
    parser = argparse.ArgumentParser(description="Say what a recipe would train.", allow_abbrev=False)
    parser.add_argument("--recipe", default="gpt_tiny", help="name of a recipe (default: %(default)s)")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file over the recipe's values")
    parser.add_argument("--ranks", type=int, help="ranks of the job (default: what the recipe was laid out for)")
    parser.add_argument(
        "--settings", action="store_true", help="print the settings that bridge-profiling doctor reads, as its arguments"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings over both; the later wins")
    options = parser.parse_intermixed_args(arguments)
    try:
        from launch.pretrain import build_config
        from recipes.catalog import RANKS
        from recipes.finalize import finalize

        config = build_config(options.recipe, options.config, options.overrides)
        ranks = RANKS[options.recipe] if options.ranks is None else options.ranks
        finalize(config, ranks)
    except ProfilingConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.settings:
        from recipes.catalog import known_settings

        print("\n".join(known_settings(config)))
        return 0
    for name, value in describe(config, ranks):
        print(f"{name:12} {value}")
    return 0


def describe(config: ConfigContainer, ranks: int) -> Iterator[tuple[str, str]]:
    """Name and value of each line.

    Args:
        config: finalized for that many ranks.
        ranks: of the job.
    """
    from recipes.counts import count_parameters

    model, train, layout, count = config.model, config.train, config.layout(ranks), count_parameters(config.model)
    active = f", {count.active:,} active a token" if count.active != count.total else ""
    yield "parameters", f"{count.total:,} ({_rounded(count.total)}){active}"
    yield "layers", f"{model.num_layers}, hidden {model.hidden_size}, feed-forward {model.ffn_hidden_size}"
    yield "attention", f"{model.num_attention_heads} heads of {model.kv_channels}, {model.num_query_groups} keys and values"
    if model.num_moe_experts is not None:
        yield "experts", f"{model.num_moe_experts} of width {model.moe_ffn_hidden_size}, {model.moe_router_topk} a token"
    tied = "tied" if model.share_embeddings_and_output_weights else "not tied"
    yield "vocabulary", f"{model.vocab_size}, input and output embeddings {tied}, positions {model.position_embedding_type}"
    yield "precision", f"{str(model.params_dtype).removeprefix('torch.')}{f', fp8 {model.fp8}' if model.fp8 else ''}"
    yield (
        "layout",
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}: tp={layout.tp} pp={layout.pp} cp={layout.cp} ep={layout.ep}"
        f" dp={layout.dp}{', sequence parallel' if model.sequence_parallel else ''}",
    )
    yield (
        "batch",
        f"{train.global_batch_size} sequences of {model.seq_length} tokens:"
        f" {config.num_microbatches(ranks)} microbatches of {train.micro_batch_size} on each data-parallel rank",
    )
    yield "model FLOPs", _model_flops(config, ranks)


def _model_flops(config: ConfigContainer, ranks: int) -> str:
    from recipes.counts import flops_per_token, iteration_work, uncounted

    work = iteration_work(config, ranks)
    if work is None:
        return f"not counted for {uncounted(config.model)}"
    flops = flops_per_token(config.model)
    half = f"{flops.causal / flops.total:.0%} of it with half of the attention's square, as Megatron-LM counts"
    return f"{_scaled(flops.total)} a token, {_scaled(work.model_flops)} an iteration ({half})"


def _scaled(flops: float) -> str:
    for unit, size in (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops / 10**6:.3g} MFLOP"


def _rounded(count: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1000:.0f} thousand"


if __name__ == "__main__":
    sys.exit(main())
