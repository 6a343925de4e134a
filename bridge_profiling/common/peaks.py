"""Peaks of GPUs as their makers state them: dense compute by precision, bandwidth of memory and of links."""

from __future__ import annotations

import re
from typing import Literal

#: The precision of matrix products. `tf32` is fp32 on tensor cores, where torch is allowed to use them.
Precision = Literal["fp8", "bf16", "fp16", "tf32", "fp32"]

#: Dense peaks of one device in TFLOP/s, by a part of its CUDA name; the first match counts. Sparse figures of data sheets are
#: halved. fp32 is the peak of the CUDA cores.
#: H100 SXM and PCIe: NVIDIA H100 Tensor Core GPU Architecture, v1.04, table 2. NVL, H200, GH200: their data sheets (2024).
#: A100, L40S, H20, V100, T4: their data sheets. B200, GB200, B300, GB300: NVIDIA Blackwell and Blackwell Ultra data sheets
#: (2025). H800 and A800 compute as H100 and A100 do.
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
    (r"V100", {"fp16": 125.0, "fp32": 15.7}),
    (r"T4", {"fp16": 65.0, "fp32": 8.1}),
    (r"L40S", {"fp8": 733.0, "bf16": 362.0, "tf32": 183.0, "fp32": 91.6}),
)


def peaks(name: str) -> dict[str, float]:
    """The dense peaks of a device in TFLOP/s by precision, from its CUDA name; empty for an unknown device or a part of one."""
    if re.search(r"\bMIG\b", name):
        return {}
    return next((found for part, found in _PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), {})


#: Bandwidth of NVLink in one direction and of the device's memory in 1e9 bytes/s, by a part of its CUDA name; the first match
#: counts. Only boards that always have NVLink have a value for it. Sources as above; data sheets add up both directions.
_BANDWIDTHS: tuple[tuple[str, float | None, float | None], ...] = (
    (r"G?B[23]00", 900.0, 8000.0),
    (r"GH200 480GB", 450.0, 4000.0),
    (r"GH200 144G", 450.0, 4900.0),
    (r"GH200", 450.0, None),
    (r"H200 NVL", None, 4800.0),
    (r"H200", 450.0, 4800.0),
    (r"H100 NVL", None, 3900.0),
    (r"H100 PCIe", None, 2000.0),
    (r"H100", 450.0, 3350.0),
    (r"H800 PCIe", None, 2000.0),
    (r"H800", 200.0, 3350.0),
    (r"H20", 450.0, 4000.0),
    (r"A100-SXM\d-40GB", 300.0, 1555.0),
    (r"A100-SXM\d-80GB", 300.0, 2039.0),
    (r"A100-PCIE-40GB", None, 1555.0),
    (r"A100 80GB PCIe", None, 1935.0),
    (r"A800-SXM\d-80GB", 200.0, 2039.0),
    (r"V100-SXM\d-\d\dGB", 150.0, 900.0),
    (r"L40S", None, 864.0),
    (r"T4", None, 320.0),
)


def link_gbs(name: str) -> float | None:
    """Bandwidth of a device's NVLink in one direction, in 1e9 bytes/s, from its CUDA name; None without one, or if unknown."""
    return _bandwidths(name)[0]


def memory_gbs(name: str) -> float | None:
    """Bandwidth of a device's memory in 1e9 bytes/s, from its CUDA name; None for an unknown device or a part of one."""
    return _bandwidths(name)[1]


def _bandwidths(name: str) -> tuple[float | None, float | None]:
    if re.search(r"\bMIG\b", name):
        return None, None
    known = ((link, memory) for part, link, memory in _BANDWIDTHS if re.search(rf"\b{part}\b", name))
    return next(known, (None, None))
