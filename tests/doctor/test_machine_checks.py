"""What doctor says about a machine, from text that real machines were recorded with."""

from __future__ import annotations

import pytest

from bridge_profiling.doctor.checks import Process
from bridge_profiling.doctor.environment import check_megatron_core, check_nccl_settings, check_other_profilers
from bridge_profiling.doctor.gpus import check_gpus, parse_nvlink, parse_topology
from bridge_profiling.doctor.nsys import check_cpu_sampling, check_gpu_metrics_permission, check_nsys
from bridge_profiling.doctor.request import Request

QUERY = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
GPU_METRICS = "profiling.nsys_gpu_metrics=true"
NSYS = "profiling.use_nsys_profiler=true"

#: /proc/self/status of root on a machine, of root in a container without added capabilities, of a user.
STATUS = {
    "root": "CapEff:\t000001fffeffffff\n",
    "container": "CapEff:\t00000000a80425fb\n",
    "user": "CapEff:\t0000000000000000\n",
}
UID_MAP = {"machine": "         0          0 4294967295\n", "user namespace": "         0       1000          1\n"}

#: Two sockets with four V100s each and network cards, as nvidia-smi lays them out: not all pairs are linked, nor alike.
TWO_SOCKETS = "\n".join(
    "\t".join(line.split())
    for line in """
. GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 mlx5_0 CPU
GPU0 X NV1 NV1 NV2 NV2 SYS SYS SYS PIX 0-19
GPU1 NV1 X NV2 NV1 SYS NV2 SYS SYS PIX 0-19
GPU2 NV1 NV2 X NV2 SYS SYS NV1 SYS PHB 0-19
GPU3 NV2 NV1 NV2 X SYS SYS SYS NV1 PHB 0-19
GPU4 NV2 SYS SYS SYS X NV1 NV1 NV2 SYS 20-39
GPU5 SYS NV2 SYS SYS NV1 X NV2 NV1 SYS 20-39
GPU6 SYS SYS NV1 SYS NV1 NV2 X NV2 SYS 20-39
GPU7 SYS SYS SYS NV1 NV2 NV1 NV2 X SYS 20-39
mlx5_0 PIX PIX PHB PHB SYS SYS SYS SYS X
""".strip().splitlines()
)


def h200x2(recorded, machine, **more):
    """Two H200s of one host, as recorded."""
    return machine(
        files={"/proc/driver/nvidia/params": recorded("h200x2-params.txt")},
        commands={
            QUERY: "NVIDIA H200, 580.159.04\nNVIDIA H200, 580.159.04\n",
            "nvidia-smi topo -m": recorded("h200x2-topo.txt"),
            "nvidia-smi nvlink -s": recorded("h200x2-nvlink.txt"),
        }
        | more.pop("commands", {}),
        **more,
    )


def shown(verdicts):
    return [f"{verdict.status} {verdict.check}: {verdict.found}" for verdict in verdicts]


def test_two_linked_h200s_are_well(recorded, machine):
    assert shown(check_gpus(Request(), h200x2(recorded, machine))) == [
        "ok GPUs: 2 × NVIDIA H200, driver 580.159.04",
        "ok GPU topology: each of 1 pair: NV18",
        "ok NVLink: all 36 links active, 478 GB/s per GPU and direction",
    ]


def test_a_recorded_topology_is_read_with_its_underlined_header(recorded):
    assert "\x1b[4m" in recorded("h200x2-topo.txt")
    assert parse_topology(recorded("h200x2-topo.txt")) == {("GPU0", "GPU1"): "NV18"}
    assert parse_topology("nothing of the kind") == {}


def test_an_inactive_link_is_named(recorded, machine):
    lame = recorded("h200x2-nvlink.txt").replace("Link 17: 26.562 GB/s", "Link 17: <inactive>", 1)
    assert parse_nvlink(lame)["GPU0"][17] is None
    (verdict,) = list(check_gpus(Request(), h200x2(recorded, machine, commands={"nvidia-smi nvlink -s": lame})))[2:]
    assert verdict.status == "warning"
    assert "1 of 36 links are inactive (GPU0 link 17)" in verdict.found


