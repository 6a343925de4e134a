"""The verdicts of doctor's checks on a request, and on a machine made of text that real machines were recorded with."""

from pathlib import Path

import pytest

from bridge_profiling.common.errors import CaptureError, ProfilingConfigError
from bridge_profiling.doctor import nsys as doctor_nsys
from bridge_profiling.doctor.checks import Process
from bridge_profiling.doctor.environment import check_megatron_core, check_nccl_settings, check_other_profilers
from bridge_profiling.doctor.gpus import check_gpus
from bridge_profiling.doctor.nsys import check_gpu_metrics_permission, check_nsys
from bridge_profiling.doctor.profiling import check_profilers, check_ranks_exist, check_window_fits
from bridge_profiling.doctor.request import Request, apply_arguments, apply_file
from bridge_profiling.nsys.command import NsysVersion
from tests.doctor.conftest import FakeMachine, request_for

TORCH, NSYS, METRICS = (f"profiling.{name}=true" for name in ("use_pytorch_profiler", "use_nsys_profiler", "nsys_gpu_metrics"))
METRICS_ARG = "profiling.nsys_extra_args=[--gpu-metrics-devices=0]"
RANKS = "profiling.profile_ranks="
PP = f"{RANKS}pp model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=4"

PARAMS, TOPOLOGY, LINKS = (
    (Path(__file__).parent / "recorded" / f"h200x2-{name}.txt").read_text() for name in ("params", "topo", "nvlink")
)
H200X2 = {
    "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader": "NVIDIA H200, 580.159.04\n" * 2,
    "nvidia-smi topo -m": TOPOLOGY,
    "nvidia-smi nvlink -s": LINKS,
}

#: Two sockets with two GPUs each and a network card, as nvidia-smi lays them out.
TWO_SOCKETS = """
.\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU
GPU0\tX\tNV1\tNV2\tSYS\tPIX\t0-19
GPU1\tNV1\tX\tSYS\tSYS\tPIX\t0-19
GPU2\tNV2\tSYS\tX\tNV1\tSYS\t20-39
GPU3\tSYS\tSYS\tNV1\tX\tSYS\t20-39
mlx5_0\tPIX\tPIX\tSYS\tSYS\tX
"""

#: Root on a machine, root in a container without added capabilities, root in a user namespace, a user.
CAPABILITIES = {"root": 0x1FFFEFFFFFF, "container": 0xA80425FB, "namespace": 0x1FFFEFFFFFF, "user": 0}


def user(who, **files):
    """Files of a machine as a user sees them."""
    return files | {
        "/proc/self/status": f"CapEff:\t{CAPABILITIES[who]:016x}\n",
        "/proc/self/uid_map": f"0 {1000 if who == 'namespace' else 0} {1 if who == 'namespace' else 4294967295}\n",
    }


def permission(admin_only, who):
    return {"recorded": user(who) | {"/proc/driver/nvidia/params": PARAMS.replace("AdminOnly: 0", f"AdminOnly: {admin_only}")}}


def environment(*settings, namespace=4026531836):
    """A host with these variables, or a container with another process namespace."""
    environ = dict(setting.split("=") for setting in settings)
    return {"environ": environ, "recorded": {"/proc/self/ns/pid": f"pid:[{namespace}]"}, "running": (Process(1, "bash"),)}


DCGM = Process(70, "nv-hostengine", ("/usr/bin/nv-hostengine", "-n"))
OTHER_NSYS = Process(71, "python3", ("/opt/nsys/target-linux-x64/nsys", "profile"))

