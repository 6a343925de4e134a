"""How many bytes a profile will have, estimated from what such traces had on an H200.

A trace grows with the operators it holds, and those with layers × micro-batches: a layer of one micro-batch, forward and
backward, is the unit here. Measured with `gpt_125m` (12 layers, hidden 768, no Transformer Engine) on one H200, megatron-core
0.16.1, torch 2.11, nsys 2024.2.3, window of 2 iterations: bytes per unit and iteration were the same within 5 % for 4 and 8
micro-batches and for 12 and 24 layers. Another model (8 layers, hidden 2048, TP=2) had up to twice as many.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge_profiling.doctor.request import Request

#: How far off either way the estimate may be: layers differ in their operators, and fused ones have fewer.
UNCERTAINTY = 3

#: The same where the model is not known, and the one below is taken instead.
UNCERTAINTY_UNKNOWN_MODEL = 30

#: Layers × micro-batches on a rank, when the request does not tell: 12 layers, 8 micro-batches.
_UNKNOWN_MODEL = 96

#: Bytes per layer, micro-batch and iteration: what is kept, and what is written for a moment beside it.
_TORCH_TRACE, _TORCH_RAW = 35_000, 330_000
_NSYS_REPORT, _NSYS_SQLITE = 10_000, 30_000
_CHAKRA = 525_000
_MEMORY_HISTORY = 50_000

#: A memory history keeps its last 100,000 events; the largest snapshot seen had 150 bytes for each.
_MEMORY_HISTORY_LIMIT = 15_000_000

#: How much more each option makes of a trace.
_TORCH_SHAPES, _TORCH_STACKS, _TORCH_MEMORY = 1.4, 3.9, 1.2
_NSYS_SHAPES = 3.5


@dataclass(frozen=True)
class TraceSize:
    """An estimate.

    Attributes:
        kept: bytes of one rank's files.
        peak: bytes of one rank while it writes, the kept ones included.
        uncertainty: factor by which both may be wrong, either way.
        assumed: what the estimate had to assume; empty where the request told all.
    """

    kept: int
    peak: int
    uncertainty: int
    assumed: str


def estimate(request: Request) -> TraceSize:
    """The size of one rank's capture."""
    profiling = request.profiling
    units, assumed = _units(request)
    iterations = max(profiling.profile_step_end - profiling.profile_step_start, 1)
    kept, passing = 0.0, 0.0
    if profiling.use_pytorch_profiler:
        factor = _TORCH_SHAPES if profiling.wants_shapes else 1.0
        factor *= _TORCH_STACKS if profiling.pytorch_profiler_collect_callstack else 1.0
        factor *= _TORCH_MEMORY if profiling.pytorch_profiler_profile_memory else 1.0
        kept += factor * _TORCH_TRACE * iterations * units
        # Kineto writes JSON, which is compressed afterwards.
        passing += factor * _TORCH_RAW * iterations * units
        kept += (_CHAKRA if profiling.pytorch_profiler_collect_chakra else 0) * iterations * units
    if request.wants_nsys:
        factor = _NSYS_SHAPES if profiling.record_shapes else 1.0
        exported = profiling.nsys_export_sqlite or any(option.startswith("--export") for option in request.nsys_options)
        kept += factor * (_NSYS_REPORT + (_NSYS_SQLITE if exported else 0)) * iterations * units
        passing += factor * _NSYS_REPORT * iterations * units
    if profiling.record_memory_history:
        recorded = max(profiling.profile_step_end - request.settings.train.start_iteration, 1)
        kept += min(_MEMORY_HISTORY * recorded * units, _MEMORY_HISTORY_LIMIT)
    uncertainty = UNCERTAINTY_UNKNOWN_MODEL if assumed else UNCERTAINTY
    return TraceSize(int(kept), int(kept + passing), uncertainty, assumed)


def _units(request: Request) -> tuple[float, str]:
    """Layers × micro-batches of a rank in one iteration, and what had to be assumed for it."""
    model, train = request.settings.model, request.settings.train
    if not (model.num_layers and train.micro_batch_size and train.global_batch_size and request.world_size):
        return _UNKNOWN_MODEL, "12 layers and 8 micro-batches, since the request does not tell"
    sharing = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    data_parallel = max(request.world_size // max(sharing, 1), 1)
    micro_batches = max(train.global_batch_size // (train.micro_batch_size * data_parallel), 1)
    return model.num_layers / model.pipeline_model_parallel_size * micro_batches, ""


def readable(size: float) -> str:
    """Bytes as one reads them: `350 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
