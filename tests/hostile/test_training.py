"""The training comes first: whatever a loop passes, and whichever thread it calls from, nothing of ours raises into it."""

import copy
import gzip
import inspect
import json
import logging
import pickle
import shutil
import subprocess
import sys
import threading
import tracemalloc
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from bridge_profiling import ProfilingConfig, ProfilingConfigError
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.common.atomic import write_atomically, write_text
from bridge_profiling.easy import MemoryProfiler, PerformanceCounter, phase, phase_times, reset_phase_times
from bridge_profiling.frameworks.ddp_fsdp import Profiling
from bridge_profiling.monitor import TrainingMonitor
from bridge_profiling.settings.profiling import Window
from bridge_profiling.settings.window import parse_steps
from tests.capture.conftest import at, raising, run
from tests.hostile.threads import CASES

__all__ = ["run"]


class Rude:
    """An object whose every method raises."""

    def _raise(self, *others: object) -> None:
        raise ZeroDivisionError

    __str__ = __repr__ = __hash__ = __eq__ = __ge__ = __int__ = __index__ = __float__ = __bool__ = __iter__ = _raise


class Leaving:
    """An object whose every method ends the process; but for `__repr__`, which pytest calls."""

    def _leave(self, *others: object) -> None:
        raise SystemExit(3)

    __str__ = __hash__ = __eq__ = __lt__ = __gt__ = __int__ = __index__ = __float__ = __bool__ = __iter__ = _leave
    __fspath__ = _leave


class Text(Leaving, str):
    """Text of a class like that."""


class Number(Leaving, int):
    """A number of a class like that."""


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("count", "outcome"),
    [
        *((of, ("complete", [2, 3])) for of in (np.int64, np.uint8, np.float64, np.array, torch.tensor, float)),
        (lambda number: torch.tensor([number]), ("complete", [2, 3])),
        # It changes on the way; None, text, fractions and numbers beyond 64 bits end the capture.
        (lambda number: np.int32(number) if number % 2 else number, ("complete", [2, 3])),
        *(
            (lambda number, of=of: of, ("failed", None))
            for of in ("3", 1.5, 10**400, 1 << 63, float("inf"), float("nan"), np.float32("nan"), Rude(), Leaving(), [1])
        ),
        (lambda number: number if number < 3 else None, ("failed", None)),
        (lambda number: float("-inf"), ("missed", None)),
        (lambda number: -5, ("missed", None)),
    ],
)
def test_a_loop_may_count_with_anything(run, caplog, count, outcome):
    with ProfilingHook(run.config(2, 4), rank=np.int64(0), world_size=np.int8(1), output_dir=run.root) as hook:
        for number in range(6):
            with hook.iteration(count(number)):
                torch.ones(2)
    assert run.outcome("iter-2-4") == outcome
    assert all(type(iteration) is int for iteration, _ in hook.durations)
    assert caplog.text.count("is not a whole number") == (outcome[0] == "failed"), "once, not in every iteration"


FACTS = [
    (np.float32(1), 1.0), (np.int64(3), 3), (np.bool_(True), True), (torch.tensor(2), 2), (torch.ones(2), [1.0, 1.0]),
    (np.arange(3), [0, 1, 2]), (Path("a"), "a"), ({"b"}, ["b"]), ({1: {None: (1,)}}, {"1": {"None": [1]}}),
    (float("nan"), "nan"), (float("-inf"), "-inf"), (10**4000, "an integer of 13288 bits"), (b"x", "b'x'"),
    (torch.float16, "torch.float16"), (threading.Lock, "<built-in function allocate_lock>"), ("\ud800", "\ud800"),
    (ProfilingConfigError("no"), "no."), (Rude(), "<Rude, whose text raises ZeroDivisionError>"),
    (Leaving(), "<Leaving, whose text raises SystemExit>"), ({Path: [Leaving()]}, ANY),
    (Text(), "<Text, whose text raises SystemExit>"), (Number(), "<Number, whose text raises SystemExit>"),
]  # fmt: skip


