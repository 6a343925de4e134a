"""What one iteration must communicate, from the configuration and the layout alone: Megatron-Core 0.16's rules, written down.

For tests to compare with what a profiler recorded. Covers models like gpt_125m (megatron-core's local layers with biases,
LayerNorm and learned positions) in bf16 or fp32 with tensor, pipeline and data parallelism, and nothing else. Each rule names
where megatron-core has it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from bridge_profiling.traces.types import RankTables

if TYPE_CHECKING:
    from recipes.config import ConfigContainer, GPTModelConfig

_BYTES = {"BFloat16": 2, "Float": 4, "Double": 8}

#: Elements that a bucket begins at: distributed_data_parallel.py.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000

#: Parameters begin at multiples, and so do buckets, with the distributed optimizer: param_and_grad_buffer.py.
_PARAMETER_STEP, _BUCKET_STEP = 64, 128

TENSOR, PIPELINE, EMBEDDING = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP", "EMBEDDING_GROUP"
DATA, OPTIMIZER, MODEL = ("DATA_PARALLEL_GROUP_WITH_CP", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "MODEL_PARALLEL_GROUP")


@dataclass(frozen=True, order=True)
class Collective:
    """One operation, as one rank takes part in it.

    Args:
        operation: in the words of `collectives.operation`; a sending and a receiving at once are `send_recv`.
        group: megatron-core's name of it.
        ranks: its members.
        in_elements: what the rank gives; None when nothing.
        out_elements: what it gets; None when nothing.
        dtype: torch's scalar type.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    in_elements: int | None
    out_elements: int | None
    dtype: str

    @property
    def message_bytes(self) -> int:
        """The larger of what it gives and gets."""
        return _BYTES[self.dtype] * max(self.in_elements or 0, self.out_elements or 0)


def expected_collectives(config: ConfigContainer, world_size: int, rank: int) -> Counter[Collective]:
    """How often a rank takes part in which operation in one training iteration; groups of one rank do nothing.

    Args:
        config: a finalized configuration.
        world_size: number of ranks.
        rank: which.
    """
    found = Counter(_Rank(config, world_size, rank).all())
    return Counter({each: count for each, count in found.items() if len(each.ranks) > 1})


def recorded_collectives(tables: RankTables) -> dict[int, Counter[Collective]]:
    """The same as a capture has it, for each of its iterations."""
    columns = ["iteration", "operation", "group", "group_ranks", "in_elements", "out_elements", "dtype"]
    found: dict[int, Counter[Collective]] = {each: Counter() for each in tables.iterations["iteration"].to_pylist()}
    for row in tables.collectives.select(columns).to_pylist():
        iteration, ranks = row.pop("iteration"), tuple(json.loads(row.pop("group_ranks")))
        if iteration is not None:
            found[iteration][Collective(ranks=ranks, **row)] += 1
    return found


