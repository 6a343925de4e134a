"""Write the tables of docs/reference/support.md: what is tested with what (framework, profiler, executor, version).

  python tools/support_table.py

tests/test_support_table.py checks that the page is current.
"""

# ruff: noqa: E501 (names of tests are as long as they are)

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.integrations.bridge_environment import BRIDGE_FOR_CORE  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "support.md"

COLUMNS = ("a process alone", "torchrun, one machine", "torchrun, several", "Slurm", "Ray")

_DDP = "tests/integrations/test_ddp_fsdp.py::test_an_example_is_captured_whole_and_trains_as_without"
_GPU_FRAMEWORKS = "tests/gpu/test_frameworks.py::test_each_rank_captures_exactly_the_window"
_GPU_CHAIN = "tests/gpu/test_chain.py::test_the_trace_holds_exactly_the_window"
_GPU_ALONE = "tests/gpu/test_endings.py::test_sigterm_to_a_rank_leaves_what_it_captured_and_exit_code_143"
_SLURM = "tests/system/test_slurm.py::test_exactly_the_ranks_asked_for_are_profiled_in_exactly_the_window"
_SLURM_NSYS = "tests/system/test_slurm.py::test_exactly_the_ranks_asked_for_run_under_nsys"
_MACHINES = "tests/easy/test_launchers.py::test_machines_share_a_folder_and_launches_do_not"

#: Framework, profiler, and for each column in which it was seen to work the tests that show it.
TABLE: list[tuple[str, str, dict[str, list[str]]]] = [
    ("Megatron-Core, this project's recipes", "torch", {
        "a process alone": ["tests/recipes/test_megatron_loop.py::test_the_trace_holds_what_window_and_run_share", _GPU_ALONE],
        "torchrun, one machine": ["tests/launch/test_pretrain.py::test_two_ranks_train_with_the_arguments_as_nemo_run_delivers_them", _GPU_CHAIN],
        "torchrun, several": [_SLURM], "Slurm": [_SLURM],
    }),
    ("", "nsys", {
        "a process alone": [_GPU_ALONE],
        "torchrun, one machine": ["tests/system/test_nsys.py::test_the_ranks_asked_for_run_under_nsys_and_the_others_without", _GPU_CHAIN],
        "torchrun, several": [_SLURM_NSYS], "Slurm": [_SLURM_NSYS],
    }),
    ("", "memory", {
        "a process alone": ["tests/gpu/test_out_of_memory.py::test_the_failed_request_and_who_made_it_can_be_read"],
        "torchrun, one machine": ["tests/gpu/test_chain.py::test_the_memory_history_is_readable_and_holds_more_than_weights"],
    }),
    ("Megatron Bridge (`ProfilingCallback`)", "torch", {
        "a process alone": ["tests/integrations/test_bridge_pretrain.py::test_an_iteration_that_megatron_bridge_skips_does_not_lose_the_others"],
        "torchrun, one machine": ["tests/integrations/test_bridge_pretrain.py::test_the_documented_script_under_torchrun"],
    }),
    ("A loop of your own (`ProfilingHook`)", "torch", {
        "a process alone": ["tests/capture/test_captures.py::test_shapes_are_recorded_when_asked_for"],
        "torchrun, one machine": ["tests/capture/control/test_trigger.py::test_the_job_is_profiled_on_both_ranks_in_the_accepted_iterations"],
    }),
    ("", "nsys", {
        "torchrun, one machine": ["tests/system/test_nsys.py::test_the_ranks_asked_for_run_under_nsys_and_the_others_without"],
    }),
    ("Any script (`bridge-profiling run`)", "torch", {
        "a process alone": ["tests/easy/test_iterations.py::test_an_iteration_is_a_step_of_the_optimizer"],
        "torchrun, one machine": ["tests/easy/test_launchers.py::test_torchrun_may_start_the_ranks_itself"],
        "torchrun, several": [_MACHINES],
        "Slurm": ["tests/system/test_any_script.py::test_srun_starts_the_ranks_of_two_nodes"],
    }),
    ("", "nsys", {
        "torchrun, one machine": ["tests/system/test_any_script.py::test_the_rank_asked_for_runs_under_nsys_and_its_report_holds_the_phases"],
    }),
    ("DistributedDataParallel", "torch", {"torchrun, one machine": [_DDP, _GPU_FRAMEWORKS]}),
    ("FullyShardedDataParallel", "torch", {"torchrun, one machine": [_DDP, _GPU_FRAMEWORKS]}),
    ("`fully_shard`", "torch", {"torchrun, one machine": [_DDP, _GPU_FRAMEWORKS]}),
    ("DeepSpeed, ZeRO 0 to 3", "torch", {
        "torchrun, one machine": ["tests/integrations/test_deepspeed.py::test_the_example_is_captured_whole_and_trains_as_without"],
    }),
    ("Lightning", "torch", {
        "a process alone": ["tests/integrations/test_lightning.py::test_both_packages_of_lightning_train_with_the_same_callback"],
        "torchrun, one machine": [
            "tests/integrations/test_lightning.py::test_the_example_captures_its_window_on_each_rank_of_ddp_and_changes_no_loss",
            _GPU_FRAMEWORKS,
        ],
    }),
    ("Hugging Face Trainer", "torch", {
        "a process alone": ["tests/integrations/test_every_framework.py::test_a_resumed_training_counts_on_and_captures_what_it_shares_with_the_window"],
        "torchrun, one machine": [
            "tests/integrations/test_hugging_face.py::test_the_example_captures_its_window_on_each_rank_and_changes_no_loss",
            _GPU_FRAMEWORKS,
        ],
    }),
    ("Accelerate", "torch", {
        "a process alone": ["tests/integrations/test_every_framework.py::test_a_resumed_training_counts_on_and_captures_what_it_shares_with_the_window"],
        "torchrun, one machine": [
            "tests/integrations/test_accelerate.py::test_the_example_captures_its_window_on_each_rank_and_changes_no_loss",
            _GPU_FRAMEWORKS,
        ],
    }),
    ("Workers of Ray (NeMo RL's variables)", "torch", {
        "Ray": ["tests/system/test_ray_workers.py::test_torch_traces_of_two_groups_hold_exactly_their_steps"],
    }),
    ("", "nsys", {
        "Ray": ["tests/system/test_ray_workers.py::test_reports_of_nsys_are_named_by_worker_and_rank_and_hold_exactly_the_steps"],
    }),
    ("A running job (`bridge-profiling trigger`)", "torch", {
        "a process alone": ["tests/gpu/test_on_demand.py::test_both_requests_are_captured_whole"],
        "torchrun, one machine": ["tests/capture/control/test_trigger.py::test_it_is_profiled_a_second_time_on_the_given_rank_and_iterations"],
    }),
    ("", "nsys", {
        "a process alone": ["tests/system/test_nsys.py::test_an_nsys_that_was_told_to_makes_several_captures_those_of_the_config_and_one_on_request"],
    }),
]  # fmt: skip


