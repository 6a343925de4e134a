"""What doctor says about a machine, from text that real machines were recorded with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_profiling.doctor import nsys as doctor_nsys
from bridge_profiling.doctor.checks import Process
from bridge_profiling.doctor.environment import check_megatron_core, check_nccl_settings, check_other_profilers
from bridge_profiling.doctor.gpus import check_gpus, parse_topology
from bridge_profiling.doctor.nsys import check_cpu_sampling, check_gpu_metrics_permission, check_nsys
from bridge_profiling.doctor.request import Request
from bridge_profiling.errors import CaptureError

GPU_METRICS = "profiling.nsys_gpu_metrics=true"
NSYS = "profiling.use_nsys_profiler=true"

PARAMS, TOPOLOGY, LINKS = (
    (Path(__file__).parent / "recorded" / f"h200x2-{name}.txt").read_text() for name in ("params", "topo", "nvlink")
)

#: /proc/self/status of root on a machine, of root in a container without added capabilities, of a user.
STATUS = {
    "root": "CapEff:\t000001fffeffffff\n",
    "container": "CapEff:\t00000000a80425fb\n",
    "user": "CapEff:\t0000000000000000\n",
}
UID_MAP = {"machine": "         0          0 4294967295\n", "user namespace": "         0       1000          1\n"}

#: Two sockets with two GPUs each and a network card, as nvidia-smi lays them out.
TWO_SOCKETS = """
.\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU
GPU0\tX\tNV1\tNV2\tSYS\tPIX\t0-19
GPU1\tNV1\tX\tSYS\tSYS\tPIX\t0-19
GPU2\tNV2\tSYS\tX\tNV1\tSYS\t20-39
GPU3\tSYS\tSYS\tNV1\tX\tSYS\t20-39
mlx5_0\tPIX\tPIX\tSYS\tSYS\tX
"""


def shown(verdicts):
    return [f"{verdict.status} {verdict.check}: {verdict.found}" for verdict in verdicts]


def slower_gpu_1():
    first, second = LINKS.split("GPU 1:")
    return first + "GPU 1:" + second.replace("26.562", "25.000")


@pytest.mark.parametrize(
    ("recorded", "fields", "said"),
    [
        ({}, {}, "ok GPUs: 2 × NVIDIA H200, driver 580.159.04"),
        ({}, {}, "ok GPU topology: each of 1 pair: NV18"),
        ({}, {}, "ok NVLink: all 36 links active, 478 GB/s per GPU and direction"),
        ({}, {"world_size": 8, "nodes": 2}, "warning GPUs: 4 ranks share 2"),
        (
            {"nvidia-smi nvlink -s": LINKS.replace("Link 17: 26.562 GB/s", "Link 17: <inactive>", 1)},
            {},
            "warning NVLink: 1 of 36 links are inactive (GPU0 link 17)",
        ),
        ({"nvidia-smi nvlink -s": slower_gpu_1()}, {}, "warning NVLink: GPU1 has 450 GB/s, others up to 478 GB/s"),
        (
            {"nvidia-smi topo -m": TWO_SOCKETS},
            {},
            "warning GPU topology: 3 of 6 pairs are linked across a host bridge or socket"
            " (SYS: GPU0-GPU3, GPU1-GPU2, GPU1-GPU3)",
        ),
    ],
)
def test_gpus_and_their_links(machine, request_for, recorded, fields, said):
    h200x2 = {
        "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader": "NVIDIA H200, 580.159.04\n" * 2,
        "nvidia-smi topo -m": TOPOLOGY,
        "nvidia-smi nvlink -s": LINKS,
    }
    assert said in shown(check_gpus(request_for(**fields), machine(recorded=h200x2 | recorded)))


def test_a_recorded_topology_is_read_with_its_underlined_header():
    assert "\x1b[4m" in TOPOLOGY
    assert parse_topology(TOPOLOGY) == {("GPU0", "GPU1"): "NV18"}
    assert parse_topology("nothing of the kind") == {}


@pytest.mark.parametrize(
    ("admin_only", "who", "namespace", "status"),
    [
        ("0", "user", "machine", "ok"),
        ("1", "root", "machine", "ok"),
        ("1", "container", "machine", "fails"),
        ("1", "user", "machine", "fails"),
        ("1", "root", "user namespace", "fails"),
    ],
)
def test_gpu_metrics_need_a_permission(machine, request_for, admin_only, who, namespace, status):
    assert "RmProfilingAdminOnly: 0" in PARAMS
    recorded = {
        "/proc/driver/nvidia/params": PARAMS.replace("AdminOnly: 0", f"AdminOnly: {admin_only}"),
        "/proc/self/status": STATUS[who],
        "/proc/self/uid_map": UID_MAP[namespace],
    }
    here = machine(recorded=recorded)
    (asked,) = check_gpu_metrics_permission(request_for(NSYS, GPU_METRICS), here)
    (not_asked,) = check_gpu_metrics_permission(Request(), here)
    assert (asked.status, not_asked.status) == (status, "warning" if status == "fails" else "ok")
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in asked.instead) == (status == "fails")
    assert list(check_gpu_metrics_permission(request_for(NSYS), here)) == []


def test_without_a_driver_nothing_is_ok(machine, request_for):
    for check in (check_gpus, check_gpu_metrics_permission):
        (verdict,) = check(request_for(NSYS, GPU_METRICS), machine())
        assert (verdict.status, "was not recorded" in verdict.found) == ("unknown", True)


@pytest.mark.parametrize(
    ("level", "arguments", "who", "status"),
    [
        ("3", "[--sample=process-tree]", "user", "fails"),
        ("4", "[-s,cpu]", "user", "fails"),
        ("4", "[--cpuctxsw=process-tree]", "root", "ok"),
        ("2", "[--sample=cpu]", "user", "ok"),
        ("4", "[--sample=none]", "user", None),
    ],
)
def test_cpu_sampling_needs_the_kernels_leave(machine, request_for, level, arguments, who, status):
    files = {"/proc/sys/kernel/perf_event_paranoid": level, "/proc/self/status": STATUS[who]}
    here = machine(recorded=files | {"/proc/self/uid_map": UID_MAP["machine"]})
    verdicts = check_cpu_sampling(request_for(NSYS, f"profiling.nsys_extra_args={arguments}"), here)
    assert [verdict.status for verdict in verdicts] == ([] if status is None else [status])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("NCCL_P2P_DISABLE=1", "through host memory"),
        ("NCCL_SHM_DISABLE=1", "through the network"),
        ("NCCL_IB_DISABLE=1", "TCP sockets"),
        ("NCCL_DEBUG=TRACE", "logs all the time"),
        ("NCCL_DEBUG_SUBSYS=INIT,COLL", "logs every collective"),
        ("NCCL_ALGO=Ring", "for every message size"),
        ("CUDA_LAUNCH_BLOCKING=1", "nothing overlaps"),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "checks every collective"),
    ],
)
def test_a_setting_known_to_hurt_is_found_in_the_environment_the_job_and_nccls_file(machine, request_for, setting, said):
    environ = dict([setting.split("=")])
    for here, request in (
        (machine(environ=environ), request_for()),
        (machine(), request_for(environment=environ)),
        (machine(recorded={"/etc/nccl.conf": f"# site\n{setting}\n"}), request_for()),
    ):
        (verdict,) = check_nccl_settings(request, here)
        assert (verdict.status, setting in verdict.found, said in verdict.found) == ("warning", True, True)


def test_a_harmless_setting_is_none(machine, request_for):
    harmless = ["NCCL_DEBUG=INFO", "NCCL_P2P_DISABLE=0", "NCCL_DEBUG_SUBSYS=^ALL", "NCCL_VERSION=2.28.3-1"]
    for setting in (*harmless, "NCCL_IB_DISABLE=1"):  # there is no InfiniBand on one machine
        (verdict,) = check_nccl_settings(request_for(nodes=1), machine(environ=dict([setting.split("=")])))
        assert verdict.status == "ok", setting


HOST, CONTAINER = ({"/proc/self/ns/pid": f"pid:[{number}]"} for number in (4026531836, 4026532847))


def test_dcgm_and_other_profilers_are_seen_in_the_process_table(machine):
    running = (
        Process(1, "systemd", ("/sbin/init",)),
        Process(70, "nv-hostengine", ("/usr/bin/nv-hostengine", "-n")),
        Process(71, "python3", ("/opt/nsys/target-linux-x64/nsys", "profile")),
        Process(72, "nsys-helper", ("/usr/bin/nsys-helper",)),
    )
    dcgm, nsys = check_other_profilers(Request(), machine(running=running, recorded=HOST))
    assert (dcgm.status, nsys.status) == ("warning", "warning")
    assert "nv-hostengine, process 70" in dcgm.found
    assert "dcgmi profile --pause" in dcgm.instead
    assert "nsys, process 71)" in nsys.found


@pytest.mark.parametrize(
    ("environ", "where", "status"),
    [
        ({}, HOST, "ok"),
        ({}, CONTAINER, "unknown"),
        ({"CUDA_INJECTION64_PATH": "/opt/tool/libtool.so"}, HOST, "warning"),
        ({"LD_PRELOAD": "/lib/libfoo.so:/opt/scorep/libscorep_adapter.so"}, HOST, "warning"),
        ({"KINETO_USE_DAEMON": "1"}, HOST, "warning"),
        ({"NSYS_PROFILING_SESSION_ID": "3", "LD_PRELOAD": "/opt/nsys/libToolsInjection64.so"}, HOST, "warning"),
    ],
)
def test_a_tool_that_would_be_loaded_into_the_training_is_named(machine, environ, where, status):
    here = machine(environ=environ, recorded=where, running=(Process(1, "bash", ("bash",)),))
    (verdict,) = check_other_profilers(Request(), here)
    assert (verdict.status, bool(verdict.instead)) == (status, status == "warning")


def test_a_missing_nsys_fails_only_what_needs_it(machine, request_for):
    (asked,) = check_nsys(request_for(NSYS), machine())
    (machine_alone,) = check_nsys(Request(), machine())
    assert (asked.status, machine_alone.status) == ("fails", "warning")
    assert list(check_nsys(request_for("profiling.use_pytorch_profiler=true"), machine())) == []


def test_an_nsys_that_does_not_run_is_no_nsys(machine, request_for, monkeypatch):
    def refuse(executable):
        raise CaptureError(f"{executable} does not answer as nsys does")

    monkeypatch.setattr(doctor_nsys, "find_nsys", refuse)
    (verdict,) = check_nsys(request_for(NSYS), machine(recorded={"nsys --version": ""}))
    assert (verdict.status, verdict.found) == ("fails", "/usr/bin/nsys does not answer as nsys does")


@pytest.mark.parametrize(
    ("installed", "status"),
    [("0.16.1", "ok"), ("0.19.9", "ok"), ("0.15.3", "warning"), ("0.20.0rc1", "warning"), ("1.0", "warning"), (None, None)],
)
def test_a_megatron_core_that_no_test_has_run_with_is_named_with_what_to_type(machine, installed, status):
    verdicts = list(check_megatron_core(Request(), machine(recorded={"megatron-core": installed} if installed else {})))
    assert [verdict.status for verdict in verdicts] == ([status] if installed else [])
    for verdict in verdicts:
        assert installed in verdict.found
        assert ("pip install 'megatron-core>=0.16.1,<0.20'" in verdict.instead) == (status == "warning")
