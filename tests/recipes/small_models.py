"""Settings that make a recipe's model small enough to be built on a CPU."""

from __future__ import annotations

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.vocab_size=128",
    "model.seq_length=32",
    "model.bf16=false",
]
LLAMA = [*SMALL, "model.num_query_groups=2", "model.ffn_hidden_size=96"]
