"""What a capture holds beside its window: shapes, stacks, memory, Chakra; the manifest; the names of the files."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from bridge_profiling.capture import IterationWork, ParallelLayout
from bridge_profiling.capture.files import choose_attempt
from bridge_profiling.capture.record import describe_work, peak_tflops, throughput
from bridge_profiling.config import Window
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.launch_env import LAUNCH_VARIABLE, LaunchEnv
from bridge_profiling.manifest import find_captures


@pytest.mark.parametrize("flag", ["record_shapes", "pytorch_profiler_collect_shapes"])
def test_shapes_are_recorded_when_asked_for(run, flag):
    run.train(run.config(1, 2, **{flag: True}), range(3))
    linear = next(event for event in run.trace("iter-1-2")["traceEvents"] if event.get("name") == "aten::linear")
    assert linear["args"]["Input Dims"][0] == [4, 8]


def test_shapes_are_left_out_otherwise(run):
    run.train(run.config(1, 2), range(3))
    linear = next(event for event in run.trace("iter-1-2")["traceEvents"] if event.get("name") == "aten::linear")
    assert "Input Dims" not in linear["args"]


def test_call_stacks_are_recorded_when_asked_for(run):
    run.train(run.config(1, 2, pytorch_profiler_collect_callstack=True), range(3))
    categories = {event.get("cat") for event in run.trace("iter-1-2")["traceEvents"]}
    assert "python_function" in categories


def test_memory_events_are_recorded_when_asked_for(run):
    run.train(run.config(1, 2, pytorch_profiler_profile_memory=True), range(3))
    assert any(event.get("name") == "[memory]" for event in run.trace("iter-1-2")["traceEvents"])


def test_a_chakra_execution_trace_is_written_when_asked_for(run):
    run.train(run.config(1, 3, pytorch_profiler_collect_chakra=True), range(5))
    trace = json.loads((run.root / "torch" / "iter-1-3" / "rank-0.et.json").read_text())
    assert sum(node["name"] == "aten::linear" for node in trace["nodes"]) == 2
    artifacts = run.manifest("iter-1-3")["profilers"][0]["artifacts"]
    assert [artifact["path"] for artifact in artifacts] == [
        "torch/iter-1-3/rank-0.pt.trace.json.gz",
        "torch/iter-1-3/rank-0.et.json",
    ]


def test_the_trace_itself_says_which_rank_and_window_it_is(run):
    layout = ParallelLayout(world_size=4, tp=2)
    run.train(run.config(1, 2, profile_ranks="all"), range(3), rank=3, layout=layout)
    about = run.trace("iter-1-2", rank=3)["bridge_profiling"]
    assert about["rank"] == 3
    assert about["window"] == [1, 2]
    assert about["coordinates"]["tp"] == [1, 2]


def test_the_manifest_names_the_capture(run, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-7")
    run.train(run.config(4, 6, profile_ranks=[3]), range(8), rank=3, layout=ParallelLayout(world_size=4, tp=2))
    manifest = run.manifest("iter-4-6", rank=3)
    assert manifest["rank"] == 3
    assert manifest["coordinates"] == {"tp": [1, 2], "cp": [0, 1], "dp": [1, 2], "pp": [0, 1], "ep": [0, 1]}
    assert manifest["job"]["id"] == "run-7"
    assert manifest["versions"]["torch"]
    trace = run.root / manifest["profilers"][0]["artifacts"][0]["path"]
    assert trace.stat().st_size == manifest["profilers"][0]["artifacts"][0]["bytes"]
    assert manifest["durations_ns"]["iteration"] == list(range(8))
    assert all(duration > 0 for duration in manifest["durations_ns"]["duration_ns"])
    assert manifest["clock"]["unix_ns"] > 1_700_000_000 * 10**9


WORK = IterationWork(model_flops=6e9, tokens=4096, devices=2, precision="bf16", attention_flops=1e9)


def test_without_a_gpu_the_manifest_has_the_model_flops_reached_and_says_why_there_is_no_mfu(run):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    run.train(run.config(1, 3), range(5), work=WORK)
    manifest = run.manifest("iter-1-3")
    assert {name: manifest["work"][name] for name in ("model_flops", "tokens", "devices", "precision", "attention_flops")} == {
        "model_flops": 6e9,
        "tokens": 4096,
        "devices": 2,
        "precision": "bf16",
        "attention_flops": 1e9,
    }
    assert (manifest["work"]["device"], manifest["work"]["peak_tflops"]) == (None, None)
    assert "no GPU is in use" in manifest["work"]["reason"]
    durations = manifest["durations_ns"]
    assert durations["mfu"] is None
    # 6 GFLOP on two devices are 3 of each, and FLOP a nanosecond are GFLOP a second.
    assert durations["model_tflops_per_gpu"] == pytest.approx(
        [3e9 / duration / 1e3 for duration in durations["duration_ns"]], rel=1e-3
    )


def test_a_known_device_has_its_data_sheets_peak(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    # 63.4 TFLOP in 375 ms on one device are 169.1 TFLOP/s, 17.1 % of its peak.
    work = IterationWork(model_flops=63_432_371_994_624, tokens=65_536, devices=1, precision="bf16")
    described, stated = describe_work(work, None), describe_work(work, 700.0)
    assert (described.device, described.peak_tflops, described.reason) == ("NVIDIA H200", 989.4, None)
    assert (stated.device, stated.peak_tflops, stated.reason) == ("NVIDIA H200", 700.0, None)
    assert throughput(work, described.peak_tflops, [375_120_871]) == ([169.1], [0.1709])


def test_a_device_that_answers_no_more_keeps_no_manifest_from_being_written(monkeypatch):
    def get_device_name():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", get_device_name)
    described = describe_work(WORK, None)
    assert (described.device, described.peak_tflops) == (None, None)
    assert "illegal memory access" in described.reason


def test_a_stated_peak_makes_an_mfu_of_every_iteration(run):
    run.train(run.config(1, 3, peak_tflops=0.5), range(5), work=WORK)
    manifest = run.manifest("iter-1-3")
    assert (manifest["work"]["peak_tflops"], manifest["work"]["reason"]) == (0.5, None)
    durations = manifest["durations_ns"]
    assert durations["mfu"] == pytest.approx([tflops / 0.5 for tflops in durations["model_tflops_per_gpu"]], rel=1e-3)


def test_a_loop_that_does_not_say_what_an_iteration_computes_has_no_mfu(run):
    run.train(run.config(1, 2), range(3))
    manifest = run.manifest("iter-1-2")
    assert manifest["work"] is None
    assert (manifest["durations_ns"]["model_tflops_per_gpu"], manifest["durations_ns"]["mfu"]) == (None, None)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "fp8", 1670.5),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A100 80GB PCIe", "bf16", 312.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "fp8", 5000.0),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA RTX A1000 6GB Laptop GPU", "bf16", None),
        ("Tesla T4", "bf16", None),
    ],
)
def test_the_peak_is_that_of_the_devices_data_sheet_or_a_reason(name, precision, peak):
    found, reason = peak_tflops(name, precision)
    assert found == peak
    assert (reason is None) == (peak is not None)
    if reason:
        assert name in reason
        assert "profiling.peak_tflops" in reason


@pytest.mark.parametrize("wrong", [{"model_flops": 0}, {"tokens": 0}, {"devices": 0}])
def test_work_that_is_none_is_refused(wrong):
    with pytest.raises(ProfilingConfigError, match="must be positive"):
        IterationWork(**{"model_flops": 1.0, "tokens": 1, "devices": 1, "precision": "bf16", **wrong})


def test_the_manifest_keeps_the_last_thousand_durations_and_those_of_the_window(run):
    """Else a run of thousands of iterations, as they are, could not tell at its end what the profiler cost."""
    run.train(run.config(4, 6), range(1100))
    assert run.manifest("iter-4-6")["durations_ns"]["iteration"] == [4, 5, *range(100, 1100)]
    [capture] = find_captures(run.root)
    assert list(capture.durations_by_iteration(profiled=True)) == [4, 5]
    assert list(capture.durations_by_iteration(profiled=False)) == list(range(100, 1100))


def test_nothing_but_whole_files_is_left(run):
    run.train(run.config(1, 3, pytorch_profiler_collect_chakra=True), range(5))
    assert not [path for path in run.root.rglob("*") if ".tmp" in path.name or path.name.startswith(".")]


def test_a_second_run_into_the_same_directory_gets_a_folder_of_its_own(run):
    for _ in range(3):
        run.train(run.config(1, 2), range(3))
    assert sorted(path.name for path in (run.root / "torch").iterdir()) == ["iter-1-2", "iter-1-2.1", "iter-1-2.2"]
    assert [run.manifest(f"iter-1-2{suffix}")["job"]["attempt"] for suffix in ("", ".1", ".2")] == [0, 1, 2]


def test_memory_history_without_a_gpu_says_so_and_leaves_the_torch_trace(run):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    run.train(run.config(1, 2, record_memory_history=True), range(3))
    manifest = run.manifest("iter-1-2")
    assert manifest["status"] == "partial"
    outcomes = {profiler["name"]: profiler for profiler in manifest["profilers"]}
    assert outcomes["memory"]["status"] == "failed"
    assert "no CUDA device" in outcomes["memory"]["reason"]
    assert outcomes["torch"]["status"] == "complete"


def test_nsys_that_does_not_run_around_the_process_says_so(run):
    run.train(run.config(1, 2, use_pytorch_profiler=False, use_nsys_profiler=True), range(3))
    manifest = run.manifest("iter-1-2")
    assert manifest["status"] == "failed"
    assert "does not run under nsys" in manifest["reason"]


def slurm(**more):
    return {"SLURM_JOB_ID": "11", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "0", **more}


def test_ranks_of_one_slurm_step_share_an_attempt_and_a_requeued_job_gets_the_next(tmp_path):
    window = Window(1, 2)
    assert [choose_attempt(tmp_path, window, rank, slurm())[0] for rank in (1, 0, 2)] == [0, 0, 0]
    requeued = slurm(SLURM_RESTART_COUNT="1")
    assert [choose_attempt(tmp_path, window, rank, requeued)[0] for rank in (0, 1)] == [1, 1]
    assert choose_attempt(tmp_path, window, 0, slurm(SLURM_JOB_ID="12"))[0] == 2


def test_a_restart_by_torchrun_gets_the_next_attempt(tmp_path):
    window = Window(1, 2)
    first = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert [choose_attempt(tmp_path, window, rank, first)[0] for rank in (0, 1)] == [0, 0]
    assert [choose_attempt(tmp_path, window, rank, again)[0] for rank in (0, 1)] == [1, 1]


def test_an_attempt_never_lands_on_files_that_have_no_manifest(tmp_path):
    (tmp_path / "torch" / "iter-1-2").mkdir(parents=True)
    assert choose_attempt(tmp_path, Window(1, 2), 0, {})[0] == 1


def test_connected_ranks_take_rank_zeros_choice(tmp_path):
    """Rank 1 sees another directory, as on a node-local file system, and still writes to the same folder's name."""
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import os, pathlib, sys, torch
        from bridge_profiling.capture.files import choose_attempt
        from bridge_profiling.config import Window
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        root = pathlib.Path(sys.argv[1]) / f"node-{rank}"
        if rank == 0:
            (root / "torch" / "iter-1-2").mkdir(parents=True)
        attempt, _ = choose_attempt(root, Window(1, 2), rank)
        (pathlib.Path(sys.argv[1]) / f"attempt-{rank}").write_text(str(attempt))
        torch.distributed.destroy_process_group()
        """)
    )
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"attempt-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_ranks_of_one_driver_are_of_one_launch_whatever_steps_started_them():
    """Ray's workers inherit what started the Ray of their machine: under Slurm that is a step of its own on each."""
    first = {LAUNCH_VARIABLE: "session/1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    other = first | {"SLURM_STEP_ID": "1", "MASTER_PORT": "29500"}
    assert LaunchEnv.read(first).launch_id == LaunchEnv.read(other).launch_id
    assert LaunchEnv.read(first).launch_id != LaunchEnv.read(first | {"SLURM_RESTART_COUNT": "1"}).launch_id
