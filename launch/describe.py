"""Describes a recipe without training: its sizes, its parameters, its layout. Allocates no model.

    python launch/describe.py --recipe llama3_8b
    python launch/describe.py --recipe llama3_8b --ranks 16 model.tensor_model_parallel_size=4
    bridge-profiling doctor $(python launch/describe.py --recipe llama3_8b --settings) profiling.use_pytorch_profiler=true

The configuration is checked as in the job, except for checks that depend on the job's machines. Exit code 2: it does not fit
together, and one line says what to type instead.
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

from bridge_profiling.errors import ProfilingConfigError, print_error
from launch.pretrain import add_config_arguments, build_config

if TYPE_CHECKING:
    from recipes.config import ConfigContainer

_FLOPS = {"PFLOP": 10**15, "TFLOP": 10**12, "GFLOP": 10**9, "MFLOP": 10**6}
_COUNTS = {"billion": 10**9, "million": 10**6, "thousand": 1000}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the description that the command line asks for."""
    parser = argparse.ArgumentParser(description="Say what a recipe would train.", allow_abbrev=False)
    add_config_arguments(parser)
    parser.add_argument("--ranks", type=int, help="ranks of the job (default: what the recipe was laid out for)")
    parser.add_argument(
        "--settings", action="store_true", help="print the settings that bridge-profiling doctor reads, as its arguments"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        # Imported late, with torch: a wrong option is answered at once.
        from recipes.catalog import RANKS, known_settings
        from recipes.finalize import finalize

        config = build_config(options.recipe, options.config, options.overrides)
        ranks = RANKS[options.recipe] if options.ranks is None else options.ranks
        finalize(config, ranks)
    except ProfilingConfigError as error:
        print_error(error)
        return 2
    if options.settings:
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
    from recipes.counts import count_parameters, flops_per_token, iteration_work, uncounted

    model, train, layout, count = config.model, config.train, config.layout(ranks), count_parameters(config.model)
    active = f", {count.active:,} active a token" if count.active != count.total else ""
    digits = 2 if count.total >= _COUNTS["million"] else 0
    yield "parameters", f"{count.total:,} ({_with_unit(count.total, _COUNTS, f'.{digits}f')}){active}"
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
    work, flops = iteration_work(config, ranks), flops_per_token(model)
    counted = f"not counted for {uncounted(model)}"
    if work is not None:
        half = f"{flops.causal / flops.total:.0%} of it with half of the attention's square, as Megatron-LM counts"
        iteration = _with_unit(work.model_flops, _FLOPS, ".3g")
        counted = f"{_with_unit(flops.total, _FLOPS, '.3g')} a token, {iteration} an iteration ({half})"
    yield "model FLOPs", counted


def _with_unit(value: int, units: dict[str, int], precision: str) -> str:
    """The value in the largest unit that is not above it, else in the smallest."""
    unit = next((unit for unit, size in units.items() if value >= size), list(units)[-1])
    return f"{value / units[unit]:{precision}} {unit}"


if __name__ == "__main__":
    sys.exit(main())
