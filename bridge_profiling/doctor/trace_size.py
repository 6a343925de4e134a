"""How many bytes a profile will have, estimated from what such traces had on H200s.

A trace grows with the operators it holds. Most of them are those of a layer of one micro-batch, forward and backward; the
rest are a micro-batch's own (embedding, loss), a layer's in each iteration (optimizer, buckets), and an iteration's. What
each costs are the constants below, fitted to the captures in `benchmarks/trace_sizes.json`: `benchmarks/trace_size_fit.py`
says how far each of them is from its estimate, and fits the constants anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bridge_profiling.doctor.request import Model, Request

#: How far off either way the estimate may be: no capture was farther.
UNCERTAINTY = 2

#: The same for a model with what none of these captures had.
UNCERTAINTY_UNMEASURED = 4

#: The same where the size of the model is not known, and the one below is taken instead.
UNCERTAINTY_UNKNOWN_MODEL = 30

_UNKNOWN_LAYERS, _UNKNOWN_MICRO_BATCHES = 12, 8

#: A memory history keeps its last 100,000 events; the largest snapshot seen had 150 bytes for each.
_MEMORY_HISTORY_LIMIT = 15_000_000


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a rank's operators cost in bytes of the torch profiler's compressed trace; other files are in proportion to that.

    Attributes:
        iteration: of one iteration, whatever the model.
        layer: of each layer in an iteration.
        micro_batch: of each micro-batch in an iteration.
        layer_of_micro_batch: of each layer of each micro-batch, of a plain GPT's in megatron-core's own layers.
        rope: share of that which rotary embeddings add; so the others up to `recompute`.
        gated: SwiGLU and the like.
        qk_norm: norms of queries and keys.
        tensor_parallel: the layers' collectives.
        experts: routers, permutations and experts, where every layer has them.
        recompute: a second forward pass (`recompute_granularity=full`).
        shapes: share of the whole trace that recording shapes adds; so the others up to `profiled_memory`.
        stacks: Python's call stacks.
        profiled_memory: allocations as events.
        raw: the JSON that is written before it is compressed, over the compressed trace.
        chakra: the execution trace, over the compressed trace without options.
        nsys: nsys' report beyond `nsys_file`, over the same.
        nsys_file: bytes of a report that holds nothing.
        sqlite: its export beyond `sqlite_file`, over the same.
        sqlite_file: bytes of an export that holds nothing.
        nsys_shapes: share that operators' ranges with their shapes add to both.
        history: an iteration of the memory history, over an iteration of the compressed trace.
    """

    iteration: float = 49_000
    layer: float = 7_800
    micro_batch: float = 17_000
    layer_of_micro_batch: float = 22_000
    rope: float = 0.15
    gated: float = 0.15
    qk_norm: float = 0.3
    tensor_parallel: float = 0.3
    experts: float = 1.5
    recompute: float = 0.5
    shapes: float = 0.38
    stacks: float = 2.9
    profiled_memory: float = 0.15
    raw: float = 9.2
    chakra: float = 20.0
    nsys: float = 0.27
    nsys_file: float = 190_000
    sqlite: float = 0.56
    sqlite_file: float = 640_000
    nsys_shapes: float = 2.7
    history: float = 0.9


MEASURED = Costs()


@dataclass(frozen=True)
class TraceSize:
    """An estimate.

    Attributes:
        kept: bytes of one rank's files.
        peak: bytes of one rank while it writes, the kept ones included.
        uncertainty: factor by which both may be wrong, either way.
        assumed: what the estimate had to assume; empty where the request told all.
        files: bytes of each kind of file: `torch`, `torch_raw`, `chakra`, `nsys`, `sqlite`, `memory`.
    """

    kept: int
    peak: int
    uncertainty: int
    assumed: str
    files: dict[str, int] = field(default_factory=dict)

    @property
    def guessed(self) -> bool:
        """Whether the size of the model was assumed, and with it the order of magnitude."""
        return self.uncertainty >= UNCERTAINTY_UNKNOWN_MODEL