def test_facts_of_any_type_are_written(run):
    facts = {"cycle": CYCLE, "large": torch.zeros(100_000), "lock": threading.Lock()}
    facts |= {str(number): fact for number, (fact, _) in enumerate(FACTS)}
    run.train(run.config(1, 2), range(3), between=lambda iteration, hook: hook.facts.update(facts))
    found = run.manifest("iter-1-2")
    assert found["status"] == "complete"
    assert [found["framework"][str(number)] for number in range(len(FACTS))] == [written for _, written in FACTS]
    assert json.dumps(found, allow_nan=False)


NAMES = [
    ('a"b', "a'b"), ("c\\b", "c/b"), ("a\\q", "a/q"), ("a\nb", "a b"), ("\x00\x1b[0m", "  [0m"), ("\ud800", "U+D800"),
    ("ünï", "uni"), ("ж", "U+0436"), ("x" * 2000, "x" * 1000), (7, "7"), (None, "None"), (["a"], "['a']"), ({}, "{}"),
    (Rude(), "<Rude, whose text raises ZeroDivisionError>"), (Leaving(), "<Leaving, whose text raises SystemExit>"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "quo\"te's",
        "back\\slash \\",
        "new\nline\ttab \x01",
        "a://b",
        "-%q{HOME}%p $HOME ~",
        "\udcff\udcfe é 😀",
        "é" * 127,
        "n" * 255,
    ],
)
def test_output_folders_may_have_any_name(run, tmp_path, name):
    run.root = tmp_path / name
    config = run.config(1, 3, pytorch_profiler_collect_chakra=True)
    with ProfilingHook(config, rank=0, output_dir=f"{tmp_path}/{name}/") as hook:
        for iteration in range(4):
            with hook.iteration(iteration):
                torch.ones(3) + 1
    assert run.outcome("iter-1-3") == ("complete", [1, 2])
    [profiler] = run.manifest("iter-1-3")["profilers"]
    trace, nodes = (run.root / artifact["path"] for artifact in profiler["artifacts"])
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceName"] == trace.name
    assert json.loads(nodes.read_text())["nodes"]
    assert not list(run.root.rglob(".*"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("n" * 248 + ".pickle", "n" * 246 + "_0.pickle"),
        ("é" * 120 + ".pickle", "é" * 120 + "_0.pickle"),
        ("é" * 127, "é" * 126 + "_0"),
        ("a://b/'%q{HOME}\n", "'%q{HOME}\n_0"),
    ],
)
def test_memory_snapshots_may_have_any_name(tmp_path, given, expected):
    files = CaptureFiles(tmp_path, Window(1, 2), 0, 0, given)
    written = write_atomically(files.memory_snapshot, lambda path: path.write_bytes(b""))
    assert written.name == expected
    write_text(written, "")


@pytest.mark.parametrize("everywhere", [False, True])
def test_ranges_of_any_name_leave_a_trace_that_can_be_read(run, everywhere):
    with ProfilingHook(run.config(1, 2, nvtx_ranges=everywhere), rank=0, output_dir=run.root) as hook:
        for iteration in range(3):
            with hook.iteration(iteration):
                for name, _ in NAMES:
                    with hook.range(name):
                        torch.ones(2) + 1
    assert run.outcome("iter-1-2") == ("complete", [1])
    found = {event["name"] for event in run.trace("iter-1-2") if event.get("cat") == "user_annotation"}
    assert found >= {written for _, written in NAMES}


