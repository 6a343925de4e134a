"""Estimates the size of a profile in bytes, from traces measured on H200s.

A trace grows with its number of operators. Most belong to a layer of one micro-batch, forward and backward; the others to a
micro-batch (embedding, loss), to a layer in each iteration (optimizer, buckets), or to an iteration. The constants below
are fitted to the captures in `tests/doctor/trace_sizes.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bridge_profiling.doctor.request import Request

#: Largest factor between the estimate and the real size, either way: no capture differed by more.
UNCERTAINTY = 2

#: The same for a model with features that none of these captures had.
UNCERTAINTY_UNMEASURED = 4

#: The same where the size of the model is not known, and the one below is assumed.
UNCERTAINTY_UNKNOWN_MODEL = 30

_UNKNOWN_LAYERS, _UNKNOWN_MICRO_BATCHES = 12, 8

#: A memory history keeps its last 100,000 events; the largest snapshot measured had 150 bytes per event.
_MEMORY_HISTORY_LIMIT = 15_000_000


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost of a rank's operators in bytes of the torch profiler's compressed trace; other files are in proportion to it."""

    iteration: float = 49_000  # each iteration, whatever the model
    layer: float = 7_800  # each layer in an iteration
    micro_batch: float = 17_000  # each micro-batch in an iteration
    layer_of_micro_batch: float = 22_000  # each layer of each micro-batch, for a plain GPT with megatron-core's own layers
    rope: float = 0.15  # share of `layer_of_micro_batch` added by rotary embeddings; likewise the others up to `recompute`
    gated: float = 0.15  # SwiGLU and similar activations
    qk_norm: float = 0.3  # norms of queries and keys
    tensor_parallel: float = 0.3  # the layers' collectives
    experts: float = 1.5  # routers, permutations and experts, where every layer has them
    recompute: float = 0.5  # a second forward pass (`recompute_granularity=full`)
    shapes: float = 0.38  # share of the whole trace added by recording shapes; likewise the others up to `profiled_memory`
    stacks: float = 2.9  # Python call stacks
    profiled_memory: float = 0.15  # allocations as events
    raw: float = 9.2  # the JSON that is written before compression, relative to the compressed trace
    chakra: float = 20.0  # the execution trace, relative to the compressed trace without options
    nsys: float = 0.27  # nsys' report beyond `nsys_file`, relative to the same
    nsys_file: float = 190_000  # bytes of an empty report
    sqlite: float = 0.56  # its SQLite export beyond `sqlite_file`, relative to the same
    sqlite_file: float = 640_000  # bytes of an empty export
    nsys_shapes: float = 2.7  # share that operators' ranges with their shapes add to both
    history: float = 0.9  # an iteration of the memory history, relative to an iteration of the compressed trace


MEASURED = Costs()


@dataclass(frozen=True)
class TraceSize:
    """An estimate: bytes of one rank's files, kept and at the peak while it writes, and by kind of file.

    `uncertainty` is the largest factor between these and the real sizes, either way; `caveat` is the reason for an unusual one.
    """

    kept: int
    peak: int
    uncertainty: int
    caveat: str
    files: dict[str, int] = field(default_factory=dict)


def estimate(request: Request, costs: Costs = MEASURED) -> TraceSize:
    """The size of one rank's capture; `costs` are the measured ones, except while they are fitted."""
    profiling = request.profiling
    layers, micro_batches = _layers(request), _micro_batches(request)
    stand_ins = {f"{_UNKNOWN_LAYERS} layers": layers, f"{_UNKNOWN_MICRO_BATCHES} micro-batches": micro_batches}
    assumed = [text for text, known in stand_ins.items() if not known]
    uncertainty, caveat = UNCERTAINTY, ""
    if assumed:
        uncertainty = UNCERTAINTY_UNKNOWN_MODEL
        caveat = f"assuming {' and '.join(assumed)}, which the request does not state"
    elif unmeasured := _unmeasured(request):
        uncertainty, caveat = UNCERTAINTY_UNMEASURED, f"no measured trace had {' or '.join(unmeasured)}"
    iteration = _iteration(request, layers or _UNKNOWN_LAYERS, micro_batches or _UNKNOWN_MICRO_BATCHES, costs)
    # A trace without options; everything else is in proportion to it.
    plain = max(profiling.profile_step_end - profiling.profile_step_start, 1) * iteration
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
        recorded = max(profiling.profile_step_end - (request.integer("train.start_iteration") or 0), 1)
        files["memory"] = min(costs.history * recorded * iteration, _MEMORY_HISTORY_LIMIT)
    kept = sum(size for name, size in files.items() if name != "torch_raw")
    # Kineto writes JSON that is compressed afterwards, and nsys collects in TMPDIR before it writes its report.
    temporary = files.get("torch_raw", 0.0) + files.get("nsys", 0.0)
    sizes = {name: int(size) for name, size in files.items()}
    return TraceSize(int(kept), int(kept + temporary), uncertainty, caveat, sizes)


def _iteration(request: Request, layers: int, micro_batches: int, costs: Costs) -> float:
    """Bytes of one iteration in the torch profiler's compressed trace without options."""
    settings = request.settings
    shares = (
        (settings.get("model.position_embedding_type") == "rope", costs.rope),
        (settings.get("model.gated_linear_unit"), costs.gated),
        (settings.get("model.qk_layernorm"), costs.qk_norm),
        (request.parallel_size("tensor_model") > 1, costs.tensor_parallel),
        ("model.num_moe_experts" in settings, costs.experts),
        (settings.get("model.recompute_granularity") == "full", costs.recompute),
    )
    layer = costs.layer_of_micro_batch * (1 + sum(share for applies, share in shares if applies))
    return costs.iteration + layers * costs.layer + micro_batches * (costs.micro_batch + layers * layer)


def _layers(request: Request) -> int | None:
    """Layers of a rank; None where the request does not state the model's."""
    layers = request.integer("model.num_layers")
    return math.ceil(layers / request.parallel_size("pipeline_model")) if layers else None


def _micro_batches(request: Request) -> int | None:
    """Micro-batches of a rank in one iteration; None where the request does not state the batch sizes and the world size."""
    micro, whole = request.integer("train.micro_batch_size"), request.integer("train.global_batch_size")
    if not (micro and whole and request.world_size):
        return None
    model_parallel = math.prod(request.parallel_size(name) for name in ("tensor_model", "pipeline_model", "context"))
    return max(whole // (micro * max(request.world_size // max(model_parallel, 1), 1)), 1)


def _unmeasured(request: Request) -> list[str]:
    settings = request.settings
    features = {
        "experts": "model.num_moe_experts" in settings,
        "Transformer Engine's layers": settings.get("model.transformer_impl") == "transformer_engine",
        "compiled code": settings.get("model.torch_compile"),
        "CUDA graphs": settings.get("model.cuda_graph_impl", "none") != "none",
        "GPU metrics": request.wants_nsys and request.wants_gpu_metrics,
    }
    return [feature for feature, present in features.items() if present]


def readable(size: float) -> str:
    """Bytes with a unit: `350 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
