"""Writes the small traces that tests/traces/torch_versions holds of the torch installed here: a CPU is enough.

    PYTHONPATH=. python tools/kineto_traces.py tests/traces/torch_versions

Two iterations of a small model, on one rank with gloo: `hook` is captured by ProfilingHook (iteration 1), `plain` by
torch.profiler with shapes, stacks and memory, `python_export` with shapes and memory by the exporter in Python that torch has
since 2.13. The text stays as the exporter wrote it, except for the names of this machine's folders and its host.
"""

from __future__ import annotations

import gzip
import inspect
import lzma
import re
import socket
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ParallelLayout, ProfilingHook

_ROOT = Path(__file__).resolve().parents[1]

#: What an absolute path of this machine looks like.
_PATH = re.compile(r"/(?:home|opt|root|tmp|usr|work)/[^\"\s,;]*")


def main(folder: Path) -> None:
    """Write the traces of the installed torch into a folder."""
    version = torch.__version__.split("+")[0]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as made:
        traces = {"hook": _by_the_hook(Path(made)), **_by_torch(Path(made))}
    dist.destroy_process_group()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in traces.items():
        path = folder / f"{name}-{version}.json.xz"
        path.write_bytes(lzma.compress(_without_names_of_this_machine(text).encode(), preset=9))
        print(f"{path}: {path.stat().st_size:,} bytes")


def _train(iteration_of: Any, phase_of: Any) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(2):
        with iteration_of(iteration):
            with phase_of("data-loading"):
                inputs = torch.randn(8, 16)
            with phase_of("forward"):
                loss = model(inputs).square().mean()
            with phase_of("backward"):
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            with phase_of("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


def _by_the_hook(folder: Path) -> str:
    config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2, record_shapes=True)
    config.output_dir = str(folder)
    config.finalize()
    with ProfilingHook(config, rank=0, layout=ParallelLayout(world_size=1)) as hook:
        _train(hook.iteration, hook.range)
    (trace,) = folder.glob("torch/iter-1-2/rank-0.*")
    return gzip.decompress(trace.read_bytes()).decode()


def _by_torch(folder: Path) -> dict[str, str]:
    _train(nullcontext, nullcontext)  # what is only done the first time
    with torch.profiler.profile(record_shapes=True, with_stack=True, profile_memory=True) as profile:
        _train(_iteration, torch.profiler.record_function)
    profile.export_chrome_trace(str(folder / "plain.json"))
    traces = {"plain": (folder / "plain.json").read_text()}
    if "use_python_export" in inspect.signature(profile.export_chrome_trace).parameters:
        with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
            _train(_iteration, torch.profiler.record_function)
        profile.export_chrome_trace(str(folder / "python_export.json"), use_python_export=True)
        traces["python_export"] = (folder / "python_export.json").read_text()
    return traces


def _iteration(number: int) -> torch.profiler.record_function:
    return torch.profiler.record_function(f"ProfilerStep#{number}")


def _without_names_of_this_machine(text: str) -> str:
    for name in (str(_ROOT), sys.prefix, sys.base_prefix, tempfile.gettempdir()):
        text = text.replace(f"{name}/", "")
    text = text.replace(f'"{socket.gethostname()}"', '"host"')
    if left := _PATH.search(text):
        raise SystemExit(f"a path of this machine is left in the trace: {left[0]}")
    return text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
