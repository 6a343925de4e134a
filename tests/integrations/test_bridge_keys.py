"""With only Megatron Bridge's own arguments, the plugins emit only what its release knows, and what its own plugins emit."""

from __future__ import annotations

import dataclasses

import nemo_run as run
import pytest

from bridge_profiling import plugins
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.integrations.megatron_bridge import ProfilingCallback
from tests.integrations.bridge_pretrain import PLUGINS

pytestmark = [pytest.mark.system, pytest.mark.needs("bridge", "nemo_run")]

REQUIRED = {"profile_step_start": 4, "profile_step_end": 6}


def required(about, name: str) -> dict[str, int]:
    return {one: REQUIRED[one] for one, default in about["plugins"][name]["arguments"].items() if default == "required"}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_has_the_releases_arguments_and_defaults_and_its_converter_the_releases_fields(about, name):
    theirs, fields = about["plugins"][name], dataclasses.fields(getattr(plugins, name))
    ours = {field.name: "required" if field.default is dataclasses.MISSING else field.default for field in fields}
    assert {argument: ours.get(argument, "missing") for argument in theirs["arguments"]} == theirs["arguments"]
    converted = dataclasses.fields(getattr(plugins, f"{name}ScriptArgs"))
    assert [field.name for field in converted] == theirs["script_arguments"]


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_emits_only_keys_that_the_release_knows(about, name):
    defaults = about["plugins"][name]["arguments"].items()
    switched = {argument: not default for argument, default in defaults if isinstance(default, bool)}
    script = run.Script(path="pretrain.py", entrypoint="python")
    getattr(plugins, name)(**required(about, name), **switched).setup(script, run.SlurmExecutor(account="team"))
    for argument in script.args:
        section, key = argument.split("=")[0].split(".")
        assert key in about[section], argument


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_emits_what_the_releases_own_emits(about, name):
    """But for the capitals of PreemptionPlugin's booleans there."""
    script = run.Script(path="pretrain.py", entrypoint="python")
    getattr(plugins, name)(**required(about, name)).setup(script, run.SlurmExecutor(account="team"))
    assert script.args == [override.lower() for override in about["plugins"][name]["overrides"]]


def test_the_profiling_section_has_the_releases_fields_and_defaults(about):
    """But for the snapshot's path, which the callback takes over only where the user has set it."""
    theirs = about["profiling"]
    assert theirs["memory_snapshot_path"] == (
        "snapshot.pickle" if about["release"] < "0.4" else "/nemo_run/snapshot.pickle"
    )  # as docs/reference/plugins.md says
    ours = {name: getattr(ProfilingConfig(), name, "missing") for name in theirs}
    assert ours | {"memory_snapshot_path": theirs["memory_snapshot_path"]} == theirs


def test_the_callback_listens_to_events_that_the_release_has(about):
    listened = {name for name in dir(ProfilingCallback) if name.startswith("on_")}
    assert listened <= set(about["events"])
    # No event tells of an exception or an early exit, which is why the callback is a context manager.
    assert not {event for event in about["events"] if "exception" in event or "exit" in event or "error" in event}