def test_a_slower_gpu_is_named(recorded, machine):
    text = recorded("h200x2-nvlink.txt")
    first, second = text.split("GPU 1:")
    slow = first + "GPU 1:" + second.replace("26.562", "25.000")
    verdict = list(check_gpus(Request(), h200x2(recorded, machine, commands={"nvidia-smi nvlink -s": slow})))[2]
    assert (verdict.status, "GPU1 has 450 GB/s, others up to 478 GB/s" in verdict.found) == ("warning", True)


def test_pairs_across_sockets_are_counted_and_network_cards_are_not(recorded, machine):
    links = parse_topology(TWO_SOCKETS)
    assert len(links) == 28
    assert links["GPU0", "GPU4"] == "NV2"
    verdict = list(check_gpus(Request(), h200x2(recorded, machine, commands={"nvidia-smi topo -m": TWO_SOCKETS})))[1]
    assert verdict.status == "warning"
    assert "12 of 28 pairs" in verdict.found
    assert "SYS: GPU0-GPU5" in verdict.found


def test_more_ranks_than_gpus_on_a_machine_is_a_warning(recorded, machine, request_for):
    verdicts = list(check_gpus(request_for(world_size=8, nodes=2), h200x2(recorded, machine)))
    assert "warning GPUs: 4 ranks share 2" in shown(verdicts)


def test_without_nvidia_smi_nothing_is_ok(machine):
    (verdict,) = check_gpus(Request(), machine())
    assert verdict.status == "unknown"
    assert "nvidia-smi is not on this machine's PATH" in verdict.found


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
def test_gpu_metrics_need_a_permission(recorded, machine, request_for, admin_only, who, namespace, status):
    params = recorded("h200x2-params.txt")
    assert "RmProfilingAdminOnly: 0" in params
    here = machine(
        files={
            "/proc/driver/nvidia/params": params.replace("AdminOnly: 0", f"AdminOnly: {admin_only}"),
            "/proc/self/status": STATUS[who],
            "/proc/self/uid_map": UID_MAP[namespace],
        }
    )
    (asked,) = check_gpu_metrics_permission(request_for(NSYS, GPU_METRICS), here)
    assert asked.status == status
    if status == "fails":
        assert "NVreg_RestrictProfilingToAdminUsers=0" in asked.instead
        (not_asked,) = check_gpu_metrics_permission(Request(), here)
        assert not_asked.status == "warning"
    assert list(check_gpu_metrics_permission(request_for(NSYS), here)) == []


def test_without_a_driver_the_permission_is_unknown(machine, request_for):
    (verdict,) = check_gpu_metrics_permission(request_for(NSYS, GPU_METRICS), machine())
    assert verdict.status == "unknown"


@pytest.mark.parametrize(
    ("level", "arguments", "who", "status"),
    [
        ("4", "[--sample=process-tree]", "user", "fails"),
        ("4", "[-s,cpu]", "user", "fails"),
        ("4", "[--cpuctxsw=process-tree]", "root", "ok"),
        ("2", "[--sample=cpu]", "user", "ok"),
    ],
)
def test_cpu_sampling_needs_the_kernels_leave(machine, request_for, level, arguments, who, status):
    files = {
        "/proc/sys/kernel/perf_event_paranoid": f"{level}\n",
        "/proc/self/status": STATUS[who],
        "/proc/self/uid_map": UID_MAP["machine"],
    }
    (verdict,) = check_cpu_sampling(request_for(NSYS, f"profiling.nsys_extra_args={arguments}"), machine(files=files))
    assert verdict.status == status
    assert list(check_cpu_sampling(request_for(NSYS, "profiling.nsys_extra_args=[--sample=none]"), machine(files=files))) == []


