"""What each plugin does to a task: the overrides of a Script, word by word, and the same config for a Partial."""

from __future__ import annotations

import copy
from unittest.mock import MagicMock

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from bridge_profiling.config import FaultToleranceConfig, ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import (
    FaultTolerancePlugin,
    FaultTolerancePluginScriptArgs,
    NsysPlugin,
    NsysPluginScriptArgs,
    PyTorchProfilerPlugin,
    PyTorchProfilerPluginScriptArgs,
)

NSYS = [
    "profiling.use_nsys_profiler=true",
    "profiling.profile_step_start=50",
    "profiling.profile_step_end=55",
    "profiling.profile_ranks=[0,1,2]",
    "profiling.record_shapes=true",
]
PYTORCH = [
    "profiling.use_pytorch_profiler=true",
    "profiling.profile_step_start=50",
    "profiling.profile_step_end=55",
    "profiling.profile_ranks=[0,1,2]",
    "profiling.record_memory_history=true",
    "profiling.memory_snapshot_path=/data/snapshot.pickle",
    "profiling.record_shapes=false",
]
FT = ["ft.enable_ft_package=true", "ft.calc_ft_timeouts=false"]
WINDOW = {"profile_step_start": 50, "profile_step_end": 55}
MADE = {
    "nsys": (lambda **k: NsysPlugin(**WINDOW, profile_ranks=[0, 1, 2], record_shapes=True, **k), NSYS),
    "pytorch": (
        lambda **k: PyTorchProfilerPlugin(
            **WINDOW,
            profile_ranks=[0, 1, 2],
            record_memory_history=True,
            memory_snapshot_path="/data/snapshot.pickle",
            **k,
        ),
        PYTORCH,
    ),
    "ft": (lambda **k: FaultTolerancePlugin(calc_ft_timeouts=False, **k), FT),
}
each_plugin = pytest.mark.parametrize(("make", "overrides"), MADE.values(), ids=MADE.keys())


@each_plugin
def test_a_script_gets_these_overrides_in_this_order(make, overrides, script, local):
    script.args = ["--config", "x.yaml"]
    make().setup(script, local)
    assert script.args == ["--config", "x.yaml", *overrides]


@each_plugin
def test_a_partial_and_a_script_end_in_the_same_config(make, overrides, partial, script, built):
    make().setup(partial, run.LocalExecutor())
    make().setup(script, run.LocalExecutor())
    assert built(partial) == built(script)


@each_plugin
def test_a_second_setup_leaves_task_and_executor_as_they_were(make, overrides, task, local):
    local.assign("exp_1", "/runs/exp_1", "t", "t")
    plugin = make()
    plugin.setup(task, local)
    once = copy.deepcopy((task, local))
    plugin.setup(task, local)
    assert (task, local) == once


@each_plugin
def test_a_converter_replaces_the_overrides_once(make, overrides, script, local):
    seen = []

    def converter(script_args):
        seen.append(script_args)
        return ["--a", "1"]

    plugin = make(script_args_converter_fn=converter)
    plugin.setup(script, local)
    plugin.setup(script, local)
    assert script.args == ["--a", "1"]
    assert [f"{type(seen[0]).__name__}"] == [f"{type(plugin).__name__}ScriptArgs"]


@each_plugin
def test_a_converter_has_no_part_in_a_partial(make, overrides, partial, script, built):
    make(script_args_converter_fn=lambda _: ["--a"]).setup(partial, run.LocalExecutor())
    make().setup(script, run.LocalExecutor())
    assert built(partial) == built(script)


@each_plugin
@pytest.mark.parametrize("result", ["--a 1", None, [1]])
def test_a_converter_that_returns_no_list_of_text_changes_nothing(make, overrides, result, script, local):
    before = copy.deepcopy((script, local))
    with pytest.raises(ProfilingConfigError, match="script_args_converter_fn"):
        make(script_args_converter_fn=lambda _: result).setup(script, local)
    assert (script, local) == before


@each_plugin
def test_a_missing_section_is_made(make, overrides, local, built):
    def train(config):
        pass

    for config in (MagicMock(profiling=None, ft=None), MagicMock(spec=["train"], train=None)):
        task = run.Partial(train, config=config)
        make().setup(task, local)
        section = task.config.ft if make is MADE["ft"][0] else task.config.profiling
        assert fdl.build(section).__class__ in (ProfilingConfig, FaultToleranceConfig)


@each_plugin
def test_a_built_config_is_edited_too(make, overrides, local, built, partial):
    make().setup(partial, run.LocalExecutor())
    real = run.Partial(partial.__fn_or_cls__)
    real.config = type(built(partial))()
    make().setup(real, local)
    assert real.config == built(partial)


@each_plugin
def test_a_plugin_can_be_a_config_a_partial_and_be_serialized(make, overrides):
    plugin = make()
    config = run.Config(type(plugin), **{k: v for k, v in vars(plugin).items() if k != "experiment_id"})
    serializer = ZlibJSONSerializer()
    assert fdl.build(serializer.deserialize(serializer.serialize(config))) == plugin
    assert fdl.build(fdl.cast(run.Partial, config))() == plugin