#: A check, the settings and further fields of the request, the machine's fields, and the verdict's status and finding.
CASES = [
    (check_window_fits, "train.train_iters=12", {}, {}, "ok", "iterations 10 to 11 of 0 to 11"),
    (check_window_fits, "train.train_iters=11", {}, {}, "fails", "last iteration is 10"),
    (check_window_fits, "", {}, {}, "unknown", "train.train_iters is not known"),
    (check_window_fits, "train.train_iters=50 train.start_iteration=12", {}, {}, "fails", "after the window 10-12"),
    (check_window_fits, "train.train_iters=50 train.start_iteration=10", {}, {}, "warning", "iteration 10 is the run's first"),
    (check_ranks_exist, f"{RANKS}[0,4]", {"world_size": 4}, {}, "fails", "names 4, but the job has 4 ranks"),
    (check_ranks_exist, f"{RANKS}all", {"world_size": 64}, {}, "ok", "7 and 56 more of 64"),
    (check_ranks_exist, f"{RANKS}all", {"world_size": 65}, {}, "warning", "65 ranks write a trace each"),
    (check_ranks_exist, PP, {"world_size": 16}, {}, "ok", "0, 4, 8, 12 of 16"),
    (check_ranks_exist, f"{RANKS}[0]", {}, {}, "unknown", "the number of ranks is not known"),
    (check_profilers, f"{NSYS} profiling.record_memory_history=true", {}, {}, "ok", "nsys and memory history"),
    (check_profilers, f"{TORCH} {NSYS}", {}, {}, "fails", "CUPTI"),
    (check_profilers, TORCH, {"nsys_prefix": True}, {}, "fails", "CUPTI"),
    (check_profilers, f"{NSYS} ft.enable_ft_package=true", {}, {}, "fails", "ft.enable_ft_package is true"),
    (check_profilers, "", {}, {}, "warning", "nothing will be captured"),
    (check_gpu_metrics_permission, f"{NSYS} {METRICS}", {}, permission(0, "user"), "ok", ""),
    (check_gpu_metrics_permission, f"{NSYS} {METRICS}", {}, permission(1, "user"), "fails", "AdminUsers=0"),
    (check_gpu_metrics_permission, f"{NSYS} {METRICS}", {}, permission(1, "root"), "ok", ""),
    (check_gpu_metrics_permission, f"{NSYS} {METRICS_ARG}", {}, permission(1, "user"), "fails", "AdminUsers=0"),
    (check_gpu_metrics_permission, f"{NSYS} {METRICS}", {}, permission(1, "namespace"), "fails", ""),
    (check_gpu_metrics_permission, f"{NSYS} {METRICS}", {}, {}, "unknown", "was not recorded"),
    (check_gpu_metrics_permission, NSYS, {}, permission(1, "user"), None, ""),
    (check_nccl_settings, "", {"environment": {"NCCL_IB_DISABLE": "1"}}, {}, "warning", "TCP sockets"),
    (check_nccl_settings, "", {"environment": {"NCCL_IB_DISABLE": "1"}, "nodes": 1}, {}, "ok", ""),
    (check_nccl_settings, "", {}, environment("NCCL_DEBUG=TRACE"), "warning", "NCCL_DEBUG=TRACE (environment): NCCL logs all"),
    (check_other_profilers, "", {}, environment(), "ok", ""),
    (check_other_profilers, "", {}, environment(namespace=4026532847), "unknown", ""),
    (check_other_profilers, "", {}, environment("CUDA_INJECTION64_PATH=/opt/tool/libtool.so"), "warning", "loads another tool"),
    (check_other_profilers, "", {}, environment("NSYS_PROFILING_SESSION_ID=3", "LD_PRELOAD=/a.so"), "warning", "under nsys"),
    (check_other_profilers, "", {}, {"running": (DCGM,)}, "warning", "dcgmi profile --pause"),
    (check_other_profilers, "", {}, {"running": (OTHER_NSYS,)}, "warning", "nsys, process 71)"),
    (check_megatron_core, "", {}, {"recorded": {"megatron-core": "0.18.2"}}, "ok", "0.18.2"),
    (check_megatron_core, "", {}, {"recorded": {"megatron-core": "0.15.3"}}, "warning", "pip install 'megatron-core>=0"),
]


@pytest.mark.parametrize(("check", "settings", "fields", "here", "status", "said"), CASES)
def test_a_check_has_one_verdict_or_none(check, settings, fields, here, status, said):
    verdicts = list(check(request_for(*settings.split(), **fields), FakeMachine(**here)))
    assert [verdict.status for verdict in verdicts] == ([] if status is None else [status])
    for verdict in verdicts:
        assert said in f"{verdict.found} → {verdict.instead}"
        assert verdict.instead or status == "ok" or check is check_other_profilers


WELL = """ok GPUs: 2 × NVIDIA H200, driver 580.159.04
ok GPU topology: each of 1 pair: NV18
ok NVLink: all 36 links active, 478 GB/s per GPU and direction"""