@pytest.mark.parametrize(
    ("setting", "told"),
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
def test_a_setting_known_to_hurt_is_found_in_the_environment_the_job_and_nccls_file(machine, request_for, setting, told):
    name, _, value = setting.partition("=")
    for here, request in (
        (machine(environ={name: value}), request_for()),
        (machine(), request_for(environment={name: value})),
        (machine(files={"/etc/nccl.conf": f"# site\n{setting}\n"}), request_for()),
    ):
        (verdict,) = check_nccl_settings(request, here)
        assert verdict.status == "warning"
        assert setting in verdict.found
        assert told in verdict.found


@pytest.mark.parametrize(
    "environ",
    [{}, {"NCCL_DEBUG": "INFO"}, {"NCCL_P2P_DISABLE": "0"}, {"NCCL_DEBUG_SUBSYS": "^ALL"}, {"NCCL_VERSION": "2.28.3-1"}],
)
def test_a_harmless_setting_is_none(machine, request_for, environ):
    (verdict,) = check_nccl_settings(request_for(), machine(environ=environ))
    assert verdict.status == "ok"


def test_on_one_machine_infiniband_is_not_missed(machine, request_for):
    (verdict,) = check_nccl_settings(request_for(nodes=1), machine(environ={"NCCL_IB_DISABLE": "1"}))
    assert verdict.status == "ok"


HOST = {"/proc/self/ns/pid": "pid:[4026531836]"}


def test_dcgm_and_other_profilers_are_seen_in_the_process_table(machine):
    running = (
        Process(1, "systemd", ("/sbin/init",)),
        Process(70, "nv-hostengine", ("/usr/bin/nv-hostengine", "-n")),
        Process(71, "nsys", ("/opt/nsys/target-linux-x64/nsys", "profile")),
        Process(72, "nsys-helper", ("/usr/bin/nsys-helper",)),
    )
    verdicts = list(check_other_profilers(Request(), machine(running=running, links=HOST)))
    assert [verdict.status for verdict in verdicts] == ["warning", "warning"]
    assert "nv-hostengine, process 70" in verdicts[0].found
    assert "dcgmi profile --pause" in verdicts[0].instead
    assert "nsys, process 71" in verdicts[1].found


def test_none_seen_is_ok_on_a_host_and_unknown_in_a_container(machine):
    running = (Process(1, "bash", ("bash",)),)
    (on_host,) = check_other_profilers(Request(), machine(running=running, links=HOST))
    (inside,) = check_other_profilers(Request(), machine(running=running, links={"/proc/self/ns/pid": "pid:[4026532847]"}))
    assert (on_host.status, inside.status) == ("ok", "unknown")


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_INJECTION64_PATH": "/opt/tool/libtool.so"},
        {"LD_PRELOAD": "/lib/libfoo.so:/opt/scorep/libscorep_adapter.so"},
        {"KINETO_USE_DAEMON": "1"},
        {"NSYS_PROFILING_SESSION_ID": "3", "LD_PRELOAD": "/opt/nsys/libToolsInjection64.so"},
    ],
)
def test_a_tool_that_would_be_loaded_into_the_training_is_named(machine, environ):
    (verdict,) = check_other_profilers(Request(), machine(environ=environ, links=HOST))
    assert verdict.status == "warning"
    assert verdict.instead


def test_a_missing_nsys_fails_only_what_needs_it(machine, request_for):
    (asked,) = check_nsys(request_for(NSYS), machine())
    (machine_alone,) = check_nsys(Request(), machine())
    assert (asked.status, machine_alone.status) == ("fails", "warning")
    assert list(check_nsys(request_for("profiling.use_pytorch_profiler=true"), machine())) == []


def test_an_nsys_that_does_not_run_is_no_nsys(machine, request_for, tmp_path, monkeypatch):
    broken = tmp_path / "nsys"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(machine, "which", lambda self, program: str(broken))
    (verdict,) = check_nsys(request_for(NSYS), machine())
    assert verdict.status == "fails"
    assert "does not answer as nsys does" in verdict.found


@pytest.mark.parametrize(
    ("installed", "status"),
    [("0.16.1", "ok"), ("0.19.2", "ok"), ("0.19.9", "ok"), ("0.15.3", "warning"), ("0.20.0rc1", "warning"), ("1.0", "warning")],
)
def test_a_megatron_core_that_no_test_has_run_with_is_named_with_what_to_type(machine, installed, status):
    (verdict,) = check_megatron_core(Request(), machine(packages={"megatron-core": installed}))
    assert verdict.status == status
    assert installed in verdict.found
    assert ("pip install 'megatron-core>=0.16.1,<0.20'" in verdict.instead) == (status == "warning")


def test_without_megatron_core_the_doctor_says_nothing_of_it(machine):
    assert list(check_megatron_core(Request(), machine())) == []
