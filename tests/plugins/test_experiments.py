"""What `Experiment.add` makes of tasks, executors and plugins, whatever plugins are added, and what a rerun makes of it again.

Experiments are written and not run.
"""

import functools
import importlib
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path

import fiddle as fdl
import nemo_run as run
import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, cli_factories
from bridge_profiling.plugins.task import STARTS_NSYS_KEY
from bridge_profiling.settings.overrides import apply_overrides
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE
from tests.plugins.conftest import Container, docker, nsys, package, pretrain, pytorch
from tests.system.jobs import ended_well, environment

pytestmark = pytest.mark.usefixtures("nemorun_home")


@pytest.fixture(autouse=True)
def own_logging(monkeypatch):
    """An experiment would replace the handlers of the root logger."""
    for name in ("configure_logging", "deconfigure_logging"):
        monkeypatch.setattr(importlib.import_module("nemo_run.run.experiment"), name, lambda **_: None)


def save(experiment):
    """Write what `Experiment.run` writes before it starts anything."""
    experiment._save_experiment(exist_ok=True)
    experiment._save_jobs()
    return experiment.jobs[0]


def add(task, *plugins, executor=None, name="t"):
    """The job that an experiment makes, saved and not run."""
    with run.Experiment("e") as experiment:
        experiment.add(task, executor=executor or run.LocalExecutor(), name=name, plugins=list(plugins) or None)
        return save(experiment)


def rerun(job):
    """The same job in a rerun of its experiment, saved and not run."""
    executor = job.executors[0] if hasattr(job, "executors") and isinstance(job.executors, list) else job.executor
    first = run.Experiment.from_id(executor.experiment_id)
    # As NeMo-Run loads them after a real run.
    first.tunnels = {"first": job.executor.tunnel} if isinstance(executor, run.SlurmExecutor) else {}
    with first.reset() as experiment:
        assert experiment.tunnels == {}
        return save(experiment)


# -- tasks that cannot be submitted ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Model:
    params_dtype: object = None


@dataclass(kw_only=True)
class WithModel(Container):
    model: Model = field(default_factory=Model)


def with_dtype() -> WithModel:
    """A recipe whose config has what NeMo-Run does not serialize."""
    import torch

    return WithModel(model=Model(params_dtype=torch.float32))


WAY_OUT = r"run\.Script\(path=.*apply_overrides\(config, sys\.argv\[1:\]\)"


@pytest.mark.parametrize("plugin", [nsys(), FaultTolerancePlugin()])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Container, "the task is a Container"),
        (with_dtype, "the task is a WithModel"),
        (lambda: with_dtype, "the task is a function"),
        (lambda: run.Config(Container), "the task is a Config"),
        (lambda: [run.Partial(pretrain, config=run.Config(Container)), Container()], "the task is a Container"),
        (
            lambda: run.Partial(pretrain, config=with_dtype()),
            r"pretrain cannot be sent to the job: config\.model\.params_dtype is a torch\.dtype",
        ),
    ],
)
def test_a_task_that_cannot_be_submitted_is_one_error_from_add_on_and_adds_nothing(plugin, make, message):
    task = make()
    with run.Experiment("e") as experiment:
        with pytest.raises(ProfilingConfigError, match=f"{message}.*{WAY_OUT}"):
            experiment.add(task, executor=run.LocalExecutor(), name="t", plugins=[plugin])
        assert not experiment.jobs


#: The script that the error describes. Its hook captures in the directory that the plugin has set.
TRAIN = """
import sys
import torch
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.settings.overrides import apply_overrides
from tests.plugins.test_experiments import with_dtype

config = with_dtype()
apply_overrides(config, sys.argv[1:])
with ProfilingHook(config.profiling, rank=0) as hook:
    for iteration in range(8):
        with hook.iteration(iteration):
            torch.ones(8, dtype=config.model.params_dtype).sum()
"""


@pytest.mark.integration
def test_the_way_out_of_that_error_trains_and_captures(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    job = add(run.Script(path=str(script), entrypoint="python"), pytorch())
    ended_well([sys.executable, job.task.path, *job.task.args], env=environment(**{OUTPUT_DIR_VARIABLE: str(tmp_path)}))
    assert (tmp_path / "torch" / "iter-4-6" / "rank-0.pt.trace.json.gz").is_file()


# -- plugins ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plugin",
    [
        run.Config(NsysPlugin, profile_step_start=10, profile_step_end=12),
        run.Partial(NsysPlugin, profile_step_start=10, profile_step_end=12),
        fdl.cast(run.Config, fdl.Config(NsysPlugin, profile_step_start=10, profile_step_end=12)),
        cli_factories.nsys(),
    ],
)
def test_a_plugin_may_still_be_a_config(plugin, script):
    built = NsysPlugin(profile_step_start=10, profile_step_end=12)
    assert add(script, plugin).task.args == add(script, built).task.args != []


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (nsys(), r"plugins=NsysPlugin\(.* is not a list"),
        (7, "plugins=7 is not a list"),
        (NsysPlugin, "plugins=<class .* is not a list"),
        ([NsysPlugin], "<class .* is not a plugin"),
        (["nsys"], "'nsys' among the plugins is not a plugin"),
        ("nsys", "plugins='nsys' is not a list"),
        ([[nsys()]], "is not a plugin"),
        ([None], "None among"),
    ],
)
def test_what_is_no_list_of_plugins_is_one_error(plugins, message, script):
    with run.Experiment("e") as experiment:
        with pytest.raises(ProfilingConfigError, match=rf"{message}.*Pass plugins=\[PyTorchProfilerPlugin\("):
            experiment.add(script, executor=run.LocalExecutor(), name="t", plugins=plugins)
        assert not experiment.jobs


