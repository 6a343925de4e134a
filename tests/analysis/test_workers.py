"""An engine does every task, whatever becomes of some of them, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bridge_profiling.analysis.workers import ProcessEngine, RayEngine, engine_named
from bridge_profiling.errors import ProfilingConfigError


def double(value: int) -> int:
    return 2 * value


def refuse_three(value: int) -> int:
    if value == 3:
        raise ValueError("three is not accepted")
    return value


def die_of_three(value: int) -> int:
    if value == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def chatter(value: int) -> int:
    print("printed among the answers", flush=True)
    os.write(1, b"and below Python")
    return value


def process(value: int) -> int:
    return os.getpid()


def _answers(engine: ProcessEngine, function: object, tasks: list) -> dict:
    answers = {outcome.task: outcome.answer for outcome in engine.map(function, tasks)}  # type: ignore[arg-type]
    engine.close()
    return answers


@pytest.mark.parametrize("tasks", [[], [7], list(range(20))])
def test_every_task_is_answered_once(tasks: list[int]) -> None:
    outcomes = list(ProcessEngine(workers=2).map(double, tasks))
    assert sorted(outcome.task for outcome in outcomes) == list(range(len(tasks)))
    assert all(outcome.answer == 2 * tasks[outcome.task] and outcome.error is None for outcome in outcomes)


@pytest.mark.parametrize("tasks", [[3], [1, 3, 5]])
def test_a_task_that_fails_says_why_and_costs_no_other(tasks: list[int]) -> None:
    outcomes = {tasks[outcome.task]: outcome for outcome in ProcessEngine(workers=2).map(refuse_three, tasks)}
    assert outcomes[3].answer is None
    assert outcomes[3].error == "ValueError: three is not accepted"
    assert [outcomes[task].answer for task in tasks if task != 3] == [task for task in tasks if task != 3]


def test_a_task_that_kills_its_process_costs_no_other() -> None:
    outcomes = {outcome.task: outcome for outcome in ProcessEngine(workers=1).map(die_of_three, [1, 3, 5, 7])}
    assert [outcomes[place].answer for place in range(4)] == [1, None, 5, 7]
    assert "killed by signal 9" in outcomes[1].error
    assert "memory" in outcomes[1].error


def test_what_a_task_prints_is_not_taken_for_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert _answers(ProcessEngine(workers=2), chatter, [1, 2, 3]) == {0: 1, 1: 2, 2: 3}
    assert capfd.readouterr().out == ""


def test_several_tasks_are_worked_on_outside_this_process_by_few_others() -> None:
    found = set(_answers(ProcessEngine(workers=2), process, [0] * 6).values())
    assert os.getpid() not in found
    assert len(found) <= 2


def test_processes_are_kept_for_the_next_call_until_the_engine_is_closed_or_deleted() -> None:
    engine, others = ProcessEngine(workers=2), _children()
    first, second = ({outcome.answer for outcome in engine.map(process, [0] * 4)} for _ in range(2))
    assert second <= first == _children() - others
    engine.close()
    assert not first & _children()
    third = {outcome.answer for outcome in engine.map(process, [0] * 4)}
    assert not first & third
    del engine
    assert not third & _children()


def test_workers_end_when_the_caller_stops_asking(tmp_path: Path) -> None:
    marker, others = tmp_path / "begun", _children()
    outcomes = ProcessEngine(workers=2).map(_linger_or_answer, [(str(marker), 300), (str(marker), 0)])
    assert next(outcomes).task == 1
    workers = _children() - others
    assert workers
    outcomes.close()
    assert not workers & _children()


def _linger_or_answer(task: tuple[str, int]) -> int:
    time.sleep(task[1])
    return os.getpid()


def _children() -> set[int]:
    """Processes whose parent is this one."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(status.parent.name))
    return found


def test_a_script_without_a_main_guard_can_use_processes(tmp_path: Path) -> None:
    """multiprocessing's spawn would run the script again in every worker."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os
            from bridge_profiling.analysis.workers import ProcessEngine
            print("once")
            print(sorted(outcome.answer for outcome in ProcessEngine(2).map(os.path.basename, ["/a/b", "/c/d", "/e/f"])))
        """)
    )
    # A file that is called like a library must not be taken for it by the workers.
    (tmp_path / "numpy.py").write_text("raise SystemExit('taken for numpy')")
    done = subprocess.run(
        [sys.executable, "-P", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["once", "['b', 'd', 'f']"], done.stderr


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ProfilingConfigError, match="engine 'dask' is unknown"):
        engine_named("dask", None, None)
    with pytest.raises(ProfilingConfigError, match="--engine ray"):
        engine_named("process", None, "auto")
    with pytest.raises(ProfilingConfigError, match="--workers 0"):
        engine_named("process", 0, None)


def test_without_ray_installed_the_error_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProfilingConfigError, match=r"\[ray\]"):
        RayEngine()
