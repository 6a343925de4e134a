"""Code blocks of the documents that name a utility, ours or theirs, run or are checked; features.txt says why others do not."""

import inspect
import json
import re
import shlex
from functools import cache, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nemo_run as run
import pynvml
import pytest
import torch

from bridge_profiling import easy
from bridge_profiling.nsys.command import check_extra_args, check_trace
from bridge_profiling.run import Run
from bridge_profiling.settings.profiling import ProfilingConfig
from bridge_profiling.settings.ray import VARIABLES, RayRequest
from tests.monitor.conftest import driver  # noqa: F401 - a fixture
from tools.feature_table import features

_DOCUMENTS = Path(__file__).parent / "documents"

#: Each document, by its name in features.txt.
DOCUMENTS = {
    "bridge": "megatron-bridge",
    "rl": "nemo-rl-profiling",
    "speed": "nemo-rl-performance",
    "torch": "profiling-tools",
    "guide": "gpu-profiling-guide",
}

#: Imports of the documents' own utilities, and ours.
IMPORTS = {
    "from megatron.bridge.training.config import": "from bridge_profiling import",
    "from megatron.bridge.recipes.run_plugins import": "from bridge_profiling.plugins import",
    "from profiling_lab.utils.easy_profiler import": "from bridge_profiling.easy import",
    "from nemo_rl.utils.monitoring import": "from bridge_profiling.easy import",
}


