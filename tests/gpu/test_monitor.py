"""What the monitor reads of real GPUs, against nvidia-smi and against work of known size."""

from __future__ import annotations

import csv
import shutil
import subprocess
import threading
from contextlib import contextmanager
from time import monotonic, sleep

import pytest

from bridge_profiling.monitor import Monitor
from bridge_profiling.monitor.gpus import Gpus

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.timeout(300)]
pytest.importorskip("pynvml")
pytest.importorskip("torch")

#: What nvidia-smi calls what the monitor reads, how many of the monitor's units its unit is, and how far the two may be apart:
#: they are not read in the same instant.
SMI = {
    "utilization_ratio": ("utilization.gpu", 0.01, 0.15),
    "memory_used_bytes": ("memory.used", 1 << 20, 64 << 20),
    "memory_total_bytes": ("memory.total", 1 << 20, 1 << 20),
    "power_watts": ("power.draw.instant", 1, 120),
    "power_limit_watts": ("enforced.power.limit", 1, 1),
    "temperature_celsius": ("temperature.gpu", 1, 3),
    "sm_clock_hertz": ("clocks.sm", 1e6, 150e6),
    "memory_clock_hertz": ("clocks.mem", 1e6, 5e6),
}


def nvidia_smi(uuid):
    """The same metrics as nvidia-smi reports them; None where it says that it cannot."""
    fields = ",".join(field for field, _, _ in SMI.values())
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:  # an older one has no instant power
        command[2] = command[2].replace("power.draw.instant", "power.draw")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = csv.reader([done.stdout.strip()])
    found = {}
    for (metric, (_, unit, _)), value in zip(SMI.items(), row, strict=True):
        try:
            found[metric] = float(value) * unit
        except ValueError:
            found[metric] = None
    return found


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


@contextmanager
def busy():
    """Matrix products on the first GPU, one after the other."""
    import torch

    factor = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    with repeated(lambda: [factor @ factor for _ in range(20)], warm_seconds=4):
        yield


@pytest.fixture(scope="module")
def uuid():
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}".replace("GPU-GPU-", "GPU-")


def test_nvml_and_nvidia_smi_agree_while_the_gpu_works(uuid):
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi on PATH")
    gpus = Gpus([uuid])
    assert gpus.unavailable is None
    pairs: dict[str, list[tuple[float, float]]] = {}
    with busy():
        for _ in range(5):
            (ours,) = gpus.read()
            for metric, value in nvidia_smi(uuid).items():
                if value is None:
                    # nvidia-smi cannot say it either.
                    assert metric in ours.unavailable or metric == "power_watts"
                else:
                    pairs.setdefault(metric, []).append((ours.values[metric], value))
    gpus.close()
    assert {"memory_used_bytes", "temperature_celsius", "sm_clock_hertz"} <= pairs.keys()
    for metric, both in pairs.items():
        nearest = min(abs(ours - smi) for ours, smi in both)
        assert nearest <= SMI[metric][2], (metric, both)
    if "utilization_ratio" in pairs:
        assert max(ours for ours, _ in pairs["utilization_ratio"]) > 0.5


@pytest.mark.parametrize(
    ("over_pcie", "metric"),
    [
        (True, "pcie_receive_bytes_per_second"),
        pytest.param(False, "nvlink_transmit_bytes_per_second", marks=pytest.mark.needs("gpus2")),
    ],
)
def test_a_copy_of_known_size_is_seen_on_its_link(uuid, over_pcie, metric):
    import torch

    whole = torch.empty(1 << 30, dtype=torch.uint8)
    source, target = (whole.pin_memory(), whole.to("cuda:0")) if over_pcie else (whole.to("cuda:0"), whole.to("cuda:1"))
    gpus, rates, copies = Gpus([uuid]), [], []
    with repeated(lambda: copies.append(target.copy_(source, non_blocking=True))):
        gpus.read()
        began, first = monotonic(), len(copies)
        while monotonic() - began < 3:
            sleep(0.2)
            (readings,) = gpus.read()
            rates += [readings.values[metric]] if metric in readings.values else []
        rate = (len(copies) - first) * whole.numel() / (monotonic() - began)
    gpus.close()
    if not rates:
        pytest.skip(f"the driver reports none: {readings.unavailable[metric]}")
    # What goes over the wire has packet headers too, and a short window may meet a pause.
    assert 0.7 * rate < sorted(rates)[len(rates) // 2] < 1.5 * rate


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