@each_plugin
def test_a_mocked_executor_and_config_will_do(make, overrides):
    task, executor = MagicMock(spec=run.Partial), MagicMock()
    task.config = MagicMock()
    make().setup(task, executor)
    make().setup(run.Script(path="a.py"), executor)


@each_plugin
@pytest.mark.parametrize("wrong", [None, "pretrain.py", print])
def test_a_task_that_is_neither_partial_nor_script_is_refused(make, overrides, wrong, local):
    with pytest.raises(ProfilingConfigError, match=r"run\.Partial .*run\.Script"):
        make().setup(wrong, local)


@each_plugin
def test_a_partial_without_a_config_is_refused(make, overrides, local):
    with pytest.raises(ProfilingConfigError, match="found no config"):
        make().setup(run.Partial(print), local)


def test_ranks_may_be_words_and_none_is_rank_zero(script, local):
    for ranks, text in (("all", "all"), ("pp", "pp"), (None, "[0]"), ([1, 1], "[1]")):
        NsysPlugin(profile_step_start=1, profile_step_end=2, profile_ranks=ranks).setup(script, local)
        assert f"profiling.profile_ranks={text}" in script.args


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


def test_an_inline_script_says_that_it_gets_no_arguments(local, caplog):
    NsysPlugin(profile_step_start=1, profile_step_end=2).setup(run.Script(inline="python a.py"), local)
    assert "no arguments to an inline run.Script" in caplog.text


def test_the_script_arguments_have_megatron_bridges_fields():
    assert list(NsysPluginScriptArgs.__dataclass_fields__) == [
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "record_shapes",
    ]
    assert list(PyTorchProfilerPluginScriptArgs.__dataclass_fields__) == [
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "record_memory_history",
        "memory_snapshot_path",
        "record_shapes",
    ]
    assert list(FaultTolerancePluginScriptArgs.__dataclass_fields__) == ["enable_ft_package", "calc_ft_timeouts"]


WRONG_WINDOWS = [(5, 5), (7, 5), (-1, 5), (1.0, 5), (True, 5), ("1", 5), (99, 101)]


@pytest.mark.parametrize("plugin", [NsysPlugin, PyTorchProfilerPlugin])
@pytest.mark.parametrize(("start", "end"), WRONG_WINDOWS)
def test_a_wrong_window_is_refused_and_nothing_is_changed(plugin, start, end, task, torchrun, built):
    if isinstance(task, run.Script):
        task.args = ["train.train_iters=100"]
    else:
        task.config.train = run.Config(type(built(task).train), train_iters=100)
    before = copy.deepcopy((task, torchrun))
    with pytest.raises(ProfilingConfigError, match="profile_step"):
        plugin(profile_step_start=start, profile_step_end=end).setup(task, torchrun)
    assert (task, torchrun) == before


@pytest.mark.parametrize("plugin", [NsysPlugin, PyTorchProfilerPlugin])
@pytest.mark.parametrize("ranks", [[], [-1], [True], "some", [0, 2], 1.5])
def test_wrong_ranks_are_refused_and_nothing_is_changed(plugin, ranks, task, torchrun):
    before = copy.deepcopy((task, torchrun))
    with pytest.raises(ProfilingConfigError, match="profile_ranks"):
        plugin(profile_step_start=1, profile_step_end=2, profile_ranks=ranks).setup(task, torchrun)
    assert (task, torchrun) == before


def test_ranks_are_not_held_against_a_number_of_ranks_that_may_change(task, local):
    # LocalExecutor without a launcher: a script may start ranks of its own, a later plugin may add a launcher.
    PyTorchProfilerPlugin(profile_step_start=1, profile_step_end=2, profile_ranks=[7]).setup(task, local)


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_ranks_are_held_against_slurm_nodes_times_tasks(launcher, partial, slurm):
    slurm.launcher = launcher
    plugin = PyTorchProfilerPlugin(profile_step_start=1, profile_step_end=2, profile_ranks=[7])
    plugin.setup(partial, slurm)
    plugin.profile_ranks = [8]
    with pytest.raises(ProfilingConfigError, match="8 ranks"):
        plugin.setup(partial, slurm)
    slurm.get_launcher()  # rewrites ntasks_per_node under torchrun
    with pytest.raises(ProfilingConfigError, match="8 ranks"):
        plugin.setup(partial, slurm)


def test_a_foreign_config_without_these_fields_is_refused_before_anything_is_changed(torchrun):
    def train(config):
        pass

    def container(model=None):
        pass

    task = run.Partial(train, config=run.Config(container))
    with pytest.raises(ProfilingConfigError, match="'profiling'"):
        NsysPlugin(profile_step_start=1, profile_step_end=2).setup(task, torchrun)
    assert torchrun.launcher == "torchrun"