@pytest.mark.parametrize(
    ("settings", "normalized"),
    [
        ({"output_dir": Path("a")}, "a"), ({"memory_snapshot_path": Path("a.pickle")}, "a.pickle"),
        ({"profile_step_start": np.int64(2)}, 2), ({"profile_ranks": np.array([0, 1])}, [0, 1]),
        ({"slow_iteration_factor": torch.tensor(2.0)}, 2.0), ({"on_demand": np.False_}, False), ({"nvtx_ranges": 1}, True),
        *(({"record_shapes": value}, None) for value in ("no", "false", "", 2, None, [], b"x", Rude())),
        *(({"output_dir": value}, None) for value in (5, b"x\0", "a\0b", ["a"])),
        *(({"profile_step_end": value}, None) for value in (1 << 63, 10**30, 3.5, True, "5", np.float64(9.5))),
        ({"profile_every": 1 << 62, "profile_at_most": 9}, None), ({"memory_snapshot_path": ""}, ""),
    ],
)  # fmt: skip
def test_settings_are_normalized_or_refused_before_the_first_iteration(settings, normalized):
    config = ProfilingConfig(use_pytorch_profiler=True, **settings)
    if normalized is None:
        with pytest.raises(ProfilingConfigError):
            config.finalize()
    else:
        config.finalize()
        assert (value := getattr(config, next(iter(settings)))) == normalized
        assert type(value) is type(normalized)


#: Methods that no loop calls, or that refuse a wrong argument before the first iteration.
NOT_FOR_LOOPS = {"steps", "start", "analyze_memory_patterns"}

ANYTHING = [np.int64(3), np.float32("nan"), torch.tensor(2), torch.ones(2, 2), Rude(), Leaving(), "\ud800", "a\0b", b"x",
            1 << 70, -1, None, True, CYCLE, {1: Rude()}, float("inf"), np.float64("-inf"), threading.Lock(),
            iter(())]  # fmt: skip


@pytest.mark.parametrize("value", ANYTHING, ids=lambda one: type(one).__name__)
def test_every_public_method_that_a_loop_may_call_takes_anything(run, tmp_path, value, caplog):
    """All that inspection finds, so that a method that is added later counts as well."""
    calls, monitor = [], TrainingMonitor()
    with (
        ProfilingHook(run.config(1, 3), rank=0, output_dir=run.root) as hook,
        Profiling(torch.nn.Linear(2, 2), output_dir=tmp_path / "other", on_demand=False) as loop,
    ):
        objects = [hook, loop, monitor, PerformanceCounter(), MemoryProfiler()]
        for number in range(4):
            with hook.iteration(number):
                for name, method in _public_methods(objects):
                    _use(method, value)
                    calls.append(name)
                monitor.log_metrics({"loss": value})
                hook.facts[f"{number}"] = value
    assert {"iteration", "range", "phase", "step", "end_step", "log_metrics", "start_counter"} <= set(calls)
    assert json.dumps(run.manifest("iter-1-3"), allow_nan=False)
    assert caplog.text.encode()  # a log in a file holds it


def _public_methods(objects):
    for each in objects:
        for name, method in inspect.getmembers(each, callable):
            if not name.startswith("_") and name not in NOT_FOR_LOOPS:
                yield name, method
    yield from (("phase", phase), ("phase_times", phase_times), ("reset_phase_times", reset_phase_times))


def _use(method, value):
    """Call a method with the value for every parameter, and enter or read what it returns."""
    parameters = inspect.signature(method).parameters.values()
    by_name = {one.name: value for one in parameters if one.kind is one.KEYWORD_ONLY}
    made = method(*(value for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD), **by_name)
    if isinstance(made, AbstractContextManager):
        with made:
            pass


@pytest.mark.parametrize("text", ["3:1000000000", f"0:{(1 << 63) - 1}"])
def test_a_window_costs_no_memory_for_the_iterations_in_it(run, text):
    window = parse_steps(text)
    start, end = window.start, window.end
    tracemalloc.start()
    try:
        run.train(run.config(start, end), range(start, start + 2))
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert run.outcome(f"iter-{start}-{end}") == ("partial", [start, start + 1])


@pytest.mark.integration
def test_threads_and_profilers_of_the_training_end_as_without_us(tmp_path):
    """Each process ends with 0, and its manifest says what became of the window; some crash at the exit otherwise."""
    script = Path(__file__).with_name("threads.py")
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2]), "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environ, check=True, capture_output=True, timeout=500)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    for case, (status, reason) in CASES.items():
        code, *manifests = outcomes[case.__name__]
        assert (case.__name__, code, [found for found, _ in manifests]) == (case.__name__, 0, [status])
        assert reason in (manifests[0][1] or "")


