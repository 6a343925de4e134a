"""Tasks and executors as users have them, of this machine and of others: no cluster and no network."""

import importlib
from dataclasses import dataclass, field

import nemo_run as run
import pytest
from nemo_run.config import get_nemorun_home
from torchx.specs import AppDef

from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin
from bridge_profiling.settings.profiling import FaultToleranceConfig, ProfilingConfig


@dataclass(kw_only=True)
class Train:
    train_iters: int = 100


@dataclass(kw_only=True)
class Container:
    """A ConfigContainer without megatron-core, so that these tests need none."""

    train: Train = field(default_factory=Train)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)


def pretrain(config: Container) -> None:
    """The function a Partial would run."""


def nsys(**more) -> NsysPlugin:
    return NsysPlugin(profile_step_start=4, profile_step_end=6, **more)


def pytorch(**more) -> PyTorchProfilerPlugin:
    return PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, **more)


@pytest.fixture
def partial() -> run.Partial:
    return run.Partial(pretrain, config=run.Config(Container))


@pytest.fixture
def script() -> run.Script:
    return run.Script(path="pretrain.py", entrypoint="python")


@pytest.fixture(params=["partial", "script"])
def task(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def local() -> run.LocalExecutor:
    return run.LocalExecutor()


@pytest.fixture
def slurm() -> run.SlurmExecutor:
    return run.SlurmExecutor(account="team", nodes=2, ntasks_per_node=4)


@pytest.fixture
def built():
    """The config a task ends in: a Partial's, built; a Script's, its overrides applied to the defaults."""
    import fiddle as fdl

    from bridge_profiling.settings.overrides import apply_overrides

    def build(task: run.Partial | run.Script) -> Container:
        if isinstance(task, run.Partial):
            return fdl.build(task.config)
        config = Container()
        apply_overrides(config, task.args)
        return config

    return build


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


@pytest.fixture
def nemorun_home(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))


def package(task, executor) -> AppDef:
    """What NeMo-Run starts."""
    packaging = importlib.import_module("nemo_run.run.torchx_backend.packaging")
    return packaging.package("t", task, executor=executor)