def test_a_partial_of_fiddle_is_one_of_nemo_run():
    job = add(fdl.Partial(pretrain, config=fdl.Config(Container)), pytorch())
    assert type(job.task) is run.Partial
    assert fdl.build(job.task.config).profiling.use_pytorch_profiler


def converted(option, script_args):
    return [option]


@pytest.mark.parametrize("converter", [functools.partial(converted, "--a"), lambda _: ["--a"]])
def test_a_job_whose_plugin_has_any_converter_is_saved_and_loaded(converter, script):
    job = add(script, nsys(script_args_converter_fn=converter))
    assert (job.task.args, rerun(job).task.args) == (["--a"], ["--a"])


# -- profilers that exclude each other -------------------------------------------------------------------------------------

EXCLUDE = "NsysPlugin and PyTorchProfilerPlugin exclude each other"
WARNING = "Nsys not supported with the FaultTolerancePlugin"


@pytest.mark.parametrize("converter", [None, functools.partial(converted, "--a")])
@pytest.mark.parametrize("makes", itertools.permutations([nsys, pytorch, FaultTolerancePlugin]))
def test_nsys_and_the_torch_profiler_are_refused_in_any_order_with_fault_tolerance(makes, converter, task, caplog):
    plugins = [make(script_args_converter_fn=converter) for make in makes]
    with run.Experiment("e") as experiment:
        with pytest.raises(ProfilingConfigError, match=EXCLUDE):
            experiment.add(task, executor=run.LocalExecutor(), name="t", plugins=plugins)
        assert not experiment.jobs
    assert caplog.text.count(WARNING) <= 1


NSYS, TORCH, FT = "profiling.use_nsys_profiler=true", "profiling.use_pytorch_profiler=true", "ft.enable_ft_package=true"
YAML = {"nsys": "profiling: {use_nsys_profiler: true}", "torch": "profiling: {use_pytorch_profiler: true}"}
YAML |= {"ft": "ft: {enable_ft_package: true}", "both": "ft: {enable_ft_package: true}\nprofiling: {use_nsys_profiler: true}"}


def routed(kind, overrides, yaml, tmp_path):
    """A task with settings of its own: a Script's overrides, or a Partial's config."""
    if kind == "partial":
        config = Container()
        apply_overrides(config, overrides)
        return run.Partial(pretrain, config=config)
    (tmp_path / "a.yaml").write_text(YAML.get(yaml, ""))
    file = tmp_path / "a.yaml"
    files = [f"--config={file}", "--config", "x" * 300] if yaml == "both" else ["--config", str(file)] if yaml else []
    metadata = {STARTS_NSYS_KEY: True} if kind == "ours" else {}
    return run.Script(path="a.py", entrypoint="python", args=[*files, *overrides], metadata=metadata)


@pytest.mark.parametrize(
    ("kind", "overrides", "yaml", "launcher", "plugins"),
    [
        *((kind, [NSYS, FT], None, None, []) for kind in ("partial", "script", "ours")),
        *((kind, [NSYS], None, "ft", []) for kind in ("partial", "script", "ours")),
        *((kind, [FT], None, run.Torchrun(nsys_profile=True), []) for kind in ("partial", "script", "ours")),
        *((kind, [], None, run.FaultTolerance(nsys_profile=True), []) for kind in ("partial", "script", "ours")),
        *((kind, [FT], None, None, [nsys]) for kind in ("partial", "script", "ours")),
        *((kind, [], None, run.FaultTolerance(), [nsys]) for kind in ("partial", "script", "ours")),
        *((kind, [NSYS], None, None, [FaultTolerancePlugin]) for kind in ("partial", "script", "ours")),
        ("ours", [], "both", None, []),
        ("ours", [FT], "nsys", None, []),
        ("ours", [], "ft", None, [nsys]),
        ("ours", [], "nsys", None, [FaultTolerancePlugin]),
        ("script", [NSYS, FT], None, run.Torchrun(nsys_profile=True), [nsys, FaultTolerancePlugin, nsys]),
    ],
)
def test_nsys_is_off_with_fault_tolerance_by_any_route_with_one_warning(
    kind, overrides, yaml, launcher, plugins, tmp_path, built, caplog
):
    task = routed(kind, overrides, yaml, tmp_path)
    executor = run.LocalExecutor(launcher=launcher)
    job = add(task, *(make() for make in plugins), executor=executor)
    if kind != "partial" and yaml:
        job.task.args = [argument for argument in job.task.args if argument.startswith(("profiling.", "ft."))]
    assert built(job.task).profiling.use_nsys_profiler is False
    assert not any("nsys profile" in " ".join([role.entrypoint, *role.args]) for role in package(job.task, job.executor).roles)
    assert job.executor.get_launcher().nsys_profile is False
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize(
    ("overrides", "yaml", "launcher", "plugins"),
    [
        ([NSYS, TORCH], None, None, []),
        ([NSYS, TORCH, FT], None, None, []),
        ([TORCH], "nsys", None, []),
        ([TORCH], None, run.Torchrun(nsys_profile=True), []),
        ([TORCH], None, run.FaultTolerance(nsys_profile=True), []),
        ([], "torch", None, [nsys]),
        ([], "nsys", None, [pytorch]),
        ([NSYS], None, None, [FaultTolerancePlugin, pytorch]),
    ],
)
def test_nsys_with_the_torch_profiler_is_refused_by_any_route(overrides, yaml, launcher, plugins, tmp_path):
    task = routed("ours", overrides, yaml, tmp_path)
    with pytest.raises(ProfilingConfigError, match=EXCLUDE):
        add(task, *(make() for make in plugins), executor=run.LocalExecutor(launcher=launcher))


