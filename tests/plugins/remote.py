"""Executors of jobs on other machines, as their users configure them. No cluster and no network."""

import importlib
import json
import os
from pathlib import Path

import nemo_run as run
import pytest
from torchx.specs import AppDef

KINDS = ["docker", "skypilot", "skypilot_jobs", "dgxcloud", "lepton", "kubeflow"]
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


def assigned(executor):
    executor.assign("exp_1", str(Path(os.environ["NEMORUN_HOME"], "experiments", "title", "exp_1")), "t", "t")
    return executor


@pytest.fixture(autouse=True)
def nemorun_home(tmp_path, monkeypatch):
    monkeypatch.delenv("LOGLEVEL", raising=False)  # NeMo-Run passes it on
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    for module in ("nemo_run.config", "nemo_run.core.execution.dgxcloud", "nemo_run.core.execution.lepton"):
        monkeypatch.setattr(importlib.import_module(module), "get_nemorun_home", lambda: str(tmp_path))


def package(task, executor) -> AppDef:
    """What NeMo-Run starts."""
    packaging = importlib.import_module("nemo_run.run.torchx_backend.packaging")
    return packaging.package("t", task, executor=executor)