class Refusing(logging.Handler):
    """A log handler, or a standard error, of a training that takes nothing."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def emit(self, *_: object) -> None:
        raise self._error

    write = emit


FAULTS = ["none", "the folder cannot be made", "the folder is replaced", "a number that is none"]


@pytest.mark.parametrize("error", [RuntimeError(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_log_handler_that_raises_or_exits_ends_no_training_and_costs_no_capture(run, monkeypatch, capfd, fault, error):
    logger, handler = logging.getLogger("bridge_profiling"), Refusing(error)
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handlers", [handler])
    root = run.root / "torch" / "iter-2-4" if fault == FAULTS[2] else run.root
    if fault == FAULTS[1]:
        root.write_text("in the way")
    with ProfilingHook(run.config(2, 4), rank=0, output_dir=run.root) as hook:
        for number in range(6):
            with hook.iteration("3" if fault == FAULTS[3] and number == 3 else number):
                torch.ones(2)
            if fault == FAULTS[2] and number == 2:
                shutil.rmtree(root)
                root.write_text("in the way")
    said = {FAULTS[0]: "captured iterations 2 to 3", FAULTS[1]: "nothing will be captured"}
    assert said.get(fault, "Training goes on") in capfd.readouterr().err
    if fault != FAULTS[1]:
        assert run.outcome("iter-2-4") == (("complete", [2, 3]) if fault == FAULTS[0] else ("failed", None))


@pytest.mark.parametrize("stream", [None, Refusing(BrokenPipeError()), Refusing(SystemExit())], ids=["none", "pipe", "exit"])
def test_a_training_without_standard_error_keeps_its_capture(run, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    run.train(run.config(1, 2), range(3))
    assert run.outcome("iter-1-2") == ("complete", [1])


@pytest.mark.parametrize("kind", [Rude, Leaving])
def test_an_exception_without_a_text_leaves_the_capture(run, kind):
    error = type("Error", (kind, Exception), {})()
    with pytest.raises(type(error)):
        run.train(run.config(1, 3), range(4), on_iteration=at(2, raising(error)))
    assert run.outcome("iter-1-3") == ("partial", [1])
    assert "training raised Error: <Error, whose text raises " in run.manifest("iter-1-3")["reason"]


def test_a_working_directory_that_is_gone_is_a_directory_that_cannot_be_written(run, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    run.root = Path("profiles")
    run.train(run.config(1, 2), range(3))
    assert (len(run.losses), caplog.text.count("nothing will be captured")) == (3, 1)


def test_copies_and_pickles_of_what_holds_a_hook_profile_nothing(run):
    """Also while a window is open, and of a subclass with arguments of its own; the original's capture is untouched."""

    class Own(ProfilingHook):
        def __init__(self, root: Path) -> None:
            super().__init__(run.config(2, 4), rank=0, output_dir=root)

    model = torch.nn.Linear(2, 2)
    with ProfilingHook(run.config(2, 4), rank=0, output_dir=run.root) as hook:
        model.hook, model.range, model.own = hook, hook.range, [Own(run.root)]
        for number in range(6):
            model.around = hook.iteration(number)
            with model.around, hook.range("whole"):
                model.inner = hook.range("inner")
                copies = [copy.deepcopy(model), copy.copy(model.hook), copy.copy(model.own[0])]
                del model.own
                copies += [pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model.range))("theirs")]
                model.own = [Own(run.root)]
                with copies[0].around, copies[3].around, copies[0].inner, copies[4]:
                    assert [type(one) for one in (copies[0].hook, copies[0].own[0], copies[2])] == [ProfilingHook, Own, Own]
                for one in (copies[0].hook, copies[0].own[0], copies[1], copies[2], copies[3].hook):
                    with one:
                        for theirs in range(5):
                            with one.iteration(theirs), one.range("theirs"):
                                assert not one.capturing
    assert run.folders() == ["iter-2-4"]
    assert run.outcome("iter-2-4") == ("complete", [2, 3])
    assert not [event for event in run.trace("iter-2-4") if event["name"] == "theirs"]
