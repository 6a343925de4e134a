"""Rules for all tests.

- Three tiers: unit tests stay in their process; `integration` and `system` mark those that start others.
- `@pytest.mark.needs("cuda")` names what a test needs of the machine and skips it with the reason; REQUIRE makes that an error.
- A run leaves no process and no file outside of the checkout.
"""

import functools
import gc
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from recipes.releases import hide_old_async_checkpoints
from tests.frameworks.bridge_environment import why_no_bridge
from tests.system.debian import why_no_browser, why_no_packages
from tests.system.jobs import FOREIGN
from tests.system.nsys_install import why_no_nsys

# Tests look for megatron-core before they import a recipe.
hide_old_async_checkpoints()


def _package(name: str) -> str | None:
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{name} is not installed"


def _gpus(count: int = 1) -> str | None:
    if _package("torch"):
        return "torch is not installed"
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        return "torch sees no CUDA device"
    return None if found >= count else f"it takes {count} GPUs, and torch sees {found}"


def _mount() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
            return "this user may not mount a file system"
        subprocess.run(["umount", folder], check=True)
    return None


#: What can be needed: each check returns why it is missing, or None.
NEEDS = {
    "megatron": lambda: _package("megatron.core"),
    "nemo_run": lambda: _package("nemo_run"),
    "ft": lambda: _package("nvidia_resiliency_ext"),
    "transformer_engine": lambda: _package("transformer_engine"),
    "megatron_bridge": lambda: _package("megatron.bridge"),
    "cuda": _gpus,
    "gpus2": lambda: _gpus(2),
    "mount": functools.cache(_mount),
    "slurm": lambda: why_no_packages(root=True),
    "ssh": lambda: why_no_packages(root=True),
    "nsys": why_no_nsys,
    "nsys_on_path": lambda: None if shutil.which("nsys") else "no nsys on PATH",
    "ray": lambda: _package("ray"),
    "lightning": lambda: _package("lightning") or _package("pytorch_lightning"),
    "deepspeed": lambda: _package("deepspeed"),
    "hugging_face": lambda: _package("transformers") or _package("accelerate"),
    "bridge": why_no_bridge,
    "browser": why_no_browser,
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(name, …): what the machine must have for this test")
    required = set(filter(None, os.environ.get("REQUIRE", "").split(",")))
    if unknown := required - NEEDS.keys():
        raise pytest.UsageError(f"REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(NEEDS)}")
    for name in sorted(required):
        if missing := NEEDS[name]():
            raise pytest.UsageError(f"REQUIRE names {name}, and {missing}")
    gc.disable()  # until everything is imported
    _watch_for_processes()
    if not hasattr(config, "workerinput"):
        config.stash[_LEFTOVERS] = Leftovers()


#: What takes longest in `make test-system`. Dealt out last, it would be waited for with nothing else left to do.
_FIRST = tuple(f"tests/system/test_{name}.py" for name in ("fresh_environments", "slurm", "fault_tolerance", "nsys"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    """What was imported stays: garbage is collected without it from now on, which takes 5 s less of each process."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # Each of NeMo-Run's experiments reads the metadata of all packages: half of the time of its tests.
    if (torchx := sys.modules.get("torchx.util.entrypoints")) is not None:
        torchx.metadata = SimpleNamespace(entry_points=functools.cache(torchx.metadata.entry_points))  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a GPU, and put the longest files first."""
    for item in items:
        if any(name == "cuda" or name.startswith("gpus") for marker in item.iter_markers("needs") for name in marker.args):
            item.add_marker("gpu")
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in _FIRST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if missing := NEEDS[name]():
                pytest.skip(missing)
    _processes.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a unit test that has started a process, its fixtures included."""
    result = yield
    if _processes and _tier(item) is None:
        pytest.fail(f"this unit test started {_processes[0]}: mark it integration, or stay in the process", pytrace=False)
    return result


def _tier(item: pytest.Item) -> str | None:
    """The tier of a test that may start processes; None for a unit test."""
    return next((tier for tier in ("integration", "system", "gpu") if item.get_closest_marker(tier)), None)


#: Processes that the running test has started.
_processes: list[str] = []


def _watch_for_processes() -> None:
    events = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

    def watch(event: str, arguments: tuple) -> None:
        if event in events and not _importing():
            _processes.append(f"{event} {arguments[:2]}")

    sys.addaudithook(watch)
    start = process.BaseProcess.start

    # Processes of multiprocessing's fork server come from elsewhere.
    def watched(self: process.BaseProcess) -> None:
        _processes.append(repr(self))
        start(self)

    process.BaseProcess.start = watched  # type: ignore[method-assign]


def _importing() -> bool:
    """Whether a module is being imported: megatron-core then asks git for its commit, in whichever test is the first."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


#: In the environment of every process that a test run starts, directly or not.
_VARIABLE = "TEST_RUN_ID"

#: Seconds that processes may take to end after the last test: daemons that notice that their parent is gone.
_PATIENCE_S = 20.0

#: Where programs leave files.
_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "~", "~/.cache", "~/.config", "~/.local/share")


class Leftovers:
    """Knows what was there before a test run, and so what the run left. Create it before anything is started."""

    def __init__(self) -> None:
        self._mark = os.environ[_VARIABLE] = uuid.uuid4().hex
        self._entries = self._list()

    def processes(self) -> list[str]:
        """Processes of this run that still exist after some seconds: process id, command line and the test."""
        # These two live as long as pytest's own process, if that runs the tests.
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()
        deadline = time.monotonic() + _PATIENCE_S
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _running(self) -> list[str]:
        # Pytest's own process set the variable after it had started, so it is not among them. A zombie has no environment.
        running = [each.info for each in psutil.process_iter(["pid", "cmdline", "environ"])]
        marked = [each for each in running if (each["environ"] or {}).get(_VARIABLE) == self._mark]
        known = ((each["pid"], each["cmdline"] or (), each["environ"].get("PYTEST_CURRENT_TEST", "no test")) for each in marked)
        return [f"{pid} {' '.join(command)} of {test}" for pid, command, test in known]

    def files(self) -> list[Path]:
        """What appeared since the start where programs leave files, and in the checkout."""
        return sorted(self._list() - self._entries)

    @staticmethod
    def _list() -> set[Path]:
        inside = Path(tempfile.gettempdir()).resolve()
        folders = [Path(folder).expanduser() for folder in _FOLDERS]
        outside = [folder for folder in folders if os.access(folder, os.R_OK) and not inside.is_relative_to(folder.resolve())]
        # Hidden ones are caches.
        checkout = {entry for entry in Path(__file__).parents[1].iterdir() if not entry.name.startswith(".")}
        return checkout.union(*(folder.iterdir() for folder in outside))


_LEFTOVERS = pytest.StashKey[Leftovers]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that leaves processes, or files where only CI knows that nobody else writes."""
    leftovers = session.config.stash.get(_LEFTOVERS, None)
    if leftovers is None or session.config.option.collectonly:
        return
    lines = [f"a process is left: {text}" for text in leftovers.processes()]
    # Tests of a system install it.
    files = leftovers.files() if "not system" in session.config.getoption("markexpr") else []
    lines += [f"a file is left: {path}" for path in files]
    session.config.stash[_LEFT] = lines
    if session.exitstatus == 0 and (len(lines) > len(files) or (files and "CI" in os.environ)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_LEFT = pytest.StashKey[list[str]]()


@functools.cache
def _database() -> Any:
    from bridge_profiling.facts.types import connect

    return connect()


@pytest.fixture(autouse=True)
def _runs_start_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests start no workers, and one DuckDB for all runs: both take longer than reading captures this small.

    Each run has a connection of its own, whose tables no other one sees.
    """
    if _tier(request.node) is None and importlib.util.find_spec("pyarrow") is not None:
        from bridge_profiling.facts import captures, engines

        def read_here(engine: object, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[engines.Outcome[Any]]:
            yield from (engines.Outcome(place, *engines.call(function, task)) for place, task in enumerate(tasks))

        monkeypatch.setattr(engines.ProcessEngine, "map", read_here)
        monkeypatch.setattr(captures, "connect", lambda: _database().cursor())


@pytest.fixture(autouse=True)
def _started_by_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test believes that it is part of a job, whatever a test before it has set; NeMo-Run passes LOGLEVEL on to its jobs."""
    found = {name for name in os.environ if name.startswith((*FOREIGN, "LOGLEVEL"))}
    for name in found - {"BRIDGE_PROFILING_CAPTURES"}:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _own_user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache of captures is the test run's; installers keep theirs."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in (("UV_CACHE_DIR", "uv"), ("PIP_CACHE_DIR", "pip")):
            patch.setenv(name, os.environ.get(name, str(home / folder)))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user") / ".cache"))
        yield


@pytest.fixture(autouse=True, scope="module")
def _root_loggers_handlers_survive() -> Iterator[None]:
    """After a file of tests the root logger has the handlers it had before.

    NeMo-Run's Experiment replaces them all when it is made, and takes the first away when it is collected as garbage, in
    whatever thread that happens: a handler that is about to be called is then passed over, pytest's own among them.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    # One that is collected later would take pytest's handler from another test.
    if root.handlers != handlers or "nemo_run.run.experiment" in sys.modules:
        gc.collect()
    if root.handlers != handlers:
        root.handlers[:] = handlers
        root.setLevel(level)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out by the marker, which pytest only counts, and what that lacks here."""
    for line in config.stash.get(_LEFT, []):
        terminalreporter.write_line(line, red=True)
    if "not system" in config.getoption("markexpr"):
        missing = [f"{name}: {why}" for name in ("slurm", "nsys") if (why := NEEDS[name]())]
        terminalreporter.write_line("`make test-integration` and `make test-system` run the other tests")
        terminalreporter.write_line(f"of what they need, this machine lacks: {'; '.join(missing) or 'nothing'}")
