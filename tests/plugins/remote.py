"""Executors of jobs on other machines, as their users configure them. No cluster and no network."""

import importlib

import nemo_run as run
import pytest
from nemo_run.config import get_nemorun_home
from torchx.specs import AppDef

KINDS = ["docker", "skypilot", "skypilot_jobs", "dgxcloud", "lepton", "kubeflow"]
BUCKET = {"/bucket": {"name": "my-profiles", "store": "s3", "mode": "MOUNT"}}


@pytest.fixture
def kubeflow(monkeypatch):
    """Its constructor would read a kubeconfig."""
    pytest.importorskip("kubernetes")
    monkeypatch.setattr("kubernetes.config.load_kube_config", lambda: None)
    return lambda **more: run.KubeflowExecutor(image="image", num_nodes=2, gpus_per_node=2, **more)


@pytest.fixture
def skypilot(monkeypatch):
    """NeMo-Run builds these only beside SkyPilot itself, of which packaging uses nothing."""
    for name in ("skypilot", "skypilot_jobs"):
        monkeypatch.setattr(f"nemo_run.core.execution.{name}._SKYPILOT_AVAILABLE", True)
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


def assigned(executor):
    executor.assign("exp_1", f"{get_nemorun_home()}/experiments/title/exp_1", "t", "t")
    return executor


@pytest.fixture(autouse=True)
def nemorun_home(tmp_path, monkeypatch):
    monkeypatch.delenv("LOGLEVEL", raising=False)  # NeMo-Run passes it on
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))


def package(task, executor) -> AppDef:
    """What NeMo-Run starts."""
    packaging = importlib.import_module("nemo_run.run.torchx_backend.packaging")
    return packaging.package("t", task, executor=executor)
