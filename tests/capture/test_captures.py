"""What a capture holds besides its window: shapes, stacks, memory, Chakra; the manifest; the names of the files."""

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bridge_profiling.capture import IterationWork, ParallelLayout, files
from bridge_profiling.capture.files import choose_attempt
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.capture.work import describe_work
from bridge_profiling.manifest import find_captures
from bridge_profiling.settings.profiling import Window
from tests.capture.conftest import at, raising
from tests.frameworks.captured import read_trace

RECORDED = [
    "record_shapes",
    *(f"pytorch_profiler_{name}" for name in ("collect_callstack", "profile_memory", "collect_chakra")),
]


@pytest.mark.parametrize("settings", [set(), *({name} for name in RECORDED)])
def test_shapes_are_recorded_when_asked_for(run, settings):
    """And so are Python stacks, memory events and Chakra's nodes; each of them only then."""
    run.train(run.config(1, 3, **dict.fromkeys(settings, True)), range(4))
    events = run.trace("iter-1-3")
    linear = next(event for event in events if event["name"] == "aten::linear")
    trace, *others = (run.root / artifact["path"] for artifact in run.manifest("iter-1-3")["profilers"][0]["artifacts"])
    nodes = json.loads(others[0].read_text())["nodes"] if others else []
    found = {
        "record_shapes": linear["args"].get("Input Dims", [None])[0] == [4, 8],
        "pytorch_profiler_collect_callstack": any(event.get("cat") == "python_function" for event in events),
        "pytorch_profiler_profile_memory": any(event["name"] == "[memory]" for event in events),
        "pytorch_profiler_collect_chakra": sum(node["name"] == "aten::linear" for node in nodes) == 2,
    }
    assert {name for name, is_held in found.items() if is_held} == settings
    assert sorted(trace.parent.iterdir()) == sorted([trace, *others]), "nothing but whole files is left"


@pytest.mark.parametrize(("start", "warm_up", "armed_in"), [(6, 1, 5), (6, 3, 3), (2, 5, 0)])
def test_the_profiler_warms_up_for_as_many_iterations_as_asked_for(run, monkeypatch, start, warm_up, armed_in):
    seen = []
    real = TorchProfiler.warm_up
    monkeypatch.setattr(TorchProfiler, "warm_up", lambda profiler: [seen.append(len(run.losses)), real(profiler)])
    run.train(run.config(start, start + 1, pytorch_profiler_warmup=warm_up), range(9))
    assert seen == [armed_in]
    assert run.outcome(f"iter-{start}-{start + 1}") == ("complete", [start])


