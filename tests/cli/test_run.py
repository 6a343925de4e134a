"""`bridge-profiling run` as it is typed: what it starts, and what it refuses."""

import importlib
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bridge_profiling.cli import app
from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.frameworks.run_request import parse
from bridge_profiling.settings.profiling import Window

run_module = importlib.import_module("bridge_profiling.cli.run")

SCRIPT = str(Path(__file__).parents[2] / "docs" / "examples" / "plain_loop.py")


class Child:
    """Stands for the started process: what it was started with, which signals it gets, and how it ends."""

    #: Signals that come to `bridge-profiling run` meanwhile.
    signals: tuple[int, ...] = ()

    def __init__(self, arguments, env):
        Child.started = arguments[1:]
        Child.environment = env
        Child.received = []

    def wait(self):
        for number in Child.signals:
            signal.raise_signal(number)
        return -9

    def send_signal(self, number):
        Child.received.append(number)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Child)
    return Child


def typed(*arguments, **environment):
    return CliRunner().invoke(app, ["run", *arguments], env=environment, catch_exceptions=False)


def test_one_rank_needs_no_launcher_and_what_follows_the_script_is_the_scripts(started):
    result = typed(SCRIPT, "--steps", "9", "-m", "--help")
    assert started.started == ["-m", "bridge_profiling.frameworks.start", SCRIPT, "--steps", "9", "-m", "--help"]
    # A shell's exit code of a process that SIGKILL ended.
    assert result.exit_code == 137


def test_a_signal_that_the_script_may_handle_is_the_scripts(started, monkeypatch):
    monkeypatch.setattr(started, "signals", (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert typed(SCRIPT).exit_code == 137
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    # Ctrl-C comes to both from the terminal, and nohup has its child ignore SIGHUP.
    assert started.received == [signal.SIGUSR1, signal.SIGTERM]


def test_each_window_has_a_page_and_one_that_cannot_be_made_leaves_the_scripts_exit_code(started, monkeypatch):
    captures = [
        SimpleNamespace(folder=folder, rank=0, manifest=SimpleNamespace(status="complete"), artifacts=[Path(folder) / "trace"])
        for folder in ("iter-3-8", "iter-9-10")
    ]
    pages: dict[str, str] = {}
    monkeypatch.setattr(run_module, "captures_since", lambda root, started_ns: captures)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_report", lambda place, page: pages.update({str(place): page.name}))
        typed("--report", SCRIPT)
    assert pages == {"iter-3-8": "report-iter-3-8.html", "iter-9-10": "report-iter-9-10.html"}
    Path("profiles/report-iter-3-8.html").mkdir(parents=True)
    result = typed("--report", SCRIPT)
    assert result.exit_code == 137
    assert "report-iter-3-8.html cannot be written" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--profiler", "nsys"), "nsys is not on this machine's PATH"),
        (("--output-dir", "file/below"), "file/below cannot be written; .*file: Not a directory"),
    ],
)
def test_what_cannot_be_recorded_here_is_refused_unless_best_effort(started, monkeypatch, arguments, expected):
    monkeypatch.setenv("PATH", "/nowhere")
    Path("file").touch()
    with pytest.raises(ProfilingConfigError, match=expected):
        typed(*arguments, SCRIPT)
    result = typed(*arguments, "--best-effort", SCRIPT)
    assert result.exit_code == 137
    assert re.search("warning: .*" + expected, result.output)


def test_the_settings_of_a_file_lie_under_those_typed(started, monkeypatch):
    monkeypatch.setattr(run_module, "_has_cuda", lambda: True)
    Path("settings.yaml").write_text("profiling: {profile_step_start: 5, profile_step_end: 6}\nmodel: {}\n")
    profilers = ("--profiler", "memory", "--profiler", "torch")
    typed("--config", "settings.yaml", "--record-shapes", *profilers, "--set", "profile_every=20", SCRIPT)
    config = parse(started.started[2:]).config()
    assert (config.window, config.record_shapes, config.profile_every) == (Window(5, 6), True, 20)
    assert (config.use_pytorch_profiler, config.record_memory_history) == (True, True)


def test_ranks_of_one_machine_are_torchruns_and_each_launch_has_a_name(started):
    names = []
    for _ in range(2):
        typed("--nproc", "4", "--steps", "5:6", "--ranks", "0,3", "-m", "package.train", "x")
        names.append(started.environment["BRIDGE_PROFILING_LAUNCH_ID"])
    assert started.started == [
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "bridge_profiling.frameworks.start"],
        *["--steps", "5:6", "--ranks", "0,3", "-m", "package.train", "x"],
    ]
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    "environment", [{"RANK": "1", "WORLD_SIZE": "2"}, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}]
)
def test_a_rank_of_another_launcher_becomes_the_script(started, monkeypatch, environment):
    became: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: became.extend(arguments[1:]))
    typed(SCRIPT, **environment)
    assert became == ["-m", "bridge_profiling.frameworks.start", SCRIPT]
    with pytest.raises(ProfilingConfigError, match="is a rank already"):
        typed("--nproc", "2", SCRIPT, **environment | {"RANK": "1"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.py",), "nowhere.py does not exist"),
        (("--profiler", "torch", "--profiler", "nsys", SCRIPT), "--profiler torch and --profiler nsys exclude each other"),
        (("--steps", "5:5", SCRIPT), "--steps 5:5: the window is empty; .* Type --steps 5:6"),
        (("--set", "profile_evry=3", SCRIPT), "--set profile_evry does not exist.*Type --set profile_every=3"),
        (("--ranks", "0,2", "--nproc", "2", SCRIPT), "--ranks names 2, but the job has 2 ranks"),
        (("--config", "empty.yaml", SCRIPT), "empty.yaml has no section profiling"),
        (("empty",), "empty is a directory without a __main__.py"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_anything_starts(started, arguments, said):
    started.started = []
    Path("empty").mkdir()
    Path("empty.yaml").write_text("{}")
    with pytest.raises(ProfilingConfigError, match=said):
        typed(*arguments)
    assert started.started == []
