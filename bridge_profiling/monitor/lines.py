"""Samples as lines to read on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TextIO

from bridge_profiling.monitor.alerts import Alert
from bridge_profiling.monitor.readings import Readings, Sample

_GIB = 1 << 30


class Lines:
    """Writes a line for each GPU and each process.

    Args:
        stream: where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, sample: Sample) -> None:
        """Write a sample."""
        time = datetime.fromtimestamp(sample.unix_seconds).strftime("%H:%M:%S")
        for line in (*_gpus(sample), *_processes(sample)):
            self._stream.write(f"{time}  {line}\n")
        self._stream.flush()

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Nothing: the log has it."""

    def close(self) -> None:
        """Nothing: the stream is the caller's."""


def _gpus(sample: Sample) -> Iterator[str]:
    if "gpus" in sample.unavailable:
        yield f"GPUs unavailable: {sample.unavailable['gpus']}"
    for gpu in sample.gpus:
        head = f"GPU {gpu.identity['gpu']}  {gpu.identity['name'] or 'unnamed'}"
        if not gpu.values:
            yield f"{head}  unavailable: {next(iter(gpu.unavailable.values()))}"
            continue
        total = _value(gpu, "memory_total_bytes", "{:.1f}", 1 / _GIB)
        parts = [
            _value(gpu, "utilization_ratio", "{:4.0%} busy"),
            f"{_value(gpu, 'memory_used_bytes', '{:6.1f}', 1 / _GIB)} of {total} GiB",
            _value(gpu, "power_watts", "{:5.0f} W"),
            _value(gpu, "temperature_celsius", "{:3.0f} °C"),
            _value(gpu, "sm_clock_hertz", "{:5.0f} MHz", 1e-6),
            f"PCIe {_both_ways(gpu, 'pcie')} GB/s",
            f"NVLink {_both_ways(gpu, 'nvlink')} GB/s",
        ]
        yield f"{head}  {'  '.join(parts)}"


def _processes(sample: Sample) -> Iterator[str]:
    if "processes" in sample.unavailable:
        yield f"processes unavailable: {sample.unavailable['processes']}"
    for process in sample.processes:
        head = f"process {process.identity['pid']} {process.identity['name'] or ''}".rstrip()
        if not process.values:
            yield f"{head}  unavailable: {next(iter(process.unavailable.values()))}"
            continue
        cpu = _value(process, "cpu_ratio", "{:5.0%} of a core")
        yield f"{head}  {cpu}  {_value(process, 'resident_memory_bytes', '{:6.2f} GiB', 1 / _GIB)}"


def _both_ways(gpu: Readings, link: str) -> str:
    out, back = (_value(gpu, f"{link}_{way}_bytes_per_second", "{:.2f}", 1e-9) for way in ("transmit", "receive"))
    return f"{out} out {back} in"


def _value(readings: Readings, metric: str, form: str, scale: float = 1.0) -> str:
    return form.format(readings.values[metric] * scale) if metric in readings.values else "unavailable"
