"""Our callback in Megatron Bridge's own, whole `pretrain()`: the right window, nothing lost, and the same training.

Each test reads what a small GPT has left on two CPU ranks: see `bridge_pretrain.py`. Bridge is the one that this Python has, or
that of the Python which the variable BRIDGE_PYTHON names.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import nemo_run as run
import pytest

from bridge_profiling import plugins
from bridge_profiling.frameworks.megatron_bridge import ProfilingCallback
from bridge_profiling.settings.profiling import ProfilingConfig
from tests.frameworks.bridge_environment import train_every_case
from tests.frameworks.bridge_pretrain import EXAMPLE, PLUGINS
from tests.frameworks.captured import Captured
from tests.system.jobs import manifests

pytestmark = [pytest.mark.system, pytest.mark.needs("bridge")]


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all trainings in Megatron Bridge: see bridge_pretrain.py. Mark its tests `needs("bridge")`."""
    folder = tmp_path_factory.mktemp("bridge")
    train_every_case(folder)
    return folder


@pytest.fixture(scope="session")
def about(bridge: Path) -> dict[str, Any]:
    """What the release of Megatron Bridge under test offers: see `describe` in bridge_pretrain.py."""
    return json.loads((bridge / "about.json").read_text())


class Training:
    """What a case has left in its folder."""

    def __init__(self, bridge: Path, name: str) -> None:
        self.folder = bridge / name
        self.exit_codes = json.loads((bridge / "exit_codes.json").read_text())[name]
        self.log = (self.folder / "rank-0.log").read_text()
        self.manifests = [found for _, found in sorted(manifests(self.folder).items())]
        # By rank: the loss of each iteration that was trained, to the last bit.
        files = sorted(self.folder.glob("rank-*.jsonl"))
        records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        self.losses = [{record["iteration"]: record["hex"] for record in of_rank} for of_rank in records]

    def endings(self) -> list[tuple[str, list[int] | None]]:
        """Status and captured iterations of each rank that has a manifest."""
        return [(one["status"], (one["captured"] or {}).get("iterations")) for one in self.manifests]


def test_the_window_is_captured_exactly_on_every_rank_and_the_losses_stay_bit_identical(bridge):
    training, captured = Training(bridge, "window"), Captured(bridge / "window" / "profiles", "iter-4-6")
    assert training.exit_codes == [0, 0], training.log
    assert training.endings() == [("complete", [4, 5])] * 2
    for rank in (0, 1):
        assert set(captured.phases(rank)) == {4, 5}
        names = {event["name"] for event in captured.events(rank)}
        assert {name for name in names if "of iteration" in name} == {"forward of iteration 4", "forward of iteration 5"}
        alone = {dimension: [0, 1] for dimension in ("tp", "cp", "pp", "ep")}
        assert training.manifests[rank]["coordinates"] == alone | {"dp": [rank, 2]}
        assert training.manifests[rank]["reason"] is None
    # Bridge's own profiler is off.
    assert not [*training.folder.glob("tensorboard/*.pt.trace.json"), *training.folder.glob("torch_profile/*")]
    assert list(training.losses[0]) == list(range(12))
    assert training.losses == Training(bridge, "plain").losses


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("signal", 143),
        # Megatron Bridge finishes the iteration, and leaves on all ranks; callbacks are not informed of an exit interval.
        ("handled_signal", 0),
        ("exit_interval", 0),
    ],
)
def test_an_exit_inside_the_window_writes_the_partial_trace(bridge, name, code):
    training = Training(bridge, name)
    assert training.exit_codes == [code, code], training.log
    assert ("exiting program after receiving SIGTERM" in training.log) == (name == "handled_signal")
    assert training.endings() == [("partial", [4])] * 2
    assert all(f"the process exited (code {code})" in one["reason"] for one in training.manifests)


def test_the_documented_script(about, bridge):
    if about["release"] < "0.6":
        pytest.skip("it is written for Megatron Bridge 0.6")
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    training = Training(bridge, "example")
    assert training.exit_codes == [0, 0], training.log
    assert training.endings() == [("complete", [10, 11])] * 2
    assert [one["coordinates"]["dp"] for one in training.manifests] == [[0, 2], [1, 2]]


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


def emitted(name: str, **settings: Any) -> list[str]:
    script = run.Script(path="pretrain.py", entrypoint="python")
    getattr(plugins, name)(**settings).setup(script, run.SlurmExecutor(account="team"))
    return script.args


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_emits_what_the_releases_own_emits_and_only_keys_that_the_release_knows(about, name):
    assert emitted(name, **required(about, name)) == about["plugins"][name]["overrides"]
    defaults = about["plugins"][name]["arguments"].items()
    switched = {argument: not default for argument, default in defaults if isinstance(default, bool)}
    for argument in emitted(name, **required(about, name), **switched):
        section, key = argument.split("=")[0].split(".")
        assert key in about[section], argument


def test_the_profiling_section_has_the_releases_fields_and_the_callback_listens_to_its_events(about):
    """But for the default of the snapshot's path, which the callback takes over only where the user has set it."""
    theirs = about["profiling"]
    assert theirs["memory_snapshot_path"] == (
        "snapshot.pickle" if about["release"] < "0.4" else "/nemo_run/snapshot.pickle"
    )  # as docs/reference/plugins.md says
    ours = {name: getattr(ProfilingConfig(), name, "missing") for name in theirs}
    assert ours | {"memory_snapshot_path": theirs["memory_snapshot_path"]} == theirs
    listened = {name for name in dir(ProfilingCallback) if name.startswith("on_")}
    assert listened <= set(about["events"])
    # No event tells of an exception or an early exit, which is why the callback is a context manager.
    assert not {event for event in about["events"] if "exception" in event or "exit" in event or "error" in event}
