"""The code blocks of the documents that this project comes from, and what becomes of each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_DOCUMENTS = Path(__file__).parent / "documents"

#: Titles, by file name.
TITLES = {
    "megatron-bridge": "Megatron Bridge: Profiling",
    "nemo-rl-profiling": "NeMo RL: Performance profiling",
    "nemo-rl-performance": "NeMo RL: Performance",
    "profiling-tools": "Chapter 6: Profiling tools",
    "gpu-profiling-guide": "Comprehensive GPU profiling guide",
}

#: Imports of the documents' own utilities, and ours.
IMPORTS = {
    "from megatron.bridge.training.config import": "from bridge_profiling import",
    "from megatron.bridge.recipes.run_plugins import": "from bridge_profiling.plugins import",
    "from profiling_lab.utils.easy_profiler import": "from bridge_profiling.easy import",
    "from nemo_rl.utils.monitoring import": "from bridge_profiling.easy import",
}


#: Reasons that several blocks share.
_ELSEWHERE = {
    "events": "reads `prof.function_events`, which `torch.profiler` does not have; the same question on a capture",
    "plain": "plain PyTorch, in which nothing of ours is named",
    "shell": "a command of another tool",
    "picture": "a picture or a table, not code",
    "setting": "a setting of another project",
}


#: What becomes of each block, by document and number: the test that runs it, or why none does and the page to read instead.
_FATES: dict[str, dict[int, str | tuple[str, str]]] = {
    "megatron-bridge": {
        0: ("picture", "concepts/conflicts.md"),
        1: "test_configs",
        2: ("the system test of nsys started by hand runs it", "how-to/nsys.md"),
        3: "test_plugins",
        4: "test_configs",
        5: "test_plugins",
        6: "test_configs",
    },
    "nemo-rl-profiling": {
        0: "test_ray_variables",
        1: ("plain", "how-to/any-script.md"),
        2: "test_memory_profiler",
        3: "test_torch_profiler_class",
        **dict.fromkeys((4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17), ("events", "how-to/analyze.md")),
        5: ("needs GPUtil, which nobody maintains; `Monitor` reads the same", "how-to/monitor.md"),
        6: "test_performance_counter",
        16: ("needs SciPy for an interval that `compare` computes", "how-to/compare-runs.md"),
        18: ("compares dictionaries; `compare` compares captures", "how-to/compare-runs.md"),
    },
    "profiling-tools": {
        **dict.fromkeys((0, 2, 3, 4), ("plain", "how-to/any-script.md")),
        1: ("picture", "how-to/read-the-page.md"),
        5: ("shell", "how-to/analyze.md"),
        6: ("TensorFlow is out of scope", "how-to/coming-from.md"),
        7: ("shell", "how-to/coming-from.md"),
        8: ("picture", "how-to/read-the-page.md"),
        9: "test_traces_of_nsys",
        10: "test_traces_of_nsys",
        11: ("plain", "how-to/any-script.md"),
        12: ("the test of Nsight Compute runs it on a GPU", "how-to/nsight-compute.md"),
        13: ("plain", "how-to/monitor.md"),
        14: ("plain", "how-to/bench.md"),
        15: ("plain", "how-to/from-symptom-to-setting.md"),
        16: ("plain", "how-to/from-symptom-to-setting.md"),
        17: ("plain", "how-to/from-symptom-to-setting.md"),
    },
    "gpu-profiling-guide": {
        0: ("picture", "how-to/from-symptom-to-setting.md"),
        1: ("picture", "how-to/coming-from.md"),
        2: "test_quick_benchmark",
        3: "test_traces_of_nsys",
        4: ("the system test of nsys started by hand runs it", "how-to/nsys.md"),
        5: ("its schedule with three warm-up iterations is `bridge-profiling run --steps`", "how-to/any-script.md"),
        6: ("plain", "how-to/any-script.md"),
        7: ("one nsys around all ranks; the plugin starts one for each", "how-to/nsys.md"),
        8: ("plain", "how-to/ddp-fsdp.md"),
        9: ("times collectives by hand; the trace has them", "how-to/compare-ranks.md"),
        10: ("DeepSpeed's own profiler; its result goes into the manifest", "how-to/deepspeed.md"),
        11: ("shell", "how-to/deepspeed.md"),
        12: ("setting", "how-to/deepspeed.md"),
        13: ("shell", "how-to/deepspeed.md"),
        **dict.fromkeys((14, 15, 16, 17), ("measures DeepSpeed by hand; the integration captures it", "how-to/deepspeed.md")),
        18: ("plain", "how-to/ddp-fsdp.md"),
        19: ("uses a private module of FSDP; memory of each phase is in the manifest", "how-to/memory.md"),
        20: ("a batch script; the plugins and the Slurm executor write one", "how-to/slurm.md"),
        21: ("clocks are aligned from collectives, without barriers", "how-to/compare-ranks.md"),
        22: ("`bridge-profiling bench collectives` measures it", "how-to/bench.md"),
        23: ("its phases are `bridge_profiling.easy.phase`", "how-to/any-script.md"),
        24: ("`TrainingMonitor.loading` times the loader", "how-to/monitor.md"),
        25: ("`bridge-profiling run --profiler memory` records a snapshot", "how-to/memory.md"),
        26: ("labelled points are `MemoryProfiler`; phases are in the manifest", "how-to/any-script.md"),
        27: ("`MemoryProfiler.detect_memory_leaks` and the monitor's alerts", "how-to/monitor.md"),
        28: ("`bridge-profiling bench collectives` measures it", "how-to/bench.md"),
        29: ("the finding low_overlap reads it from the trace", "how-to/compare-ranks.md"),
        30: "test_gpu_monitor",
        31: ("`bridge-profiling monitor --port` serves the same gauges", "how-to/monitor.md"),
        32: ("shell", "how-to/doctor.md"),
        33: ("picture", "how-to/from-symptom-to-setting.md"),
        34: ("other options, listed there", "how-to/coming-from.md"),
        35: "test_easy_profiler",
        36: ("`quick_benchmark` around a model of torchvision", "how-to/bench.md"),
    },
    "nemo-rl-performance": {
        **dict.fromkeys((0, 1, 2, 10), ("setting", "how-to/from-symptom-to-setting.md")),
        3: ("NeMo RL's own helper", "how-to/bench.md"),
        **dict.fromkeys((4, 5, 6, 11, 12, 13, 14, 15, 16), ("plain", "how-to/from-symptom-to-setting.md")),
        **dict.fromkeys((7, 8, 18), ("plain", "how-to/memory.md")),
        9: "test_training_monitor",
        17: ("its TrainingBenchmark is made and not used; `bench step` measures a step", "how-to/bench.md"),
    },
}
FATES = {f"{document} {number}": fate for document, fates in _FATES.items() for number, fate in fates.items()}


@cache
def blocks() -> dict[str, str]:
    """The text of every block, by document and number."""
    found: dict[str, str] = {}
    for document in TITLES:
        text = (_DOCUMENTS / f"{document}.md.txt").read_text(encoding="utf-8")
        for number, match in enumerate(re.finditer(r"^```[^\n`]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
            found[f"{document} {number}"] = match[1]
    return found


def source(name: str) -> str:
    """A block with its imports adapted."""
    text = blocks()[name]
    for theirs, ours in IMPORTS.items():
        text = text.replace(theirs, ours)
    return text


def table() -> str:
    """The page of the documentation."""
    lines = []
    for document, title in TITLES.items():
        lines += [f"## {title}", "", "| block | begins with | |", "|---|---|---|"]
        for name, text in blocks().items():
            if name.split()[0] == document:
                first = next((line.strip() for line in text.splitlines() if line.strip()), "")
                shown = first[:60].replace("|", "¦").replace("`", "'")
                fate = FATES[name]
                if isinstance(fate, str):
                    told = f"runs: `{fate}`"
                else:
                    told = f"not here: {_ELSEWHERE.get(fate[0], fate[0])} ([page](../{fate[1]}))"
                lines.append(f"| {name.split()[1]} | `{shown}` | {told} |")
        lines.append("")
    return "\n".join(lines)