@cache
def blocks() -> dict[str, str]:
    """The text of every block, by document and number."""
    found: dict[str, str] = {}
    for document in DOCUMENTS.values():
        text = (_DOCUMENTS / f"{document}.md.txt").read_text(encoding="utf-8")
        for number, match in enumerate(re.finditer(r"^```[^\n`]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
            found[f"{document} {number}"] = match[1]
    return found


def source(name: str) -> str:
    """A block with its imports adapted."""
    return reduce(lambda text, pair: text.replace(*pair), IMPORTS.items(), blocks()[name])


def listed() -> list[tuple[str, str]]:
    """Each block that features.txt lists, as `blocks` names it, and the test that runs or checks it, or the page."""
    return [(f"{DOCUMENTS[row.guide]} {number}", row.evidence) for row in features() for number in row.blocks]


def execute(name, **names):
    """Run a block with these names defined; returns all names."""
    space = {"torch": torch, **names}
    exec(compile(source(name), name, "exec"), space)
    return space


class Loop:
    """What the blocks leave to the reader: a model, data, an optimizer, a loss."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(1))
        self.batch = torch.randn(4, 3, 8, 8)
        self.model(self.batch)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.criterion = torch.nn.functional.mse_loss
        self.dataloader = [self.batch] * 12


def test_each_block_is_listed_once():
    assert sorted(name for name, _ in listed()) == sorted(blocks())
    tests = {evidence for _, evidence in listed() if evidence.startswith("test_")}
    assert tests | {"test_each_block_is_listed_once"} == {name for name in globals() if name.startswith("test_")}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (1, {"use_nsys_profiler": True, "profile_ranks": [0, 1]}),
        (4, {"use_pytorch_profiler": True, "record_shapes": True}),
        (6, {"record_memory_history": True, "memory_snapshot_path": "memory_trace.pickle"}),
    ],
)
def test_configs(block, expected):
    cfg = SimpleNamespace()
    execute(f"megatron-bridge {block}", cfg=cfg)
    assert isinstance(cfg.profiling, ProfilingConfig)
    cfg.profiling.finalize(train_iters=100, world_size=8)
    found = vars(cfg.profiling)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("block", [3, 5])
def test_plugins(block, tmp_path, monkeypatch):
    """The recipe is the reader's. The experiment is not started: what it would run is checked."""
    task = run.Script("train.py")
    with monkeypatch.context() as patch:
        patch.setattr(run.Experiment, "run", lambda self: None)
        patch.setattr("nemo_run.config.get_nemorun_home", lambda: str(tmp_path))
        # The block leaves the executor's arguments to the reader.
        text = source(f"megatron-bridge {block}").replace("SlurmExecutor(...)", "SlurmExecutor(account='mine')")
        found: dict[str, Any] = {"your_recipe_function": lambda: task}
        exec(compile(text, "plugins", "exec"), found)
    if block == 3:
        (job,) = found["exp"].jobs
        task = job.task
    else:
        (plugin,) = found["plugins"]
        plugin.setup(task, run.LocalExecutor(ntasks_per_node=2, launcher="torchrun"))
    profiler = "nsys" if block == 3 else "pytorch"
    assert {f"profiling.use_{profiler}_profiler=true", "profiling.profile_step_start=10"} <= set(task.args)


def test_ray_variables():
    found = []
    for line in re.findall("^NRL_.*", blocks()["nemo-rl-profiling 0"], re.MULTILINE):
        variables = dict(word.split("=", 1) for word in shlex.split(line) if word.partition("=")[0] in VARIABLES)
        request = RayRequest.from_environment(variables)
        found.append((request.window.start, request.window.end, request.patterns))
        assert request.selects("dtensor_policy_worker")
    assert found == [(2, 3, ("*policy*",)), (1, 2, ("*policy*", "*vllm*")), (3, 5, ("dtensor_policy_worker",))]


def test_traces_of_nsys():
    """Their words and options are accepted by plugins and by `doctor`; what we write ourselves is refused with the reason."""
    text = "\n".join(blocks()[name] for name, evidence in listed() if evidence == "test_traces_of_nsys")
    traced = re.findall(r"--trace=(\S+)", text)
    assert len(traced) >= 5
    for words in traced:
        check_trace(words.split(","), name="profiling.nsys_trace")
    check_extra_args([*re.findall(r"--(?:delay|duration|cuda-memory-usage)=\S+", text)], name="profiling.nsys_extra_args")


def test_memory_profiler(capsys):
    theirs, ours = execute("nemo-rl-profiling 2")["MemoryProfiler"], easy.MemoryProfiler
    assert {name for name in vars(theirs) if not name.startswith("_")} <= set(dir(ours))
    kinds = []
    for profiler in (theirs(), ours()):
        kinds.append(set(vars(profiler)) | set(profiler.log_memory_stats(3, "after forward") or profiler.memory_stats[0]))
        assert profiler.detect_memory_leaks() is False
    assert kinds[0] == kinds[1]
    assert all(line.startswith("Step 3") for line in capsys.readouterr().out.splitlines())


def test_performance_counter():
    space = execute("nemo-rl-profiling 6")
    space["profiled_function"]()
    for counter in (space["counter"], easy.PerformanceCounter()):
        counter.start_counter("my_function")
        counter.end_counter("my_function")
        assert counter.get_counter_stats("my_function").keys() == {"total_time", "count", "avg_time"}
        assert counter.get_counter_stats("other") is None


def test_torch_profiler_class(tmp_path, monkeypatch, capsys):
    """Its trace is read as any other, with the memory of each operator as torch counts it."""
    monkeypatch.chdir(tmp_path)
    loop, theirs = Loop(), execute("nemo-rl-profiling 3")["PyTorchProfiler"]()
    theirs.optimizer, theirs.compute_loss = loop.optimizer, lambda outputs, batch: outputs.square().mean()
    profile = theirs.profile_model(loop.model, loop.dataloader, num_steps=3)
    with Run(tmp_path / theirs.analyze_profiler_results(profile)["trace_file"]) as found:
        operators, ranges = found.facts.operators, found.facts.operators_by(category="annotation")["name"].to_pylist()
    assert {"model_forward", "backward_pass", "optimizer_step"} <= {*ranges}
    memory = dict(zip(operators["name"].to_pylist(), operators["cpu_memory_self_bytes"].to_pylist(), strict=True))
    expected = {each.key: each.self_cpu_memory_usage for each in profile.key_averages() if each.key in memory}
    assert memory == expected
    assert memory["aten::empty"] > 0
    capsys.readouterr()


def test_quick_benchmark():
    """The guide defines a function; ours takes the same arguments in the same places."""
    theirs = inspect.signature(execute("gpu-profiling-guide 2")["quick_benchmark"])
    assert list(inspect.signature(easy.quick_benchmark).parameters)[: len(theirs.parameters)] == list(theirs.parameters)
    loop = Loop()
    avg_time, throughput = easy.quick_benchmark(loop.model, (4, 3, 8, 8), num_iterations=8, warmup=1)
    assert throughput == pytest.approx(4e3 / avg_time)


def test_gpu_monitor(driver, monkeypatch):  # noqa: F811
    """Both read the same of a GPU, under the same names."""
    driver.add()
    # Theirs asks for the memory without a version.
    memory = pynvml.nvmlDeviceGetMemoryInfo
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle, *version: memory(handle))
    theirs, ours = execute("gpu-profiling-guide 30")["GPUMonitor"](), easy.GPUMonitor()
    assert {name for name in vars(type(theirs)) if not name.startswith("_")} <= set(dir(ours))
    assert inspect.signature(ours.start_logging).parameters.keys() == inspect.signature(theirs.start_logging).parameters.keys()
    (read,), (expected,) = ours.get_metrics(), theirs.get_metrics()
    assert read == pytest.approx(expected, rel=1e-6)


@pytest.mark.integration
def test_easy_profiler(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8)
    # The block defines train_step(model, batch), and calls it without the model.
    text = source("gpu-profiling-guide 35").replace("train_step(batch)\nprint", "train_step(model, batch)\nprint")
    exec(compile(text, "easy_profiler", "exec"), {"model": model, "dataloader": [torch.ones(2, 8)] * 14})
    assert "machine" in capsys.readouterr().out
    assert list((tmp_path / "profiles" / "torch").rglob("*.pt.trace.json.gz"))


def test_training_monitor():
    """On the CPU the guide's figure of memory is 0."""
    loop = Loop()
    space = execute("nemo-rl-performance 9", **vars(loop) | {"model": lambda batch: loop.model(batch).mean()})
    summary = space["monitor"].get_summary()
    assert (summary["iterations"], summary["metrics"]["throughput"] > 0) == (12, True)
    assert isinstance(summary["loss"], float)
    json.dumps(summary)
