"""Write the tables of docs/reference/support.md: what is tested with what (framework, profiler, executor, version).

  python tools/support_table.py

tests/test_repository.py checks that the page is current.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.frameworks.bridge_environment import BRIDGE_FOR_CORE  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "support.md"

COLUMNS = ("a process alone", "torchrun, one machine", "torchrun, several", "Slurm", "Ray")

#: Files of tests that several rows rest on.
_EXAMPLES = ("frameworks/test_examples.py", "gpu/test_frameworks.py")
_BRIDGE = ("gpu/test_bridge.py",)
_CHAIN = ("system/test_nsys.py", "gpu/test_chain.py")
_SLURM = ("system/test_slurm.py",)
_ALONE, _TORCHRUN, _SEVERAL, _SRUN, _RAY = COLUMNS

#: Framework, profiler, and for each column in which it was seen to work the files in `tests` that show it.
TABLE: list[tuple[str, str, dict[str, tuple[str, ...]]]] = [
    ("Megatron-Core, this project's recipes", "torch", {
        _ALONE: ("recipes/test_megatron_loop.py", "gpu/test_endings.py"),
        _TORCHRUN: ("launch/test_experiment.py", "gpu/test_chain.py"), _SEVERAL: _SLURM, _SRUN: _SLURM,
    }),
    ("", "nsys", {_ALONE: ("gpu/test_endings.py",), _TORCHRUN: _CHAIN, _SEVERAL: _SLURM, _SRUN: _SLURM}),
    ("", "memory", {_ALONE: ("gpu/test_out_of_memory.py",), _TORCHRUN: ("gpu/test_chain.py",)}),
    ("Megatron Bridge (`ProfilingCallback`)", "torch", {
        _ALONE: ("frameworks/test_bridge_pretrain.py",), _TORCHRUN: ("frameworks/test_bridge_pretrain.py", *_BRIDGE),
    }),
    ("", "nsys", {_TORCHRUN: _BRIDGE}),
    ("", "memory", {_TORCHRUN: _BRIDGE}),
    ("A loop of your own (`ProfilingHook`)", "torch", {
        _ALONE: ("capture/test_captures.py",), _TORCHRUN: ("capture/control/test_trigger.py",),
    }),
    ("", "nsys", {_TORCHRUN: ("system/test_nsys.py",)}),
    ("Any script (`bridge-profiling run`)", "torch", {
        _ALONE: ("frameworks/test_iterations.py",), _TORCHRUN: ("frameworks/test_unchanged_scripts.py",), _SEVERAL: _SLURM,
        _SRUN: _SLURM,
    }),
    ("", "nsys", {_TORCHRUN: ("system/test_nsys.py",)}),
    ("DistributedDataParallel", "torch", {_TORCHRUN: _EXAMPLES}),
    ("FullyShardedDataParallel", "torch", {_TORCHRUN: _EXAMPLES}),
    ("`fully_shard`", "torch", {_TORCHRUN: _EXAMPLES}),
    ("DeepSpeed, ZeRO 0 to 3", "torch", {_TORCHRUN: ("frameworks/test_deepspeed.py", *_EXAMPLES)}),
    *((name, "torch", {_ALONE: (file,), _TORCHRUN: _EXAMPLES}) for name, file in (
        ("Lightning", "frameworks/test_lightning.py"),
        ("Hugging Face Trainer", "frameworks/test_hugging_face.py"),
        ("Accelerate", "frameworks/test_hugging_face.py"),
    )),
    ("Workers of Ray (NeMo RL's variables)", "torch", {_RAY: ("system/test_ray_workers.py",)}),
    ("", "nsys", {_RAY: ("system/test_ray_workers.py",)}),
    ("A running job (`bridge-profiling trigger`)", "torch", {
        _ALONE: ("gpu/test_on_demand.py",), _TORCHRUN: ("capture/control/test_trigger.py",),
    }),
    ("", "nsys", {_ALONE: ("system/test_nsys.py",)}),
]  # fmt: skip


#: Its names: a script, which belongs to no package.
VERSIONS = runpy.run_path(str(ROOT / "tools" / "versions.py"))

#: What `make test-versions` shows of a release of megatron-core, and what `make test-gpu` has shown on GPUs with torch 2.11.
VERSION_COLUMNS = ("Python", "torch", "recipes, layouts, checkpoints, resumes", "Megatron Bridge's `pretrain`", "on GPUs")
_ON_GPUS = {
    "0.19.2": "GPU, one and two: Transformer Engine's layers, Bridge",
}


def _versions() -> str:
    """The table of versions as Markdown."""
    pins = (ROOT / "constraints.txt").read_text()
    python, torch = VERSIONS["PYTHON"], re.search(r"^torch==(\S+)$", pins, re.M).group(1)
    lines = [f"| megatron-core | {' | '.join(VERSION_COLUMNS)} |", "|---" * (len(VERSION_COLUMNS) + 1) + "|"]
    for release in VERSIONS["TESTED"]:
        bridge = BRIDGE_FOR_CORE[release.rpartition(".")[0]]
        assert (ROOT / "tests" / "versions" / f"bridge-{bridge}.txt").is_file()
        lines.append(f"| {release} | {python} | {torch} | CPU | {bridge}: CPU | {_ON_GPUS.get(release, 'no')} |")
    return "\n".join(lines)


def _table() -> str:
    """The table as Markdown: each framework with all three profilers; what is left out of TABLE is not supported anywhere."""
    seen: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {}
    framework = ""
    for name, profiler, cells in TABLE:
        framework = name or framework
        seen.setdefault(framework, {})[profiler] = cells
    lines = [f"| | profiler | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for framework, profilers in seen.items():
        for profiler in ("torch", "nsys", "memory"):
            cells = profilers.get(profiler, {})
            marks = [_seen_on(cells[column]) if column in cells else "no" for column in COLUMNS]
            lines.append(f"| {framework if profiler == 'torch' else ''} | {profiler} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _seen_on(files: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys("GPU" if file.startswith("gpu/") else "CPU" for file in sorted(files)[::-1]))


def missing() -> list[str]:
    """Files of tests that the table names and that `make test-versions` runs, as far as they do not exist."""
    named = {f"tests/{file}" for *_, cells in TABLE for files in cells.values() for file in files}
    named |= {path for paths in VERSIONS["PARTS"].values() for path in paths}
    return sorted(path for path in named if not (ROOT / path).is_file())


def page() -> str:
    """The page with both tables."""
    text = PAGE.read_text()
    for name, table in (("table", _table()), ("versions", _versions())):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    if names := missing():
        sys.exit("the table names what does not exist: " + ", ".join(names))
    PAGE.write_text(page())
