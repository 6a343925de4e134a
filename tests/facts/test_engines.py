"""An engine does every task, whatever becomes of some of them, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bridge_profiling.facts.engines import ProcessEngine

pytestmark = pytest.mark.integration


def refuse_three(value):
    print("printed among the answers", flush=True)
    os.write(1, b"and below Python")
    if value == 3:
        raise ValueError("three is not accepted")
    return 2 * value


def die_of_three(value):
    if value == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def process(seconds):
    time.sleep(seconds)
    return os.getpid()


@pytest.mark.parametrize("tasks", [[3], list(range(20))])
def test_every_task_is_answered_once_whatever_it_prints_and_one_that_fails_says_why(tasks, capfd):
    engine = ProcessEngine(workers=2)
    found = {tasks[each.task]: (each.answer, each.error) for each in engine.map(refuse_three, tasks)}
    engine.close()
    failed = {3: (None, "ValueError: three is not accepted")} if 3 in tasks else {}
    assert found == {task: (2 * task, None) for task in tasks} | failed
    # A single task is done in this process.
    assert (capfd.readouterr().out == "") == (len(tasks) != 1)


def test_a_task_that_kills_its_process_costs_no_other():
    outcomes = {outcome.task: outcome for outcome in ProcessEngine(workers=1).map(die_of_three, [1, 3, 5, 7])}
    assert [outcomes[place].answer for place in range(4)] == [1, None, 5, 7]
    assert "killed by signal 9" in outcomes[1].error


def children():
    """Processes whose parent is this one."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def test_processes_are_few_and_kept_for_the_next_call_until_the_engine_is_closed_or_deleted():
    engine, others = ProcessEngine(workers=2), children()
    first, second = ({outcome.answer for outcome in engine.map(process, [0] * 4)} for _ in range(2))
    assert second <= first == children() - others
    assert len(first) <= 2
    engine.close()
    assert not first & children()
    third = {outcome.answer for outcome in engine.map(process, [0] * 4)}
    assert not first & third
    del engine
    assert not third & children()


def test_a_script_without_a_main_guard_reads_a_run_with_several_processes(tmp_path, write_trace):
    """multiprocessing's spawn would run the script again in every worker."""
    for rank in range(3):
        event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5, "dur": 100 + rank}
        write_trace([event | {"args": {"device": 0, "stream": 7}}], f"rank-{rank}.json", distributedInfo={"rank": rank})
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import sys
            from bridge_profiling.run import Run
            print({"torch", "duckdb", "ray", "rich", "pandas", "nemo_run"} & set(sys.modules))
            print(Run(".", workers=2).facts.breakdown["compute_ns"].to_pylist())
        """)
    )
    # A file that is called like a library must not be taken for it by the workers.
    (tmp_path / "numpy.py").write_text("raise SystemExit('taken for numpy')")
    command = [sys.executable, "-P", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["set()", "[100000, 101000, 102000]"], done.stderr
