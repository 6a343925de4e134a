"""Says which releases are installed, and compares Transformer Engine's layers with torch's own on a GPU, where there is one."""

from __future__ import annotations

import sys
import time
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_RELEASES = (
    "torch",
    "transformer-engine",
    "transformer-engine-cu13",
    "megatron-core",
    "megatron-bridge",
    "transformers",
    "nemo-run",
)

#: Largest relative error, in the norm over all elements. bf16 has 8 bits of significand, fp8 (e4m3) has 4.
_BF16, _FP8 = 1e-2, 6e-2


def main() -> int:
    """1 when something is wrong."""
    started = time.monotonic()
    import transformer_engine.pytorch as te
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from tools.gpu_kit.bridge_imports import import_bridge, missing_packages

    print(", ".join(f"{name} {metadata.version(name)}" for name in _RELEASES), flush=True)
    answered = missing_packages()
    import_bridge()
    import nemo_run  # noqa: F401

    print(
        f"imported in {time.monotonic() - started:.0f} s; not installed, and answered: {', '.join(sorted(answered)) or 'none'}"
    )
    if not HAVE_TE:
        print("megatron-core does not see Transformer Engine")
        return 1
    if not torch.cuda.is_available():
        print("no GPU here: no layer was run")
        return 0
    errors = _errors(te)
    for name, (error, limit) in errors.items():
        print(f"{'ok  ' if error < limit else 'LOOK'} {name}: relative error {error:.1e}, limit {limit:.0e}", flush=True)
    # NaN is below no limit.
    return 0 if all(error < limit for error, limit in errors.values()) else 1


def _errors(te: object) -> dict[str, tuple[float, float]]:
    """Relative error and limit of each layer's output; each backward runs too."""
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    torch.manual_seed(0)
    layer = te.LayerNormLinear(1024, 3072, params_dtype=torch.bfloat16)
    given = torch.randn(256, 4, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    norm = (layer.layer_norm_weight.float(), layer.layer_norm_bias.float(), layer.eps)
    normalized = torch.nn.functional.layer_norm(given.float(), (1024,), *norm)
    expected = torch.nn.functional.linear(normalized, layer.weight.float(), layer.bias.float())
    found = {"LayerNormLinear in bf16": (_relative(layer(given), expected), _BF16)}
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        for _ in range(2):
            # The first forward under delayed scaling has no history of maxima.
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                output = layer(given)
            output.float().square().mean().backward()
        found[f"LayerNormLinear in fp8, {type(recipe).__name__}"] = (_relative(output, expected), _FP8)
    attention = te.DotProductAttention(16, 64, attn_mask_type="causal", qkv_format="sbhd", attention_dropout=0.0)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(512, 2, 16, 64, **shape) for _ in range(3))
    output = attention(query, key, value)
    heads = (each.permute(1, 2, 0, 3).float() for each in (query, key, value))
    expected = (
        torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).reshape(output.shape)
    )
    found["DotProductAttention in bf16"] = (_relative(output, expected), _BF16)
    output.float().sum().backward()
    te.optimizers.FusedAdam(layer.parameters(), lr=1e-3).step()
    torch.cuda.synchronize()
    return found


def _relative(output: torch.Tensor, expected: torch.Tensor) -> float:
    return ((output.float() - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    sys.exit(main())
