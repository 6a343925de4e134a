"""What a driver gives Ray's workers, and what a worker captures: everything that needs no Ray."""

import copy
import json
import os
import sys

import pytest
import torch

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.frameworks import ray as integration
from bridge_profiling.frameworks.ray import WorkerProfiling, worker_runtime_env
from bridge_profiling.manifest import find_captures

STEPS, PATTERNS = "NRL_NSYS_PROFILE_STEP_RANGE", "NRL_NSYS_WORKER_PATTERNS"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Asked for: steps 2 to 7 of policy workers. No nsys on this machine."""
    monkeypatch.setenv(STEPS, "2:8")
    monkeypatch.setenv(PATTERNS, "*policy*")
    monkeypatch.setattr(integration, "_nsys_here", lambda: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def options(monkeypatch):
    """Returns the `nsight` options of a policy worker; keywords in snake case are the variable's extra options."""

    def of_worker(*, rank=0, cuda=True, given=None, **extra):
        monkeypatch.setenv("NRL_NSYS_EXTRA_OPTIONS", json.dumps({name.replace("_", "-"): extra[name] for name in extra}))
        return worker_runtime_env("policy_worker", rank=rank, runtime_env={"nsight": given}, cuda=cuda)["nsight"]

    return of_worker


# -- the driver -------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_not_selected_gets_what_was_given(monkeypatch):
    given = {"env_vars": {"A": "1"}, "nsight": "default"}
    assert worker_runtime_env("reward_worker", runtime_env=given) == given
    monkeypatch.delenv(STEPS)
    monkeypatch.delenv(PATTERNS)
    assert worker_runtime_env("policy_worker") == {}


