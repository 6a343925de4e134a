"""With only Megatron Bridge's own arguments, the plugins emit only what its release knows, and what its own plugins emit."""

from __future__ import annotations

import ast
import dataclasses

import nemo_run as run
import pytest

from bridge_profiling import plugins
from bridge_profiling.config import ProfilingConfig

pytestmark = pytest.mark.system

CONFIG = "megatron/bridge/training/config.py"
RECIPES = "megatron/bridge/recipes/run_plugins.py"
SECTIONS = {"profiling": "ProfilingConfig", "ft": "FaultToleranceConfig", "train": "TrainingConfig"}
REQUIRED = {"profile_step_start": 4, "profile_step_end": 6}
PLUGINS = ["NsysPlugin", "PyTorchProfilerPlugin", "FaultTolerancePlugin", "PreemptionPlugin"]


def upstream(wheel, name: str) -> dict[str, object]:
    """A plugin's arguments in the release and their defaults; those without one are required."""
    (node,) = [one for one in wheel.tree(RECIPES).body if isinstance(one, ast.ClassDef) and one.name == name]
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    return {one.target.id: ... if one.value is None else ast.literal_eval(one.value) for one in fields}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_has_the_releases_arguments_and_defaults(wheel, name):
    ours = {
        field.name: ... if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(getattr(plugins, name))
    }
    assert {argument: ours.get(argument) for argument in upstream(wheel, name)} == upstream(wheel, name)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_converter_gets_the_releases_fields(wheel, name):
    ours = [field.name for field in dataclasses.fields(getattr(plugins, f"{name}ScriptArgs"))]
    assert ours == list(upstream(wheel, f"{name}ScriptArgs"))


@pytest.mark.parametrize("executor", [run.LocalExecutor, lambda: run.SlurmExecutor(account="team")])
@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_emits_only_keys_that_the_release_knows(wheel, name, executor):
    arguments = upstream(wheel, name)
    required = {argument: REQUIRED[argument] for argument, default in arguments.items() if default is ...}
    optional = {argument: not default for argument, default in arguments.items() if isinstance(default, bool)}
    for given in (required, required | optional):
        script = run.Script(path="pretrain.py", entrypoint="python")
        getattr(plugins, name)(**given).setup(script, executor())
        for argument in script.args:
            section, key = argument.split("=")[0].split(".")
            assert key in wheel.fields(CONFIG, SECTIONS[section]), argument


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_emits_what_the_releases_own_emits(wheel, name):
    """But for the capitals of PreemptionPlugin's booleans there."""
    stem = {"NsysPlugin": "nsys", "PyTorchProfilerPlugin": "pytorch_profiler", "FaultTolerancePlugin": "fault_tolerance"}
    converter = f"_default_{stem.get(name, 'preemption')}_converter"
    theirs = wheel.definitions(RECIPES, [converter, "_format_list_for_override"])
    seen = []
    required = {argument: REQUIRED[argument] for argument, default in upstream(wheel, name).items() if default is ...}

    def convert(args):
        seen.extend(argument.lower() for argument in vars(theirs)[converter](args))
        return []

    script = run.Script(path="pretrain.py", entrypoint="python")
    getattr(plugins, name)(**required, script_args_converter_fn=convert).setup(
        run.Script(path="pretrain.py"), run.SlurmExecutor(account="team")
    )
    getattr(plugins, name)(**required).setup(script, run.SlurmExecutor(account="team"))
    assert seen
    assert script.args == seen


def test_the_profiling_section_has_the_releases_fields_and_defaults(wheel):
    theirs = wheel.definitions(CONFIG, ["ProfilingConfig"], dataclass=dataclasses.dataclass, field=dataclasses.field)
    for field in dataclasses.fields(theirs.ProfilingConfig):
        assert getattr(ProfilingConfig(), field.name) == getattr(theirs.ProfilingConfig(), field.name)