def test_other_jobs_are_as_nemo_run_makes_them(script, caplog):
    job = add(script, executor=run.LocalExecutor(launcher=run.Torchrun(nsys_profile=True)))
    assert (job.task, job.plugins, job.executor.env_vars, caplog.text) == (script, None, {}, "")
    assert job.executor.launcher.nsys_profile


# -- reruns -----------------------------------------------------------------------------------------------------------------


def written(executor) -> str:
    return executor.env_vars[OUTPUT_DIR_VARIABLE]


EXECUTORS = {
    "local": run.LocalExecutor(),
    "torchrun": run.LocalExecutor(launcher="torchrun", ntasks_per_node=2),
    "slurm": run.SlurmExecutor(account="team"),
    "docker": docker(),
}


@pytest.mark.parametrize(
    ("kind", "make"),
    [pair for pair in itertools.product(EXECUTORS, [nsys, pytorch, FaultTolerancePlugin]) if pair != ("docker", nsys)],
)
def test_each_rerun_writes_below_its_own_experiment(kind, make, script):
    job = add(script, make(), executor=EXECUTORS[kind])
    for _ in range(3):
        directory = written(job.executor)
        assert directory in ("/nemo_run/profiles", f"{job.executor.job_dir}/profiles")
        # Loaded by another process, it loads this package, and gets the methods that a plugin replaces.
        assert type(job.plugins[-1]).__module__.startswith("bridge_profiling")
        assert ("get_launcher_prefix" in vars(job.executor)) == (kind != "docker")
        job = rerun(job)


def test_a_rerun_of_a_group_writes_below_its_own_experiment(script):
    job = add([script, script], pytorch())
    again = rerun(job)
    assert [written(executor) for executor in again.executors] == [f"{again.executors[0].job_dir}/profiles"] * 2
    assert again.executors[0].experiment_id != job.executors[0].experiment_id


def test_the_users_own_directory_stays_in_a_rerun(script, tmp_path):
    job = add(script, pytorch(), executor=run.LocalExecutor(env_vars={OUTPUT_DIR_VARIABLE: str(tmp_path)}))
    assert (written(job.executor), written(rerun(job).executor)) == (str(tmp_path), str(tmp_path))


def test_a_rerun_through_a_tunnel_is_next_to_the_first_run(script, tmp_path):
    ssh = run.SSHTunnel(host="login", user="me", job_dir="/scratch/me")
    job = add(script, pytorch(), executor=run.SlurmExecutor(account="team", tunnel=ssh))
    for _ in range(3):
        assert written(job.executor) == f"/scratch/me/e/{job.executor.experiment_id}/t/profiles"
        job = rerun(job)


@pytest.mark.parametrize("executor", [run.LocalExecutor(), run.SlurmExecutor(account="team")], ids=["local", "slurm"])
def test_a_moved_experiment_writes_where_it_is_run_again(executor, script, tmp_path, monkeypatch):
    job = add(script, pytorch(), executor=executor)
    Path(tmp_path / "experiments").rename(tmp_path / "there")
    (tmp_path / "other").mkdir()
    (tmp_path / "there").rename(tmp_path / "other" / "experiments")
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "other"))
    assert written(rerun(job).executor).startswith(str(tmp_path / "other"))


def test_an_executor_of_one_job_serves_another_and_each_writes_below_its_own(script):
    first = add(script, pytorch())
    again = add(script, pytorch(), executor=first.executor)
    unprofiled = add(script, executor=first.executor)
    directories = {written(job.executor) for job in (first, again, unprofiled)}
    assert len(directories) == 3
    assert written(first.executor) == f"{first.executor.job_dir}/profiles", "the executor that was given is not changed"