#: Its names: a script, which belongs to no package.
VERSIONS = runpy.run_path(str(ROOT / "tools" / "versions.py"))

#: What `make test-versions` shows of a release of megatron-core, and what `make test-gpu` has shown on H200s with torch 2.11.
VERSION_COLUMNS = ("Python", "torch", "recipes, layouts, checkpoints, resumes", "Megatron Bridge's `pretrain`", "on GPUs")
_ON_GPUS = {
    "0.16.1": "GPU: megatron-core's own layers, Transformer Engine's, Bridge",
    "0.19.2": "GPU, one: Transformer Engine's layers, Bridge",
}


def _versions() -> str:
    """The table of versions as Markdown."""
    pins = (ROOT / "constraints.txt").read_text()
    lines = [f"| megatron-core | {' | '.join(VERSION_COLUMNS)} |", "|---" * (len(VERSION_COLUMNS) + 1) + "|"]
    for release in VERSIONS["TESTED"]:
        python = VERSIONS["PYTHON"][release]
        torch = re.search(rf'^torch==(\S+); python_version {"<" if python == "3.11" else ">="} "3.12"$', pins, re.M).group(1)
        bridge = BRIDGE_FOR_CORE[release.rpartition(".")[0]]
        assert (ROOT / "tests" / "versions" / f"bridge-{bridge}.txt").is_file()
        lines.append(f"| {release} | {python} | {torch} | CPU | {bridge}: CPU | {_ON_GPUS.get(release, 'no')} |")
    return "\n".join(lines)


def _rows() -> Iterator[tuple[str, str, dict[str, list[str]]]]:
    """Each framework with all three profilers: what is left out of TABLE is not supported anywhere."""
    framework = ""
    seen: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name, profiler, cells in TABLE:
        framework = name or framework
        seen.setdefault(framework, {})[profiler] = cells
    for framework, profilers in seen.items():
        for profiler in ("torch", "nsys", "memory"):
            yield framework, profiler, profilers.get(profiler, {})


def _table() -> str:
    """The table as Markdown."""
    lines = [f"| | profiler | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    before = ""
    for framework, profiler, cells in _rows():
        marks = [_seen_on(cells[column]) if column in cells else "no" for column in COLUMNS]
        lines.append(f"| {framework if framework != before else ''} | {profiler} | {' | '.join(marks)} |")
        before = framework
    return "\n".join(lines)


def _seen_on(tests: list[str]) -> str:
    return ", ".join(dict.fromkeys("GPU" if test.startswith("tests/gpu/") else "CPU" for test in sorted(tests)[::-1]))


def missing() -> list[str]:
    """Tests that the table names and files that `make test-versions` runs, as far as they do not exist."""
    tests = {test for *_, cells in TABLE for tests in cells.values() for test in tests}
    paths = {path for paths in VERSIONS["PARTS"].values() for path in paths}
    return sorted(
        name
        for name in tests | paths
        for path, _, test in [name.partition("::")]
        if not (ROOT / path).is_file() or (test and not re.search(rf"def {test}\(", (ROOT / path).read_text()))
    )


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
