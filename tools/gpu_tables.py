"""Captures of one small training on a GPU, with the answers of torch's own tables, to compare our tables with.

    python tools/gpu_tables.py --output DIR [--nsys PROGRAM]

writes `torch/rank-0.pt.trace.json.xz` and `torch/key_averages.json` (torch.profiler with shapes, memory and FLOPs), and
`nsys/NAME.sqlite.xz` for what this machine permits: `memory` (emit_nvtx with shapes, system calls, CUDA's allocations) and
`counters` (emit_nvtx with shapes, GPU metrics). One process each; a minute in all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

WARM_UP, CAPTURED = 6, 3
BATCH, LENGTH, WIDTH, HEADS, WORDS = 8, 1024, 2048, 16, 8192

#: Options of both captures with nsys; the range ends the collection, not the training.
NSYS = (
    *("profile", "--sample=none", "--cpuctxsw=none", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
    *("--kill=none", "--force-overwrite=true", "--export=sqlite"),
)

#: A sample every 10 µs: kernels of 100 µs have some of their own.
FREQUENCY_HZ = 100_000

USAGES = (
    *("count", "cpu_time_total", "self_cpu_time_total", "device_time_total", "self_device_time_total"),
    *("cpu_memory_usage", "self_cpu_memory_usage", "device_memory_usage", "self_device_memory_usage", "flops"),
)


class Block(torch.nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.projection, self.output = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The layer's output, of batch x length x width."""
        heads = self.projection(self.norms[0](states)).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.output(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return states + self.narrow(torch.nn.functional.gelu(self.widen(self.norms[1](states))))


class Training:
    """A model of two layers that reads batches from pinned memory."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        body = [torch.nn.Embedding(WORDS, WIDTH), Block(), Block(), torch.nn.Linear(WIDTH, WORDS)]
        self.model = torch.nn.Sequential(*body).cuda().bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, number: int, annotated: Any) -> float:
        """One iteration, with each phase inside `annotated(name)`."""
        with annotated(f"iteration_{number}"):
            with annotated("data-loading"):
                time.sleep(0.002)
                tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=self.generator).pin_memory()
            with annotated("host-to-device"):
                tokens = tokens.cuda(non_blocking=True)
            with annotated("forward"):
                scores = self.model(tokens)
                loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten())
            with annotated("backward"):
                loss.backward()
            with annotated("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            return loss.item()


def with_torch(folder: Path) -> None:
    """Under torch.profiler; its trace, and its table of operators."""
    training = Training()
    for number in range(WARM_UP):
        training.step(number, torch.profiler.record_function)
    # The tables of both sides then hold allocations by CUDA as well as those of torch's allocator.
    torch.cuda.empty_cache()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True, with_flops=True) as used:
        for number in range(WARM_UP, WARM_UP + CAPTURED):
            training.step(number, torch.profiler.record_function)
        torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "rank-0.pt.trace.json"
    used.export_chrome_trace(str(trace))
    packed(trace)
    rows = {
        "by_name": [row(each) for each in used.key_averages()],
        "by_shapes": [row(each) for each in used.key_averages(group_by_input_shape=True)],
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()},
    }
    (folder / "key_averages.json").write_text(json.dumps(rows, indent=1))


def row(event: Any) -> dict[str, Any]:
    """One row of `key_averages()`."""
    shapes = [list(shape) for shape in event.input_shapes] if event.input_shapes else None
    return {"key": event.key, "shapes": shapes} | {name: getattr(event, name) for name in USAGES}


def under_nsys() -> None:
    """The training that nsys records, in the range of cudaProfilerStart and cudaProfilerStop."""
    training = Training()
    for number in range(WARM_UP):
        training.step(number, nvtx_range)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.profiler.start()
    with torch.autograd.profiler.emit_nvtx(record_shapes=True):
        for number in range(WARM_UP, WARM_UP + CAPTURED):
            training.step(number, nvtx_range)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


@contextlib.contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A range as `torch.profiler.record_function` makes them, for nsys."""
    torch.cuda.nvtx.range_push(name)
    yield
    torch.cuda.nvtx.range_pop()


def record(nsys: str, folder: Path, name: str, *options: str) -> str:
    """Run the training under nsys; what became of it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [nsys, *NSYS, *options, f"--output={folder / name}", sys.executable, __file__, "--under-nsys"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, errors="replace")
    except subprocess.TimeoutExpired:
        return "no answer in 120 s"
    said = re.sub(r"\[[^\n]*?%[^\n]*", "", done.stdout + done.stderr)
    (folder / f"{name}.log").write_text(said)
    report = folder / f"{name}.sqlite"
    if not report.exists():
        kept = folder / f"{name}.nsys-rep"
        if kept.exists():
            return f"not exported, exit code {done.returncode}: {said[-400:]}"
        return f"no report, exit code {done.returncode}: {said[-400:]}"
    (folder / f"{name}.nsys-rep").unlink(missing_ok=True)
    return f"{packed(report):,} bytes"


def packed(file: Path) -> int:
    """Replace a file by its `.xz`; the size."""
    target = file.with_name(file.name + ".xz")
    with file.open("rb") as source, lzma.open(target, "wb", preset=6) as sink:
        shutil.copyfileobj(source, sink)
    file.unlink()
    return target.stat().st_size


def counters_options(nsys: str) -> tuple[str, ...]:
    """The options that sample GPU metrics, by the name that this nsys has for them."""
    said = subprocess.run([nsys, "profile", "--help"], capture_output=True, text=True).stdout
    option = "--gpu-metrics-devices" if "--gpu-metrics-devices" in said else "--gpu-metrics-device"
    asked = subprocess.run([nsys, "profile", f"{option}=help"], capture_output=True, text=True)
    print(f"{option}=help:\n{asked.stdout}{asked.stderr}", flush=True)
    return f"{option}=0", f"--gpu-metrics-frequency={FREQUENCY_HZ}"


def main() -> None:
    """Run all parts, or the one that another process asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--nsys", default=shutil.which("nsys"))
    parser.add_argument("--under-nsys", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--under-torch", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.under_nsys:
        under_nsys()
    elif asked.under_torch:
        with_torch(asked.output / "torch")
    else:
        began = time.monotonic()
        here = [sys.executable, __file__, "--output", str(asked.output)]
        subprocess.run([*here, "--under-torch"], check=True, timeout=120, env=os.environ | {"TEARDOWN_CUPTI": "1"})
        print(f"torch: {time.monotonic() - began:.0f} s", flush=True)
        if asked.nsys:
            folder, usage = asked.output / "nsys", "--cuda-memory-usage=true"
            print("memory:", record(asked.nsys, folder, "memory", "--trace=cuda,nvtx,osrt", usage), flush=True)
            options = counters_options(asked.nsys)
            print("counters:", record(asked.nsys, folder, "counters", "--trace=cuda,nvtx", *options), flush=True)
        print(f"all: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
