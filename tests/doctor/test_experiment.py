"""What doctor reads from experiments that NeMo-Run itself wrote."""

from dataclasses import dataclass, field

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.doctor import find_experiment, read_experiment
from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin
from tests.batch_scripts import written_experiment
from tests.plugins.conftest import Container as WithoutModel
from tests.plugins.conftest import Train, pretrain

run = pytest.importorskip("nemo_run")

# NeMo-Run's experiments start shells.
pytestmark = pytest.mark.integration


@dataclass(kw_only=True)
class Model:
    num_layers: int = 2
    tensor_model_parallel_size: int = 1


@dataclass(kw_only=True)
class Container(WithoutModel):
    model: Model = field(default_factory=Model)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A NEMORUN_HOME with an experiment that was never submitted."""
    home = tmp_path_factory.mktemp("home")
    slurm = run.SlurmExecutor(
        account="team", partition="gpu", nodes=2, ntasks_per_node=4, launcher="torchrun", packager=run.Packager(),
        container_image="image.sqsh", tunnel=run.LocalTunnel(job_dir=""), env_vars={"NCCL_P2P_DISABLE": "1"},
    )  # fmt: skip
    train, model = run.Config(Train, train_iters=20), run.Config(Model, num_layers=4, tensor_model_parallel_size=2)
    partial = run.Partial(pretrain, config=run.Config(Container, train=train, model=model))
    known = {"bridge_profiling.settings": "model.context_parallel_size=2 train.train_iters=9 train.start_iteration=3"}
    arguments = ["--recipe", "big", "train.train_iters=25", "--flag"]
    script = run.Script("train.py", entrypoint="python", args=arguments, metadata=known)
    window = {"profile_step_start": 4, "profile_step_end": 6}
    nsys = NsysPlugin(**window, profile_ranks=[0, 3], nsys_gpu_metrics=True)
    torch = PyTorchProfilerPlugin(**window, profile_ranks=[0, 1])
    with written_experiment(home, "study") as experiment:
        experiment.add(partial, executor=slurm, name="nsys", plugins=[nsys])
        local = run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")
        experiment.add(script, executor=local, name="torch", plugins=[torch])
        experiment.add([run.Script("a.py", entrypoint="python"), run.Script(inline="echo")], executor=slurm, name="group")
    return home


def test_a_partial_is_read_with_its_config_and_its_executor_and_scripts_with_their_overrides(home):
    found = read_experiment(find_experiment("study", {"NEMORUN_HOME": str(home)}))
    requests = {request.name.partition("/")[2]: request for request in found}
    request = requests["nsys"]
    assert (request.profiling.window.start, request.profiling.profile_ranks) == (4, [0, 3])
    assert (request.wants_nsys, request.wants_gpu_metrics) == (True, True)
    assert (request.integer("train.train_iters"), request.parallel_size("tensor_model")) == (20, 2)
    assert (request.world_size, request.nodes, request.launcher) == (8, 2, "torchrun")
    assert request.environment["NCCL_P2P_DISABLE"] == "1"
    assert "image.sqsh" in request.elsewhere
    # The job sees /nemo_run/profiles; this machine knows that place by the job's directory.
    assert request.output_dir.is_relative_to(home / "experiments" / "study")
    # Scripts with their overrides; each task of a group is a run of its own.
    request = requests["torch"]
    assert (request.profiling.use_pytorch_profiler, request.profiling.profile_ranks) == (True, [0, 1])
    # What the recipe behind its options sets is in the script's metadata; its arguments win over that.
    assert request.settings == {"train.train_iters": 25, "model.context_parallel_size": 2, "train.start_iteration": 3}
    assert (request.world_size, request.nodes, request.launcher, request.elsewhere) == (2, 1, "torchrun", "")
    assert {"group[0]", "group[1]"} <= set(requests)
    assert not requests["group[0]"].profiling.enabled


def test_an_experiment_is_found_by_directory_id_and_title(home):
    (directory,) = (home / "experiments" / "study").iterdir()
    environ = {"NEMORUN_HOME": str(home)}
    for name in (str(directory), str(directory / "nsys"), directory.name, "study"):
        assert find_experiment(name, environ) == directory
    with pytest.raises(ProfilingConfigError, match="the experiment 'studyy' does not exist"):
        find_experiment("studyy", environ)
