"""What the monitor reads of real GPUs while they do work of known size."""

import threading
from contextlib import contextmanager
from time import monotonic, sleep

import pytest

from bridge_profiling.monitor import Monitor
from bridge_profiling.monitor.gpus import Gpus

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.timeout(300)]
pytest.importorskip("pynvml")
pytest.importorskip("torch")

#: Bounds of what a GPU of a data center reports while it computes: a value in another unit lies outside of them.
PLAUSIBLE = {
    "utilization_ratio": (0.5, 1),
    "memory_used_bytes": (128 << 20, 1 << 40),
    "memory_total_bytes": (8 << 30, 1 << 40),
    "power_watts": (40, 2500),
    "power_limit_watts": (40, 2500),
    "temperature_celsius": (15, 110),
    "sm_clock_hertz": (2e8, 4e9),
    "memory_clock_hertz": (2e8, 2e10),
}


@contextmanager
def repeated(work, warm_seconds=0):
    """Work on the first GPU, done over and over in a thread for as long as the block lasts; warm before it begins."""
    import torch

    stop, warm, began = threading.Event(), threading.Event(), monotonic()

    def repeat():
        while not stop.is_set():
            work()
            torch.cuda.synchronize()
            if monotonic() - began > warm_seconds:
                warm.set()

    worker = threading.Thread(target=repeat)
    worker.start()
    try:
        assert warm.wait(120)
        yield
    finally:
        stop.set()
        worker.join()


def test_what_nvml_reports_is_plausible_while_the_gpu_works():
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".replace("GPU-GPU-", "GPU-")
    gpus, factor = Gpus([uuid]), torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    assert gpus.unavailable is None
    with repeated(lambda: [factor @ factor for _ in range(20)], warm_seconds=4):
        (readings,) = gpus.read()
    gpus.close()
    assert {"memory_used_bytes", "temperature_celsius", "sm_clock_hertz"} <= readings.values.keys()
    for metric, (low, high) in PLAUSIBLE.items():
        # A driver may withhold some of them.
        assert metric in readings.unavailable or low <= readings.values[metric] <= high, (metric, readings)


def test_a_cuda_graph_can_be_captured_beside_the_monitor():
    """A call of CUDA from another thread would break the capture; the monitor makes none."""
    import torch

    held = torch.ones(1024, device="cuda:0")
    with Monitor(interval=0.001) as monitor:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = held * 2
                sleep(0.02)
            graph.replay()
            monitor.training.end_step(loss=result.sum())
        torch.cuda.synchronize()
    assert result.sum().item() == 2048
    assert monitor.sample.training.unavailable["loss"].startswith("it is on the GPU")
