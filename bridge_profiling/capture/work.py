"""Model FLOPs of an iteration, the peak of its device, and the share of that peak that was reached (MFU).

This is arithmetic over numbers that the training loop knows in advance. It runs when a manifest is written, never in an
iteration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bridge_profiling.errors import require

#: The precision of the matrix products. `tf32` is fp32 on tensor cores, where torch is allowed to use them.
Precision = Literal["fp8", "bf16", "fp16", "tf32", "fp32"]

#: Dense peaks of one device in TFLOP/s, by a part of its CUDA name; the first match counts. Sparse figures of data sheets are
#: halved. fp32 is the peak of the CUDA cores.
#: H100 SXM and PCIe: NVIDIA H100 Tensor Core GPU Architecture, v1.04, table 2. NVL, H200, GH200: their data sheets (2024).
#: A100, L40S, H20: their data sheets. B200, GB200, B300, GB300: NVIDIA Blackwell and Blackwell Ultra data sheets (2025).
#: H800 and A800 compute as H100 and A100 do.
_HOPPER_SXM = {"fp8": 1978.9, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9}
_HOPPER_NVL = {"fp8": 1670.5, "bf16": 835.5, "tf32": 417.5, "fp32": 60.0}
_BLACKWELL = {"fp8": 4500.0, "bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0}
_GRACE_BLACKWELL = {"fp8": 5000.0, "bf16": 2500.0, "tf32": 1250.0, "fp32": 80.0}
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"GB[23]00", _GRACE_BLACKWELL),
    (r"B[23]00", _BLACKWELL),
    (r"GH200", _HOPPER_SXM),
    (r"H[12]00 NVL", _HOPPER_NVL),
    (r"H[18]00 PCIe", {"fp8": 1513.0, "bf16": 756.0, "tf32": 378.0, "fp32": 51.2}),
    (r"H200|H[18]00", _HOPPER_SXM),
    (r"H20", {"fp8": 296.0, "bf16": 148.0, "tf32": 74.0, "fp32": 44.0}),
    (r"A[18]00", {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (r"L40S", {"fp8": 733.0, "bf16": 362.0, "tf32": 183.0, "fp32": 91.6}),
)

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


@dataclass(frozen=True)
class Device:
    """The device of a rank.

    Attributes:
        name: its CUDA name; None where this process has not used a GPU.
        peak_tflops: its dense peak in the training's precision; None where that is unknown.
        reason: why the peak is unknown.
    """

    name: str | None
    peak_tflops: float | None
    reason: str | None


def device_of_this_process(precision: Precision, stated_peak_tflops: float | None) -> Device:
    """The device that this process uses already, with its peak. Initializes no device: that may be wrong or slow here.

    Args:
        precision: the training's precision.
        stated_peak_tflops: the peak that the user states; it wins over the table.
    """
    torch = sys.modules.get("torch")
    device = Device(None, None, f"no GPU is in use, and the peak of a CPU is unknown: {_STATE_IT}")
    if torch is not None and torch.cuda.is_initialized():
        try:
            name = str(torch.cuda.get_device_name())
            device = Device(name, *peak_tflops(name, precision))
        except RuntimeError as error:
            # A device with a pending error raises in every call, and the manifest must still be written.
            device = Device(None, None, f"CUDA does not name its device: {error}")
    return Device(device.name, stated_peak_tflops, None) if stated_peak_tflops else device


def peak_tflops(name: str, precision: Precision) -> tuple[float | None, str | None]:
    """The dense peak of a device in TFLOP/s, or None and the reason."""
    if re.search(r"\bMIG\b", name):
        return None, f"{name} is a part of a GPU: {_STATE_IT}"
    of_device = next((peaks for part, peaks in _PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), None)
    if of_device is None:
        return None, f"the peak of {name} is unknown: {_STATE_IT}"
    # Tensor cores are equally fast in bf16 and fp16.
    peak = of_device.get("bf16" if precision == "fp16" else precision)
    return peak, None if peak else f"{name} has no {precision}: {_STATE_IT}"


def model_tflops_per_gpu(work: IterationWork, durations_ns: Sequence[int]) -> list[float]:
    """Model TFLOP/s that one device reached in each iteration, to four digits.

    Args:
        work: of one iteration.
        durations_ns: nanoseconds of each iteration.
    """
    return [_four_digits(work.model_flops / work.devices / max(duration, 1) / 1e3) for duration in durations_ns]


def utilizations(reached_tflops: Sequence[float], device: Device) -> list[float] | None:
    """MFU of each iteration, a share from 0 to 1; None where the device's peak is unknown."""
    peak = device.peak_tflops
    return [_four_digits(reached / peak) for reached in reached_tflops] if peak else None


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