def test_a_trace_of_the_device_alone_gets_its_iterations_and_phases_from_the_hook(run, monkeypatch):
    """Without operators Kineto records no annotations; here it records the CPU, as there is no device."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    real = torch.profiler._KinetoProfile
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "_KinetoProfile", lambda activities, **how: real(activities=cpu, **how))
    run.train(run.config(3, 5, pytorch_profiler_device_only=True), range(6))
    assert run.outcome("iter-3-5") == ("complete", [3, 4])
    events = [event for event in run.trace("iter-3-5") if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    linear = [event for event in events if event["name"] == "aten::linear"]
    for step, inside in zip(steps, linear, strict=True):
        assert step["ts"] <= inside["ts"]
        assert inside["ts"] + inside["dur"] <= step["ts"] + step["dur"]


def test_the_manifest_and_the_trace_itself_name_the_capture(run, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-7")
    run.train(run.config(4, 6, profile_ranks=[3]), range(8), rank=3, layout=ParallelLayout(world_size=4, tp=2))
    manifest = run.manifest("iter-4-6", rank=3)
    coordinates = {"tp": [1, 2], "cp": [0, 1], "dp": [1, 2], "pp": [0, 1], "ep": [0, 1]}
    assert (manifest["rank"], manifest["coordinates"], manifest["job"]["id"]) == (3, coordinates, "run-7")
    assert (manifest["trigger"]["kind"], manifest["final"]) == ("configured", True)
    [artifact] = manifest["profilers"][0]["artifacts"]
    path = run.root / artifact["path"]
    assert path.stat().st_size == artifact["bytes"]
    assert manifest["clock"]["unix_ns"] > 1_700_000_000 * 10**9
    named = {"rank": 3, "window": [4, 6], "attempt": 0, "job": "run-7", "coordinates": coordinates}
    assert read_trace(path)["bridge_profiling"] == named


WORK = IterationWork(model_flops=6e9, tokens=4096, devices=2, precision="bf16", attention_flops=1e9)


@pytest.mark.parametrize(
    ("peak", "work", "reason"),
    [
        (None, WORK, "no GPU is in use, and the peak of a CPU is unknown: type profiling.peak_tflops=… to state it"),
        (0.5, WORK, None),
        (None, None, None),
    ],
)
def test_the_manifest_has_the_model_flops_reached_and_says_why_there_is_no_mfu(run, peak, work, reason):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    run.train(run.config(1, 3, peak_tflops=peak), range(5), work=work)
    manifest = run.manifest("iter-1-3")
    durations = manifest["durations_ns"]
    assert manifest["work"] == (work and asdict(work) | {"device": None, "peak_tflops": peak, "reason": reason})
    # 6 GFLOP on two devices are 3 of each, and FLOP a nanosecond are GFLOP a second.
    tflops = work and [3e9 / duration / 1e3 for duration in durations["duration_ns"]]
    assert durations["model_tflops_per_gpu"] == (tflops and pytest.approx(tflops, rel=1e-3))
    assert durations["mfu"] == (pytest.approx([one / peak for one in tflops], rel=1e-3) if peak else None)


@pytest.mark.parametrize(
    ("device", "precision", "stated", "peak", "reason"),
    [
        ("NVIDIA H200", "bf16", None, 989.4, None),
        ("NVIDIA H200", "bf16", 700.0, 700.0, None),
        ("NVIDIA H100 80GB HBM3", "fp16", None, 989.4, None),
        ("NVIDIA H100 NVL", "fp8", None, 1670.5, None),
        ("NVIDIA A100-SXM4-80GB", "fp8", None, None, "has no fp8: type profiling.peak_tflops"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None, None, "is a part of a GPU: type profiling.peak_tflops"),
        ("NVIDIA RTX A1000 6GB Laptop GPU", "bf16", None, None, "is unknown: type profiling.peak_tflops"),
        # A device that has failed keeps no manifest from being written.
        (RuntimeError("an illegal memory access"), "bf16", None, None, "an illegal memory access"),
    ],
)
def test_the_peak_is_that_of_the_devices_data_sheet_or_a_reason(monkeypatch, device, precision, stated, peak, reason):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    named = raising(device) if isinstance(device, Exception) else lambda: device
    monkeypatch.setattr("torch.cuda.get_device_name", named)
    described = describe_work(replace(WORK, precision=precision), stated)
    assert (described.device, described.peak_tflops) == (device if isinstance(device, str) else None, peak)
    assert reason in described.reason if reason else described.reason is None


def test_the_manifest_keeps_the_last_thousand_durations_and_those_of_the_window(run):
    """Otherwise the end of a long run would not show what the profiler cost."""
    run.train(run.config(4, 6), range(1100))
    assert run.manifest("iter-4-6")["durations_ns"]["iteration"] == [4, 5, *range(100, 1100)]
    [capture] = find_captures(run.root)
    assert list(capture.durations_by_iteration(profiled=True)) == [4, 5]
    assert list(capture.durations_by_iteration(profiled=False)) == list(range(100, 1100))


@pytest.mark.parametrize(
    ("settings", "statuses", "reason"),
    [
        ({"record_memory_history": True}, {"memory": "failed", "torch": "complete"}, "no CUDA device"),
        ({"pytorch_profiler_device_only": True}, {"torch": "failed"}, "this process uses none"),
        ({"use_pytorch_profiler": False, "use_nsys_profiler": True}, {"nsys": "failed"}, "does not run under nsys"),
    ],
)
def test_a_profiler_that_cannot_record_here_says_so_and_leaves_the_torch_trace(run, settings, statuses, reason):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    run.train(run.config(1, 2, **settings), range(3))
    manifest = run.manifest("iter-1-2")
    assert manifest["status"] == ("partial" if "complete" in statuses.values() else "failed")
    assert {profiler["name"]: profiler["status"] for profiler in manifest["profilers"]} == statuses
    assert reason in manifest["reason"]


SLURM = {"SLURM_JOB_ID": "11", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("own_from", "status", "calls"),
    [(None, "complete", ["all", None]), ("the start", "failed", []), ("iteration 2", "failed", ["all", "all"])],
)
def test_a_memory_history_that_the_training_records_itself_goes_on(run, monkeypatch, own_from, status, calls):
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    replaced = {
        "_cuda_record_memory_history": lambda *args, **how: seen.append(args[0]),
        "_cuda_isHistoryEnabled": lambda: own_from == "the start",
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    switch_on = torch.cuda.memory._record_memory_history if own_from == "iteration 2" else lambda: None
    run.train(run.config(1, 3, use_pytorch_profiler=False, record_memory_history=True), range(4), on_iteration=at(2, switch_on))
    assert (run.manifest("iter-1-3")["status"], seen) == (status, calls)
    assert status == "complete" or "a memory history of its own" in run.manifest("iter-1-3")["reason"]


@pytest.mark.parametrize(
    ("launch", "restart", "another"),
    [
        (SLURM, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "12"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "b"}),
    ],
)
def test_ranks_of_one_launch_share_an_attempt_and_a_restart_gets_the_next(tmp_path, launch, restart, another):
    """None lands on files that have no manifest."""
    (tmp_path / "torch" / "iter-1-2").mkdir(parents=True)
    launches = [launch, launch | restart, launch | another]
    attempts = [[choose_attempt(tmp_path, Window(1, 2), rank, one)[0] for rank in (1, 0, 2)] for one in launches]
    assert attempts == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]


def agreed(folder, monkeypatch, ranks, opened, *, store=None, start=1):
    """The numbers and the holders that ranks take in threads, each in a directory of its own."""
    store, chosen = store or torch.distributed.HashStore(), {}
    monkeypatch.setattr(files, "initialized_distributed", lambda: torch.distributed)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)

    def choose(rank):
        chosen[rank] = choose_attempt(folder / str(rank), Window(start, start + 1), rank, {}, ranks=ranks, world_size=4)

    threads = [threading.Thread(target=choose, args=(rank,)) for rank in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [chosen[rank][0] for rank in opened], len({holder for _, holder in chosen.values()})


def test_ranks_that_open_no_hook_are_named_and_not_waited_for_for_long(tmp_path, monkeypatch, caplog):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(files, "_AGREE_SECONDS", 600)
    # Nobody waits for a rank that captures nothing. A used number counts wherever it was used, and a later hook takes the next.
    (tmp_path / "3" / "torch" / "iter-1-2").mkdir(parents=True)
    assert agreed(tmp_path, monkeypatch, [1, 3], [1, 3], store=store) == ([1, 1], 1)
    assert agreed(tmp_path, monkeypatch, [1, 3], [3, 1], store=store) == ([2, 2], 1)
    assert agreed(tmp_path, monkeypatch, [2], [2], store=store) == ([1], 1)
    assert not caplog.text
    monkeypatch.setattr(files, "_AGREE_SECONDS", 0)
    assert agreed(tmp_path, monkeypatch, range(4), [3], store=store, start=4) == ([0], 1)
    assert caplog.text.count("rank(s) 0, 1, 2 opened no ProfilingHook for window 4-5 within 0 s") == 1
    # One that comes later finds what was decided.
    holder = (tmp_path / "3" / "manifest" / "iter-4-5" / "attempt.json").read_text()
    assert agreed(tmp_path, monkeypatch, range(4), [0], store=store, start=4) == ([0], 1)
    assert (tmp_path / "0" / "manifest" / "iter-4-5" / "attempt.json").read_text() == holder


class Stopped(torch.distributed.Store):
    """A store whose server is stopped, until the test ends."""

    goes_on = threading.Event()

    def add(self, *_: object) -> int:
        return self.goes_on.wait()


@pytest.mark.parametrize("kind", [torch.distributed.Store, Stopped])
def test_a_store_that_fails_or_hangs_leaves_each_rank_a_folder_of_its_own(tmp_path, monkeypatch, caplog, kind):
    """The process that serves it may have died, and other groups have none in common."""
    monkeypatch.setattr(files, "_AGREE_SECONDS", 0)
    monkeypatch.setattr(files, "_ANSWER_SECONDS", 0.1)
    assert agreed(tmp_path, monkeypatch, range(4), [0, 2], store=kind()) == ([0, 0], 2)
    assert caplog.text.count("the ranks cannot agree on a folder of window 1-2") == 2
    Stopped.goes_on.set()
