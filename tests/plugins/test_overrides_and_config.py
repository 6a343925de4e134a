"""What each plugin does to a task: the overrides of a Script, word by word, and the same config for a Partial."""

import functools
import os
import sys
from unittest.mock import MagicMock

import fiddle as fdl
import nemo_run as run
import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE, FaultToleranceConfig, ProfilingConfig
from tests.plugins.conftest import nsys, pretrain, pytorch
from tests.system.jobs import ended_well

WINDOW = {"profile_step_start": 50, "profile_step_end": 55, "profile_ranks": [0, 1, 2]}
MEMORY = {"record_memory_history": True, "memory_snapshot_path": "/data/snapshot.pickle"}
WINDOW_OVERRIDES = ["profile_step_start=50", "profile_step_end=55", "profile_ranks=[0,1,2]"]
MEMORY_OVERRIDES = ["record_memory_history=true", "memory_snapshot_path=/data/snapshot.pickle"]
NSYS = ["use_nsys_profiler=true", *WINDOW_OVERRIDES, "record_shapes=true"]
TORCH = ["use_pytorch_profiler=true", *WINDOW_OVERRIDES, *MEMORY_OVERRIDES, "record_shapes=false"]
FAULT_TOLERANCE = ["enable_ft_package=true", "calc_ft_timeouts=false"]
each_plugin = pytest.mark.parametrize(
    ("make", "section", "overrides"),
    [
        (functools.partial(NsysPlugin, **WINDOW, record_shapes=True), "profiling", NSYS),
        (functools.partial(PyTorchProfilerPlugin, **WINDOW, **MEMORY), "profiling", TORCH),
        (functools.partial(FaultTolerancePlugin, calc_ft_timeouts=False), "ft", FAULT_TOLERANCE),
    ],
    ids=["nsys", "pytorch", "ft"],
)


@each_plugin
def test_a_script_gets_overrides_and_a_partial_or_a_built_config_ends_the_same(
    make, section, overrides, partial, script, built
):
    """A converter, which makes a script's arguments, has no part in a partial."""
    script.args = ["--config", "x.yaml"]
    for _ in range(2):
        make().setup(script, run.LocalExecutor())
    assert script.args == ["--config", "x.yaml", *(f"{section}.{override}" for override in overrides)]
    del script.args[:2]
    real = run.Partial(partial.__fn_or_cls__)
    real.config = type(built(partial))()
    for task in (partial, partial, real):
        make(script_args_converter_fn=lambda _: ["--a"]).setup(task, run.LocalExecutor())
    assert real.config == built(partial) == built(script)


@each_plugin
def test_a_script_that_is_only_mocked_is_set_up_like_a_real_one(make, section, overrides, caplog):
    """As in Megatron Bridge's own tests: a dataclass's fields with a default factory are not among the class's attributes."""
    script = MagicMock(spec=run.Script, args=[])
    make().setup(script, MagicMock())
    assert (script.args, caplog.text) == ([f"{section}.{override}" for override in overrides], "")


@each_plugin
def test_a_missing_section_of_a_config_of_any_class_is_made(make, section, overrides, local):
    task = run.Partial(pretrain, config=MagicMock(profiling=None, ft=None))
    make().setup(task, local)
    made = fdl.build(getattr(task.config, section))
    assert type(made) is (FaultToleranceConfig if section == "ft" else ProfilingConfig)


@each_plugin
def test_a_converter_replaces_the_overrides_once(make, section, overrides, script, local):
    seen = []

    def converter(script_args):
        seen.append(script_args)
        return ["--a", "1"]

    plugin = make(script_args_converter_fn=converter)
    plugin.setup(script, local)
    plugin.setup(script, local)
    assert script.args == ["--a", "1"]
    assert type(seen[0]).__name__ == f"{type(plugin).__name__}ScriptArgs"