@pytest.mark.parametrize(
    ("profiler", "given", "path"),
    [
        # Ray starts `python` from PATH, whatever py_executable says.
        ("nsys", {"py_executable": "/venv/bin/python", "env_vars": {"A": "1", "PATH": "/theirs"}}, "/venv/bin:/theirs"),
        ("nsys", {"py_executable": "uv run --locked"}, f"{os.path.dirname(sys.executable)}:${{PATH}}"),
        ("torch", {"env_vars": {"PATH": "/theirs"}, "working_dir": "/code"}, "/theirs"),
    ],
)
def test_a_worker_gets_what_was_asked_and_what_it_is_started_with_anyway(profiler, given, path, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDGE_PROFILING_RAY_PROFILER", profiler)
    monkeypatch.setenv("BRIDGE_PROFILING_DIR", "out")
    before = copy.deepcopy(given)
    made = worker_runtime_env("policy_worker", runtime_env=given, cuda=True)
    # The directory is absolute: a worker runs in another one.
    asked = {"PATH": path, STEPS: "2:8", PATTERNS: "*policy*", "BRIDGE_PROFILING_DIR": str(tmp_path / "out")}
    assert made["env_vars"].items() >= (given.get("env_vars", {}) | asked).items()
    assert given == before
    assert made.keys() == given.keys() | ({"env_vars", "nsight"} if profiler == "nsys" else {"env_vars"})


def test_reports_go_to_the_output_directory_where_one_can_be_made_and_stay_with_ray_otherwise(tmp_path, caplog, monkeypatch):
    def report_in(folder):
        return worker_runtime_env("policy_worker", rank=3, output_dir=folder, cuda=True)["nsight"]["o"]

    assert report_in(tmp_path / "out") == str(tmp_path / "out/nsight/policy_worker_rank-3_2-8_%p")
    assert (tmp_path / "out/nsight").is_dir(), "nsys writes elsewhere when its directory is missing"
    (tmp_path / "file").touch()
    for folder, logged in ((None, False), (tmp_path / "file", True)):
        assert report_in(folder) == "policy_worker_rank-3_2-8_%p"
        assert ("Ray's session directory" in caplog.text) == logged
    with pytest.raises(ProfilingConfigError, match="through a shell"):
        report_in(tmp_path / "two words")


def test_options_of_the_user_win_over_the_default_ones_and_the_variable_s_over_the_code_s(options, tmp_path, monkeypatch):
    made = options(given={"s": "process-tree", "t": "osrt", "cpuctxsw": "system-wide"}, trace="nvtx", gpu_metrics_device="all")
    assert (made["sample"], made["trace"], made["cpuctxsw"]) == ("process-tree", "nvtx", "system-wide")
    assert made["gpu-metrics-device"] == "all"
    assert not {"s", "t", "output"} & made.keys(), "Ray would pass both names of an option"
    # A worker stays alive after its capture, and reports to a file of its own.
    made = options(cuda=False, capture_range="nvtx", nvtx_capture="their_range")
    assert (made["nvtx-capture"], made["capture-range-end"]) == ("their_range", "stop")
    assert "capture-range-end" not in options(capture_range="none")
    assert (options()["capture-range"], options(cuda=False)["nvtx-capture"]) == ("cudaProfilerApi", "bridge_profiling_window")
    monkeypatch.setenv("BRIDGE_PROFILING_DIR", str(tmp_path))
    assert options(rank=1, output="/runs/%p")["o"] == "/runs/%p_policy_worker_rank-1_2-8"


# -- a worker ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy_worker(monkeypatch, tmp_path):
    """Makes a policy worker that captures with torch."""
    monkeypatch.setenv("BRIDGE_PROFILING_RAY_PROFILER", "torch")
    return lambda **settings: WorkerProfiling("policy_worker", output_dir=tmp_path, **settings)


def captured(root, worker="policy_worker"):
    (capture,) = find_captures(root / worker)
    return capture


def train(profiling, *steps, fails_in=None):
    for step in steps:
        with profiling.step(step), profiling.range("forward"):
            torch.ones(4, 4).sum()
            if step == fails_in:
                raise ValueError("the step failed")


def test_an_exception_inside_the_window_writes_what_was_captured_at_once(policy_worker, tmp_path):
    profiling = policy_worker()
    with pytest.raises(ValueError, match="the step failed"):
        train(profiling, 1, 2, 3, fails_in=3)
    manifest = captured(tmp_path).manifest
    assert (manifest.captured.iterations, manifest.interrupted) == ([2], [3])
    assert "ValueError: the step failed" in manifest.reason
    train(profiling, 4, 5)
    profiling.close()
    assert captured(tmp_path).captured == [2], "steps after it run unprofiled"


def test_steps_that_are_several_calls_begin_and_end_by_calls(policy_worker, tmp_path):
    profiling = policy_worker()
    for step in range(1, 9):
        profiling.begin_step(step)
        torch.ones(4).sum()
    profiling.end_step()
    profiling.close()
    assert captured(tmp_path).captured == [2, 3, 4, 5, 6, 7], "a step that was not ended is ended by the next one"


def test_settings_alone_ask_for_a_profile_where_the_variables_do_not(monkeypatch, tmp_path):
    monkeypatch.delenv(STEPS)
    monkeypatch.delenv(PATTERNS)
    window = {"profile_step_start": 1, "profile_step_end": 3, "use_pytorch_profiler": True, "output_dir": tmp_path}
    for worker, settings in (("any", window), ("none", {})):
        with WorkerProfiling(worker, **settings) as profiling:
            train(profiling, 1, 2, 3)
    assert captured(tmp_path, "any").captured == [1, 2]
    assert not (tmp_path / "profiles").exists()


def test_requests_that_cannot_work_are_refused_before_the_first_step(monkeypatch, tmp_path):
    with pytest.raises(ProfilingConfigError, match="CUPTI"):
        WorkerProfiling("policy_worker", output_dir=tmp_path, use_pytorch_profiler=True)
    monkeypatch.delenv(STEPS)
    with pytest.raises(ProfilingConfigError, match=STEPS):
        WorkerProfiling("policy_worker", output_dir=tmp_path)
