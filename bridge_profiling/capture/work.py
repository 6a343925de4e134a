"""The work of an iteration, and the share of the device's peak that it reached (MFU)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bridge_profiling import manifest
from bridge_profiling.common.errors import require
from bridge_profiling.common.peaks import Precision, peaks

_STATE_IT = "type profiling.peak_tflops=… to state it"


@dataclass(frozen=True, kw_only=True)
class IterationWork:
    """The computation of one iteration, over all ranks together.

    Attributes:
        model_flops: floating-point operations of the model, forward and backward: two for each multiplication and addition in
            its matrix products, with attention scores and without recomputation (PaLM's definition).
        tokens: tokens trained on.
        devices: number of devices that share the work, over all data-parallel, tensor-parallel and pipeline ranks.
        precision: the precision of most of these products; it decides which peak of the device they are compared with.
        attention_flops: the part of `model_flops` in the attention scores, counted over the whole square of positions. With it
            a reader can count them by half, as Megatron-LM does. None where it is unknown.

    Raises:
        ProfilingConfigError: a count is not positive.
    """

    model_flops: float
    tokens: int
    devices: int
    precision: Precision
    attention_flops: float | None = None

    def __post_init__(self) -> None:
        require(
            self.model_flops > 0 and self.tokens > 0 and self.devices > 0,
            f"IterationWork has {self.model_flops} FLOPs, {self.tokens} tokens and {self.devices} devices",
            why="each must be positive",
            instead="Describe one iteration of the whole job, or pass no work at all",
        )


def describe_work(work: IterationWork, stated_peak_tflops: float | None) -> manifest.Work:
    """The manifest's record of the work and the device; a peak that the user states wins over the table.

    Initializes no device: that may be wrong or slow here.
    """
    described = manifest.Work(**asdict(work), reason=f"no GPU is in use, and the peak of a CPU is unknown: {_STATE_IT}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            described.device = str(torch.cuda.get_device_name())
            described.peak_tflops, described.reason = peak_tflops(described.device, work.precision)
        except RuntimeError as error:
            # A device with a pending error raises in every call, and the manifest must still be written.
            described.reason = f"CUDA does not name its device: {error}"
    if stated_peak_tflops:
        described.peak_tflops, described.reason = stated_peak_tflops, None
    return described


def peak_tflops(name: str, precision: Precision) -> tuple[float | None, str | None]:
    """The dense peak of a device in TFLOP/s, or None and the reason."""
    if "MIG" in name.split():
        return None, f"{name} is a part of a GPU: {_STATE_IT}"
    of_device = peaks(name)
    if not of_device:
        return None, f"the peak of {name} is unknown: {_STATE_IT}"
    # Tensor cores are equally fast in bf16 and fp16.
    peak = of_device.get("bf16" if precision == "fp16" else precision)
    return peak, None if peak else f"{name} has no {precision}: {_STATE_IT}"


def throughput(work: IterationWork, peak: float | None, durations_ns: Sequence[int]) -> tuple[list[float], list[float] | None]:
    """Model TFLOP/s that one device reached in each iteration, and its MFU, a share from 0 to 1; both to four digits."""
    reached = [_four_digits(work.model_flops / work.devices / max(duration, 1) / 1e3) for duration in durations_ns]
    return reached, [_four_digits(tflops / peak) for tflops in reached] if peak else None


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