class _Rank:
    def __init__(self, config: ConfigContainer, world_size: int, rank: int) -> None:
        self.config, self.model = config, config.model
        self.layout = config.layout(world_size)
        self.place = {name: place for name, (place, _) in self.layout.coordinates(rank).items()}
        self.ranks = {other: self.layout.coordinates(other) for other in range(world_size)}
        self.microbatches = config.num_microbatches(world_size)
        self.dtype = "BFloat16" if self.model.bf16 else "Float"
        self.first, self.last = self.place["pp"] == 0, self.place["pp"] == self.layout.pp - 1
        #: Elements of the activations between layers: [sequence, batch, hidden].
        self.activations = self.model.seq_length * config.train.micro_batch_size * self.model.hidden_size

    def group(self, *dimensions: str) -> tuple[int, ...]:
        """The ranks that differ from this one in these dimensions only."""
        same = [name for name in ("tp", "pp", "dp") if name not in dimensions]
        return tuple(rank for rank, place in self.ranks.items() if all(place[name][0] == self.place[name] for name in same))

    def all(self) -> Iterator[Collective]:
        for _ in range(self.microbatches):
            yield from self.tensor_parallel()
        yield from self.pipeline()
        yield from self.gradients()
        yield from self.embedding()
        yield from self.step()

    def _reduce(self, group: str, ranks: tuple[int, ...], elements: int, dtype: str) -> Collective:
        return Collective("all_reduce", group, ranks, elements, elements, dtype)

    def tensor_parallel(self) -> Iterator[Collective]:
        """A micro-batch's: tensor_parallel/layers.py, mappings.py, cross_entropy.py."""
        ranks = self.group("tp")
        # Attention and MLP each sum their outputs in the forward pass and the gradients of their inputs in the backward one.
        count = 4 * _layers(self.model, self.layout.pp)[self.place["pp"]]
        # The embedding's output, of which each rank has the rows of its part of the vocabulary; the output layer's input.
        count += self.first + self.last
        for _ in range(count):
            yield self._reduce(TENSOR, ranks, self.activations, self.dtype)
        # The cross-entropy's largest logit, the label's logit and the sum of exponentials, of each token.
        tokens = self.model.seq_length * self.config.train.micro_batch_size
        for _ in range(3 * self.last):
            yield self._reduce(TENSOR, ranks, tokens, "Float")

    def pipeline(self) -> Iterator[Collective]:
        """The 1F1B schedule's: schedules.py, forward_backward_pipelining_without_interleaving."""
        warmup = min(self.layout.pp - self.place["pp"] - 1, self.microbatches)
        steady = self.microbatches - warmup
        # Each call: with which neighbours it sends and receives. There are none before the first stage and after the last.
        calls = [call for _ in range(warmup) for call in ((False, "before"), (True, "after"))]
        calls += [(False, "before")] if steady else []
        for place in range(steady):
            calls.append((None, "after"))
            calls.append((None if place < steady - 1 else True, "before"))
        calls += [call for _ in range(warmup) for call in ((False, "after"), (True, "before"))]
        for sends, neighbour in calls:
            if (neighbour == "before" and self.first) or (neighbour == "after" and self.last):
                continue
            yield Collective(
                {None: "send_recv", True: "send", False: "recv"}[sends],
                PIPELINE,
                self.group("pp"),
                None if sends is False else self.activations,
                None if sends is True else self.activations,
                self.dtype,
            )

    def gradients(self) -> Iterator[Collective]:
        """Each bucket's, once an iteration: param_and_grad_buffer.py, distrib_optimizer.py."""
        ranks, size = self.group("dp"), self.layout.dp
        dtype = "Float" if self.config.ddp.grad_reduce_in_fp32 else self.dtype
        for elements in self.buckets():
            if not self.config.ddp.use_distributed_optimizer:
                yield self._reduce(DATA, ranks, elements, dtype)
                continue
            yield Collective("reduce_scatter", DATA, ranks, elements, elements // size, dtype)
            yield Collective("all_gather", DATA, ranks, elements // size, elements, self.dtype)

    def buckets(self) -> list[int]:
        """Elements of each bucket of gradients, padding included."""
        ddp, size = self.config.ddp, self.layout.dp
        padded = ddp.use_distributed_optimizer
        limit = ddp.bucket_size or max(_BUCKET, _BUCKET_PER_RANK * size)
        buckets, start, end = [], 0, 0

        def close() -> None:
            nonlocal start, end
            end = _padded(end, lcm(size, _BUCKET_STEP)) if padded else end
            buckets.append(end - start)
            start = end

        # From the last parameter to the first, as the backward pass comes to them.
        for elements, shared in reversed(list(self.parameters())):
            end = _padded(end, _PARAMETER_STEP) if padded else end
            if shared and padded and end > start:
                close()
            end += elements
            # Later stages and runs without overlap do not split their gradients.
            if (shared and padded) or (ddp.overlap_grad_reduce and self.first and end - start >= limit):
                close()
        if end > start:
            close()
        return buckets

    def parameters(self) -> Iterator[tuple[int, bool]]:
        """Elements of this rank's parameters in the model's order, and whether another stage has the same one."""
        model, tp = self.model, self.layout.tp
        hidden, embedding = model.hidden_size, model.vocab_size // tp * model.hidden_size
        shared = model.share_embeddings_and_output_weights
        if self.first:
            yield embedding, shared and not self.last
            yield model.seq_length * hidden, False
        heads, inner = model.num_attention_heads * model.kv_channels, model.ffn_hidden_size // tp
        attention = [heads // tp * hidden, hidden, 3 * heads // tp * hidden, 3 * heads // tp]
        mlp = [inner * hidden, inner, inner * hidden, hidden]
        norm = [hidden, hidden]
        for _ in range(_layers(model, self.layout.pp)[self.place["pp"]]):
            yield from ((elements, False) for elements in (*norm, *attention, *norm, *mlp))
        if self.last:
            yield from ((elements, False) for elements in norm)
            if not (shared and self.first):
                yield embedding, shared

    def embedding(self) -> Iterator[Collective]:
        """The gradient of an embedding that the last stage has a copy of: finalize_model_grads.py."""
        if not self.model.share_embeddings_and_output_weights or self.layout.pp == 1 or not (self.first or self.last):
            return
        stages = self.group("pp")
        dtype = "Float" if self.config.ddp.grad_reduce_in_fp32 else self.dtype
        elements = self.model.vocab_size // self.layout.tp * self.model.hidden_size
        yield self._reduce(EMBEDDING, (stages[0], stages[-1]), elements, dtype)

    def step(self) -> Iterator[Collective]:
        """The norm of the gradients (clip_grads.py), and the loss that the training loop itself averages."""
        if self.config.ddp.use_distributed_optimizer:
            yield self._reduce(OPTIMIZER, self.group("tp", "pp", "dp"), 1, "Float")
        else:
            yield self._reduce(MODEL, self.group("tp", "pp"), 1, "Float")
        if self.last:
            yield self._reduce(DATA, self.group("dp"), 2, "Double")


def _layers(model: GPTModelConfig, stages: int) -> list[int]:
    """Layers of each pipeline stage."""
    first, last = model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage
    uneven = (first is not None) + (last is not None)
    rest = 0 if stages == uneven else (model.num_layers - (first or 0) - (last or 0)) // (stages - uneven)
    layers = [rest] * stages
    layers[0] = rest if first is None else first
    layers[-1] = layers[-1] if last is None else last
    return layers


def _padded(elements: int, step: int) -> int:
    return -(-elements // step) * step