@pytest.mark.parametrize(
    ("recorded", "fields", "said"),
    [
        ({}, {"world_size": 4, "nodes": 2}, WELL),
        ({}, {"world_size": 8, "nodes": 2}, "warning GPUs: 4 ranks share 2"),
        ({"links": ("26.562 GB/s", "<inactive>")}, {}, "warning NVLink: 1 of 36 links are inactive (GPU0 link 0)"),
        ({"links": ("26.562", "0.562")}, {}, "warning NVLink: GPU0 has 452 GB/s, others up to 478 GB/s"),
        ({"nvidia-smi topo -m": TWO_SOCKETS}, {}, "socket (SYS: GPU0-GPU3, GPU1-GPU2, GPU1-GPU3)"),
    ],
)
def test_gpus_and_their_links(recorded, fields, said):
    links = {"nvidia-smi nvlink -s": LINKS.replace(*recorded.get("links", ("", "")), 1)}
    verdicts = check_gpus(request_for(**fields), FakeMachine(recorded=H200X2 | links | recorded))
    assert said in "\n".join(f"{verdict.status} {verdict.check}: {verdict.found}" for verdict in verdicts)


def test_an_nsys_that_does_not_run_is_no_nsys(monkeypatch):
    def refuse(executable):
        raise CaptureError(f"{executable} does not answer as nsys does")

    monkeypatch.setattr(doctor_nsys, "find_nsys", refuse)
    words, verdict = check_nsys(request_for(NSYS, "profiling.nsys_trace=[cudn]"), FakeMachine(recorded={"nsys --version": ""}))
    assert (words.status, words.instead.split(";")[0]) == ("fails", "Type cudnn")
    assert (verdict.status, verdict.found) == ("fails", "/usr/bin/nsys does not answer as nsys does")


@pytest.mark.parametrize(
    ("package", "program", "lost"),
    [
        ("0.2.17", "2024.2.3.38-242334140272v0", True),
        ("0.2.12", "2023.4.4.54", True),
        ("0.2.11", "2024.2.3.38", False),
        ("0.2.17", "2025.3.1.90", False),
        (None, "2024.2.3.38", False),
    ],
)
def test_an_nsys_that_the_package_nvtx_is_too_new_for(monkeypatch, package, program, lost):
    monkeypatch.setattr(doctor_nsys, "find_nsys", lambda executable: NsysVersion(executable, program, frozenset()))
    recorded = {"nsys --version": ""} | ({"nvtx": package} if package else {})
    verdicts = check_nsys(request_for(NSYS), FakeMachine(recorded=recorded))
    said = [f"{verdict.found} → {verdict.instead}" for verdict in verdicts if verdict.check == "nvtx"]
    assert len(said) == lost
    assert all(f"the ranges of nvtx {package}" in each and "nvtx==0.2.11" in each for each in said)


def test_settings_come_from_yaml_and_overrides_of_any_container(tmp_path):
    file, request = tmp_path / "run.yaml", Request()
    file.write_text(
        "model: {num_layers: 4, some_other_field: 7, tensor_model_parallel_size: 2}\n"
        "train: {train_iters: 30}\nprofiling: {use_pytorch_profiler: true, profile_ranks: [0, 1]}\n"
        "ft: null\nmixed_precision: bf16\n"
    )
    apply_file(request, file)
    apply_arguments(request, ["train.train_iters=40", "++profiling.profile_ranks=pp", "model.hidden_size=64", "optimizer.lr=1"])
    assert request.settings == {"train.train_iters": 40, "model.tensor_model_parallel_size": 2}
    assert (request.integer("train.train_iters"), request.parallel_size("tensor_model")) == (40, 2)
    assert (request.profiling.use_pytorch_profiler, request.profiling.profile_ranks) == (True, "pp")


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("profiling.use_nsys=true", "Type profiling.use_nsys_profiler"),
        ("train.train_iter=5", "Type train.train_iters"),
        ("train.train_iters=many", "Type for example train.train_iters=10"),
        ("--flag", "Type section.field=value"),
        ("profiling=5", "profiling is a section, and cannot be 5 .*Type profiling.field=value"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_right_one(argument, instead):
    with pytest.raises(ProfilingConfigError, match=instead):
        apply_arguments(Request(), [argument])