def estimate(request: Request, costs: Costs = MEASURED) -> TraceSize:
    """The size of one rank's capture.

    Args:
        request: what is to be run.
        costs: what operators cost; those measured, unless they are being fitted.
    """
    profiling = request.profiling
    layers, micro_batches, assumed, uncertainty = _work(request)
    iterations = max(profiling.profile_step_end - profiling.profile_step_start, 1)
    # What a trace without options has; everything else is in proportion to it.
    iteration = _iteration(request.settings.model, layers, micro_batches, costs)
    plain = iterations * iteration
    files: dict[str, float] = {}
    if profiling.use_pytorch_profiler:
        extra = costs.shapes if profiling.wants_shapes else 0.0
        extra += costs.stacks if profiling.pytorch_profiler_collect_callstack else 0.0
        extra += costs.profiled_memory if profiling.pytorch_profiler_profile_memory else 0.0
        files["torch"] = (1 + extra) * plain
        files["torch_raw"] = costs.raw * files["torch"]
        if profiling.pytorch_profiler_collect_chakra:
            files["chakra"] = costs.chakra * plain
    if request.wants_nsys:
        ranges = plain * (1 + (costs.nsys_shapes if profiling.record_shapes else 0.0))
        files["nsys"] = costs.nsys_file + costs.nsys * ranges
        if profiling.nsys_export_sqlite or any(option.startswith("--export") for option in request.nsys_options):
            files["sqlite"] = costs.sqlite_file + costs.sqlite * ranges
    if profiling.record_memory_history:
        recorded = max(profiling.profile_step_end - request.settings.train.start_iteration, 1)
        files["memory"] = min(costs.history * recorded * iteration, _MEMORY_HISTORY_LIMIT)
    kept = sum(size for name, size in files.items() if name != "torch_raw")
    # Kineto writes JSON that is compressed afterwards, and nsys collects in TMPDIR before it writes its report.
    passing = files.get("torch_raw", 0.0) + files.get("nsys", 0.0)
    return TraceSize(int(kept), int(kept + passing), uncertainty, assumed, {name: int(size) for name, size in files.items()})


def _iteration(model: Model, layers: int, micro_batches: int, costs: Costs) -> float:
    """Bytes of one iteration in the torch profiler's compressed trace without options."""
    shares = (
        (model.position_embedding_type == "rope", costs.rope),
        (model.gated_linear_unit, costs.gated),
        (model.qk_layernorm, costs.qk_norm),
        (model.tensor_model_parallel_size > 1, costs.tensor_parallel),
        (model.num_moe_experts is not None, costs.experts),
        (model.recompute_granularity == "full", costs.recompute),
    )
    layer = costs.layer_of_micro_batch * (1 + sum(share for there, share in shares if there))
    return costs.iteration + layers * costs.layer + micro_batches * (costs.micro_batch + layers * layer)


def _work(request: Request) -> tuple[int, int, str, int]:
    """Layers and micro-batches of a rank in one iteration, what had to be assumed for that, and how far off it may be."""
    model, train = request.settings.model, request.settings.train
    assumed = []
    layers, micro_batches = _UNKNOWN_LAYERS, _UNKNOWN_MICRO_BATCHES
    if model.num_layers:
        layers = math.ceil(model.num_layers / model.pipeline_model_parallel_size)
    else:
        assumed.append(f"{layers} layers")
    if train.micro_batch_size and train.global_batch_size and request.world_size:
        sharing = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
        data_parallel = max(request.world_size // max(sharing, 1), 1)
        micro_batches = max(train.global_batch_size // (train.micro_batch_size * data_parallel), 1)
    else:
        assumed.append(f"{micro_batches} micro-batches")
    if assumed:
        return layers, micro_batches, f"{' and '.join(assumed)}, since the request does not tell", UNCERTAINTY_UNKNOWN_MODEL
    unmeasured = _unmeasured(request)
    if unmeasured:
        return layers, micro_batches, f"{' and '.join(unmeasured)} as far as it was never measured", UNCERTAINTY_UNMEASURED
    return layers, micro_batches, "", UNCERTAINTY


def _unmeasured(request: Request) -> list[str]:
    model, profiling = request.settings.model, request.profiling
    cases = (
        (model.num_moe_experts is not None, "what experts add"),
        (model.transformer_impl == "transformer_engine", "what Transformer Engine's layers have"),
        (model.torch_compile, "what is compiled"),
        (model.cuda_graph_impl not in (None, "none"), "what CUDA graphs hold"),
        (request.wants_nsys and (profiling.nsys_gpu_metrics or request.wants_gpu_metrics), "what GPU metrics add"),
    )
    return [what for there, what in cases if there]


def readable(size: float) -> str:
    """Bytes as one reads them: `350 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