def test_a_setting_the_user_gave_before_is_replaced_not_doubled(script, local):
    script.args = ["profiling.profile_step_start=1", "model.x=1", "++profiling.profile_step_end=2"]
    NsysPlugin(profile_step_start=5, profile_step_end=7).setup(script, local)
    assert script.args[:3] == ["profiling.profile_step_start=5", "model.x=1", "++profiling.profile_step_end=7"]
    assert sum("profile_step" in arg for arg in script.args) == 2


@pytest.mark.parametrize("path", ["a b.pickle", "a,b", "a=b", "'a'", "$HOME/a", "[a]", "null", "1e3", "~/a", "{a}"])
def test_a_snapshot_path_that_an_override_cannot_carry_is_refused_for_a_script_alone(path, partial, script, local, built):
    plugin = PyTorchProfilerPlugin(profile_step_start=1, profile_step_end=2, memory_snapshot_path=path)
    with pytest.raises(ProfilingConfigError, match="memory_snapshot_path"):
        plugin.setup(script, local)
    assert script.args == []
    plugin.setup(partial, local)
    assert built(partial).profiling.memory_snapshot_path == path


@pytest.mark.parametrize(
    ("forked", "file", "plugins", "says"),
    [
        (0, "a", [pytorch], True),
        (1, "a", [pytorch], False),
        (0, "manifest/a/rank-0.json", [pytorch], False),
        (0, "a", [nsys], True),
        (0, "a", [nsys, FaultTolerancePlugin], False),
        (0, "a", [FaultTolerancePlugin, nsys], False),
    ],
)
def test_a_script_that_captured_nothing_says_so_when_its_process_ends(
    forked, file, plugins, says, script, local, tmp_path, monkeypatch, capsys
):
    local.job_dir, local.env_vars[OUTPUT_DIR_VARIABLE] = str(tmp_path / "job"), str(tmp_path)
    (tmp_path / "manifest" / "a").mkdir(parents=True)
    for name in ("_DONE", file):
        (tmp_path / name).touch()
    registered, process = [], os.getpid()
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))
    for make in plugins:
        make().setup(script, local)
    monkeypatch.setattr(os, "getpid", lambda: process + forked)
    for function, *arguments in registered:
        function(*arguments)
    assert ("job captured nothing" in capsys.readouterr().err) == says


def foreign(model=None):
    """A config without the sections."""


@each_plugin
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, r"run\.Partial .*run\.Script"),
        (run.Partial(print), "found no config"),
        (run.Partial(pretrain, config=run.Config(foreign)), "needs the field '(profiling|ft)'"),
    ],
)
def test_a_task_that_cannot_be_set_up_is_refused(make, section, overrides, wrong, message, local):
    with pytest.raises(ProfilingConfigError, match=message):
        make().setup(wrong, local)
    assert local.launcher is None


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_ranks_are_held_against_slurm_nodes_times_tasks(launcher, partial, slurm):
    slurm.launcher = launcher
    plugin = PyTorchProfilerPlugin(profile_step_start=1, profile_step_end=2, profile_ranks=[7])
    # LocalExecutor without a launcher: a script may start ranks of its own, a later plugin may add a launcher.
    for executor in (slurm, run.LocalExecutor()):
        plugin.setup(partial, executor)
    plugin.profile_ranks = [8]
    for _ in range(2):
        with pytest.raises(ProfilingConfigError, match="8 ranks"):
            plugin.setup(partial, slurm)
        slurm.get_launcher()  # rewrites ntasks_per_node under torchrun


#: Sets up a script on a submit host.
SUBMIT = """
import sys
sys.modules |= {"torch": None, "megatron": None}
import bridge_profiling.plugins
assert "nemo_run" not in sys.modules
import nemo_run as run
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin

window = {"profile_step_start": 1, "profile_step_end": 2}
for plugin in (NsysPlugin(**window), PyTorchProfilerPlugin(**window), FaultTolerancePlugin()):
    script = run.Script(path="a.py", entrypoint="python")
    plugin.setup(script, run.LocalExecutor(launcher="torchrun"))
    assert script.args, plugin
"""


@pytest.mark.integration
def test_the_plugins_set_up_a_script_where_torch_and_megatron_are_missing():
    ended_well([sys.executable, "-c", SUBMIT])
