"""Where each executor's job writes its profiles, and what NeMo-Run would start there: golden roles, compared whole.

`UPDATE_GOLDEN=1` rewrites the files in golden_roles/. No cluster and no network: NeMo-Run packages a task from what it knows.
"""

from __future__ import annotations

import copy
import getpass
import importlib
import json
import os
import re
from pathlib import Path

import nemo_run as run
import pytest
from torchx.specs import AppDef

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin

GOLDEN = Path(__file__).parent / "golden_roles"
PLUGINS = {
    "nsys": NsysPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 3]),
    "torch": PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 3]),
}
BUCKET = {"/bucket": {"name": "my-profiles", "store": "s3", "mode": "MOUNT"}}


@pytest.fixture
def kubeflow(tmp_path, monkeypatch):
    """Its constructor reads a kubeconfig; this one leads nowhere."""
    pytest.importorskip("kubernetes")
    cluster = {"clusters": [{"name": "none", "cluster": {"server": "https://127.0.0.1:1"}}]}
    context = {"contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}], "current-context": "none"}
    users = {"users": [{"name": "none", "user": {"token": "none"}}]}
    (tmp_path / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **cluster, **context, **users}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    config = importlib.import_module("kubernetes.config.kube_config")
    monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    return lambda **more: run.KubeflowExecutor(image="image", num_nodes=2, gpus_per_node=2, **more)


@pytest.fixture
def skypilot(monkeypatch):
    """NeMo-Run builds these only beside SkyPilot itself, of which packaging uses nothing."""
    for name in ("skypilot", "skypilot_jobs"):
        module = importlib.import_module(f"nemo_run.core.execution.{name}")
        monkeypatch.setattr(module, "_SKYPILOT_AVAILABLE", True)
    return lambda kind=run.SkypilotExecutor, **more: kind(gpus="H200", gpus_per_node=2, num_nodes=2, **more)


def docker(**more):
    return run.DockerExecutor(container_image="image", ntasks_per_node=2, **more)


def dgxcloud(**more):
    urls = {"base_url": "https://127.0.0.1:1", "kube_apiserver_url": "https://127.0.0.1:1"}
    who = {"client_id": "id", "client_secret": "none", "project_name": "project", "container_image": "image"}
    volume = {"pvc_nemo_run_dir": "/volume/nemo_run", "pvcs": [{"name": "claim", "path": "/volume"}]}
    return run.DGXCloudExecutor(**urls, **who, **volume, nodes=2, gpus_per_node=2, **more)


def lepton(**more):
    return run.LeptonExecutor(container_image="image", nemo_run_dir="/volume/nemo_run", nodes=2, gpus_per_node=2, **more)


@pytest.fixture
def executors(kubeflow, skypilot):
    """One executor of each kind, as its users configure it."""
    return {
        "docker": docker,
        "skypilot": skypilot,
        "skypilot_jobs": lambda **more: skypilot(run.SkypilotJobsExecutor, storage_mounts=BUCKET, **more),
        "dgxcloud": dgxcloud,
        "lepton": lepton,
        "kubeflow": lambda **more: kubeflow(workdir_pvc="claim", **more),
    }


def assigned(executor, tmp_path):
    home = Path(os.environ["NEMORUN_HOME"])
    executor.assign("exp_1", str(home / "experiments" / "title" / "exp_1"), "t", "t")
    return executor


@pytest.fixture(autouse=True)
def nemorun_home(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    for module in ("nemo_run.config", "nemo_run.core.execution.dgxcloud", "nemo_run.core.execution.lepton"):
        monkeypatch.setattr(importlib.import_module(module), "get_nemorun_home", lambda: str(tmp_path))


def package(task, executor) -> AppDef:
    packaging = importlib.import_module("nemo_run.run.torchx_backend.packaging")
    return packaging.package("t", task, executor=executor)


def normalized(text: str, tmp_path: Path) -> str:
    text = text.replace(str(tmp_path), "<home>").replace(f"/{getpass.getuser()}/exp_1", "/<user>/exp_1")
    return re.sub(r'("--rdzv-id",\s*)"\d+"', r'\1"<random>"', text)


@pytest.mark.parametrize("launcher", [None, "torchrun"])
@pytest.mark.parametrize("profiler", PLUGINS)
@pytest.mark.parametrize("kind", ["docker", "skypilot", "skypilot_jobs", "dgxcloud", "lepton", "kubeflow"])
def test_what_nemo_run_starts_is_what_the_golden_file_says(kind, profiler, launcher, executors, tmp_path):
    executor = assigned(executors[kind](launcher=launcher), tmp_path)
    script = run.Script(path="train.py", entrypoint="python", args=["--recipe", "mine"])
    PLUGINS[profiler].setup(script, executor)
    role = package(script, executor).roles[0]
    content = {"env": executor.env_vars | role.env, "entrypoint": role.entrypoint, "args": role.args}
    text = normalized(json.dumps(content, indent=1), tmp_path) + "\n"
    golden = GOLDEN / f"{kind}-{launcher or 'no-launcher'}-{profiler}.json"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("profiler", PLUGINS)
@pytest.mark.parametrize("kind", ["docker", "skypilot", "skypilot_jobs", "dgxcloud", "lepton", "kubeflow"])
def test_nothing_in_the_command_names_a_directory_of_the_client(kind, profiler, executors, tmp_path):
    executor = assigned(executors[kind](), tmp_path)
    script = run.Script(path="train.py", entrypoint="python")
    PLUGINS[profiler].setup(script, executor)
    role = package(script, executor).roles[0]
    assert str(tmp_path) not in " ".join([role.entrypoint, *role.args, *executor.env_vars.values()])


def test_kubeflows_launch_script_makes_the_reports_directory_on_the_volume(executors, tmp_path):
    executor = assigned(executors["kubeflow"](), tmp_path)
    script = run.Script(path="train.py", entrypoint="python")
    PLUGINS["nsys"].setup(script, executor)
    scheduler = importlib.import_module("nemo_run.run.torchx_backend.schedulers.kubeflow").KubeflowScheduler("session")
    request = scheduler._submit_dryrun(package(script, executor), executor).request
    assert request.cmd == ["/bin/bash", f"{executor.code_dir}/launch.sh"]
    launched = Path(executor.job_dir, "launch.sh").read_text()
    # pull_results(job) copies code_dir back into the job's directory at the client.
    assert f"export BRIDGE_PROFILING_DIR={executor.code_dir}/profiles\n" in launched
    assert f"\nmkdir -p {executor.code_dir}/nsys_profile && nsys profile " in launched


def test_dockers_container_gets_the_command_as_shell_text(executors, tmp_path):
    executor = assigned(executors["docker"](), tmp_path)
    script = run.Script(path="train.py", entrypoint="python")
    PLUGINS["nsys"].setup(script, executor)
    module = importlib.import_module("nemo_run.run.torchx_backend.schedulers.docker")
    scheduler = module.PersistentDockerScheduler.__new__(module.PersistentDockerScheduler)
    (container,) = scheduler._submit_dryrun(package(script, executor), executor).request.containers
    assert " ".join(container.command).startswith("mkdir -p /nemo_run/nsys_profile && nsys profile -s none ")
    assert container.executor.env_vars["BRIDGE_PROFILING_DIR"] == "/nemo_run/profiles"


def test_dgx_clouds_script_makes_the_directory_that_its_copy_of_the_job_leaves_out(executors, tmp_path):
    executor = assigned(executors["dgxcloud"](), tmp_path)
    os.makedirs(executor.experiment_dir)
    script = run.Script(path="train.py", entrypoint="python")
    PLUGINS["nsys"].setup(script, executor)
    scheduler = importlib.import_module("nemo_run.run.torchx_backend.schedulers.dgxcloud").DGXCloudScheduler("session")
    scheduler._submit_dryrun(package(script, executor), executor)
    launched = Path(executor.experiment_dir, "torchrun_job.sh").read_text()
    assert "\nmkdir -p /nemo_run/nsys_profile && nsys profile " in launched
    assert "export BRIDGE_PROFILING_DIR=/nemo_run/profiles\n" in launched


def test_a_skypilot_cluster_that_stays_keeps_the_profiles_in_its_copy_of_the_job(skypilot, tmp_path):
    executor = assigned(skypilot(), tmp_path)
    PLUGINS["torch"].setup(run.Script(path="train.py"), executor)
    assert executor.env_vars == {"BRIDGE_PROFILING_DIR": "/nemo_run/profiles"}


@pytest.mark.parametrize("kind", [run.SkypilotExecutor, run.SkypilotJobsExecutor])
def test_skypilot_machines_that_are_given_back_leave_the_profiles_in_the_bucket(kind, skypilot, tmp_path):
    executor = assigned(skypilot(kind, autodown=True, storage_mounts=BUCKET), tmp_path)
    PLUGINS["torch"].setup(run.Script(path="train.py"), executor)
    assert executor.env_vars == {"BRIDGE_PROFILING_DIR": "/bucket/exp_1/t/profiles"}


def refused(profiler, task, executor, message):
    before = copy.deepcopy((task, executor.env_vars, executor.launcher))
    with pytest.raises(ProfilingConfigError, match=message):
        PLUGINS[profiler].setup(task, executor)
    assert (task, executor.env_vars, executor.launcher) == before


@pytest.mark.parametrize("profiler", PLUGINS)
@pytest.mark.parametrize(("kind", "more"), [(run.SkypilotExecutor, {"autodown": True}), (run.SkypilotJobsExecutor, {})])
def test_skypilot_machines_that_are_given_back_without_a_bucket_are_refused(profiler, kind, more, task, skypilot, tmp_path):
    executor = assigned(skypilot(kind, **more), tmp_path)
    refused(profiler, task, executor, "Pass storage_mounts with a bucket.*BRIDGE_PROFILING_DIR")


@pytest.mark.parametrize("profiler", PLUGINS)
def test_kubeflow_without_a_volume_is_refused(profiler, task, kubeflow, tmp_path):
    refused(profiler, task, assigned(kubeflow(), tmp_path), 'workdir_pvc="CLAIM".*pull_results')


@pytest.mark.parametrize("by", ["variable", "override"])
def test_a_place_of_the_users_own_is_believed(by, script, kubeflow, tmp_path):
    executor = assigned(kubeflow(), tmp_path)
    if by == "variable":
        executor.env_vars["BRIDGE_PROFILING_DIR"] = "/data/profiles"
    else:
        script.args = ["profiling.output_dir=/data/profiles"]
    PLUGINS["torch"].setup(script, executor)
    assert executor.env_vars == ({"BRIDGE_PROFILING_DIR": "/data/profiles"} if by == "variable" else {})


def test_nsys_reports_follow_the_users_own_place(script, executors, tmp_path):
    executor = assigned(executors["docker"](), tmp_path)
    executor.env_vars["BRIDGE_PROFILING_DIR"] = "/data/profiles"
    PLUGINS["nsys"].setup(script, executor)
    role = package(script, executor).roles[0]
    assert role.entrypoint == "mkdir -p /data/profiles/nsys_profile && nsys"
    assert role.args[role.args.index("-o") + 1] == "/data/profiles/nsys_profile/profile_%h_%p"


def test_nsys_reports_in_a_place_without_a_shell_to_make_it_are_refused(script, kubeflow, tmp_path):
    executor = assigned(kubeflow(env_vars={"BRIDGE_PROFILING_DIR": "/data/profiles"}), tmp_path)
    refused("nsys", script, executor, "workdir_pvc")


@pytest.mark.parametrize("profiler", PLUGINS)
def test_an_executor_that_starts_a_ray_cluster_is_refused(profiler, task, kubeflow):
    kuberay = importlib.import_module("nemo_run.core.execution.kuberay")
    executor = kuberay.KubeRayExecutor(namespace="team", image="image")
    refused(profiler, task, executor, "KubeRayExecutor starts a Ray cluster")


# Not Kubeflow's: NeMo-Run's own object holds its API clients, and cannot be copied.
@pytest.mark.parametrize("kind", ["docker", "skypilot", "skypilot_jobs", "dgxcloud", "lepton"])
def test_a_copied_executor_reports_where_its_own_job_is(kind, script, executors, tmp_path):
    executor = assigned(executors[kind](), tmp_path)
    PLUGINS["nsys"].setup(script, executor)
    copied = copy.deepcopy(executor)
    executor.launcher = None
    assert package(script, copied).roles[0].entrypoint.startswith("mkdir -p ")
