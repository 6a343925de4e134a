"""Real nsys: the ranks asked for start themselves under it, and whatever becomes of nsys, the training and the truth go on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.needs("nsys", "megatron")]

ROOT = Path(__file__).resolve().parents[2]
LOOP = Path(__file__).with_name("nsys_loop.py")
PRETRAIN = ROOT / "launch" / "pretrain.py"


@pytest.fixture
def environment(nsys, tmp_path):
    """A job's environment, with nsys on PATH and a folder for what a job leaves in the temporary one."""
    foreign = ("BRIDGE_PROFILING", "SLURM", "TORCHELASTIC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    (tmp_path / "tmp").mkdir()
    return kept | {
        "PATH": f"{nsys.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path / "tmp"),
    }


def start(environment, folder, *settings, command=(sys.executable, str(LOOP))):
    return subprocess.Popen(
        [*command, str(folder), *settings], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(environment, folder, *settings, **more):
    process = start(environment, folder, *settings, **more)
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def manifest(folder, rank=0, window="iter-2-4"):
    return json.loads((folder / "manifest" / window / f"rank-{rank}.json").read_text())


def ranges(sqlite):
    """Names of the NVTX ranges in a report, in the order of their starts."""
    with contextlib.closing(sqlite3.connect(sqlite)) as connection:
        query = "SELECT coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId ORDER BY start"
        return [name for (name,) in connection.execute(query) if name]


def iterations(sqlite):
    return [name for name in ranges(sqlite) if name.startswith("iteration_")]


def wait_for(process, pattern):
    """Read what a process says until it says this; the match."""
    for line in process.stdout:
        match = re.search(pattern, line)
        if match:
            return match
    raise AssertionError(f"it ended with {process.wait()} before it said {pattern}")


def left_over(folder):
    """Parts of nsys that still name this folder."""
    return subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()


def waits_of(pid):
    """How often a process has gone to sleep so far."""
    said = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", said, re.MULTILINE).group(1))


def test_the_ranks_asked_for_run_under_nsys_and_the_others_without(environment, tmp_path):
    """Must-show 1, on one machine: TP=2 DP=2 under torchrun, ranks 0 and 3."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--nproc-per-node", "4", str(PRETRAIN), "--recipe", "gpt_tiny", "train.train_iters=8"]
    command += ["model.tensor_model_parallel_size=2", "profiling.use_nsys_profiler=true", "profiling.profile_ranks=[0,3]"]
    command += ["profiling.profile_step_start=4", "profiling.profile_step_end=6", "profiling.nsys_export_sqlite=true"]
    profiles = tmp_path / "profiles"
    command.append(f"profiling.output_dir={profiles}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = sorted(path.name for path in (profiles / "nsys" / "iter-4-6").iterdir())
    assert written == ["rank-0.nsys-rep", "rank-0.sqlite", "rank-3.nsys-rep", "rank-3.sqlite"]
    assert [path.name for path in (profiles / "nsys").iterdir()] == ["iter-4-6"], "nothing half-written is left"
    for rank in (0, 3):
        assert iterations(profiles / "nsys" / "iter-4-6" / f"rank-{rank}.sqlite") == ["iteration_4", "iteration_5"]
        said = manifest(profiles, rank, "iter-4-6")
        assert (said["status"], said["captured"]["iterations"]) == ("complete", [4, 5])
        assert said["coordinates"]["tp"] == [rank % 2, 2]
        paths = [artifact["path"] for artifact in said["profilers"][0]["artifacts"]]
        assert paths == [f"nsys/iter-4-6/rank-{rank}.nsys-rep", f"nsys/iter-4-6/rank-{rank}.sqlite"]
    assert not (profiles / "manifest" / "iter-4-6" / "rank-1.json").exists()


def test_sigterm_reaches_the_training_through_nsys_and_what_was_captured_is_there(environment, tmp_path):
    (tmp_path / "hold").touch()
    process = start(environment, tmp_path, "nsys_export_sqlite=true")
    training = int(wait_for(process, r"iteration 3 of (\d+)").group(1))
    assert training != process.pid, "the launcher's process is the supervisor's"
    process.terminate()
    said = process.stdout.read()
    assert process.wait(timeout=60) == 143, said
    assert manifest(tmp_path)["status"] == "partial"
    assert manifest(tmp_path)["captured"]["iterations"] == [2]
    assert iterations(tmp_path / "nsys" / "iter-2-4" / "rank-0.sqlite") == ["iteration_2", "iteration_3"]


def test_once_its_report_is_delivered_the_supervisor_only_waits_for_the_training(environment, tmp_path):
    process = start(environment | {"ITERATIONS": "50"}, tmp_path)
    # Its last look at what it has delivered lies well behind it then.
    wait_for(process, "iteration 20 of")
    assert manifest(tmp_path)["status"] == "complete"
    waits = waits_of(process.pid)
    wait_for(process, "iteration 45 of")
    assert waits_of(process.pid) == waits
    assert process.wait(timeout=60) == 0


def test_a_training_that_is_killed_leaves_its_report_and_a_true_manifest(environment, tmp_path):
    (tmp_path / "hold").touch()
    process = start(environment, tmp_path)
    os.kill(int(wait_for(process, r"iteration 3 of (\d+)").group(1)), signal.SIGKILL)
    assert process.wait(timeout=60) == 137
    outcome = manifest(tmp_path)["profilers"][0]
    assert outcome["status"] == "partial"
    assert "ended inside the window" in outcome["reason"]
    assert (tmp_path / outcome["artifacts"][0]["path"]).stat().st_size > 10_000


def test_a_training_outlives_the_loss_of_its_nsys(environment, tmp_path):
    (tmp_path / "hold").touch()
    process = start(environment, tmp_path)
    wait_for(process, r"iteration 3 of")
    agents = subprocess.run(["pgrep", "-f", "nsys --start-agent"], capture_output=True, text=True, check=True).stdout.split()
    directory = str(tmp_path / "tmp")
    ours = [int(pid) for pid in agents if directory in Path(f"/proc/{pid}/environ").read_text(errors="replace")]
    assert len(ours) == 1
    os.kill(ours[0], signal.SIGKILL)
    time.sleep(1)
    (tmp_path / "hold").unlink()
    said = process.stdout.read()
    assert process.wait(timeout=60) == 0, said
    assert "the loop is done" in said
    assert "goes on without it" in said
    assert manifest(tmp_path)["status"] == "failed"
    assert "report" in manifest(tmp_path)["reason"]


def test_a_supervisor_that_is_killed_takes_its_training_along(environment, tmp_path):
    (tmp_path / "hold").touch()
    process = start(environment, tmp_path)
    training = int(wait_for(process, r"iteration 3 of (\d+)").group(1))
    process.kill()
    for _ in range(100):
        if not Path(f"/proc/{training}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{training}").exists()
    # Killed like this nobody can correct the manifest; it said beforehand what is true now.
    assert manifest(tmp_path)["status"] == "failed"
    assert "died inside the window" in manifest(tmp_path)["reason"]


def test_options_that_nsys_refuses_leave_a_training_without_it_and_its_words_in_the_manifest(environment, tmp_path):
    code, said = run(environment, tmp_path, "nsys_extra_args=[--sample=bogus]")
    assert code == 0, said
    assert "the loop is done" in said
    assert manifest(tmp_path)["status"] == "failed"
    assert "bogus" in manifest(tmp_path)["reason"]


def test_options_this_nsys_does_not_know_are_left_out_with_a_warning(environment, tmp_path):
    options = ["nsys_extra_args=[--cuda-event-trace=false,--not-an-option]", "nsys_gpu_metrics=true"]
    code, said = run(environment, tmp_path, *options)
    assert code == 0, said
    assert manifest(tmp_path)["status"] == "complete"
    notes = " ".join(manifest(tmp_path)["profilers"][0]["notes"])
    for left_out in ("--not-an-option", "no GPU metrics"):
        assert left_out in notes
        assert left_out in said


def test_without_nsys_the_training_runs_and_the_manifest_says_why_there_is_no_report(environment, tmp_path):
    code, said = run(environment | {"PATH": "/usr/bin:/bin"}, tmp_path)
    assert code == 0, said
    assert manifest(tmp_path)["status"] == "failed"
    assert "nsys is not on PATH here" in manifest(tmp_path)["reason"]


def test_a_window_that_never_opens_is_missed(environment, tmp_path):
    code, said = run(environment, tmp_path, "profile_step_start=50", "profile_step_end=52")
    assert code == 0, said
    assert manifest(tmp_path, window="iter-50-52")["status"] == "missed"
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("capture", ["nvtx", "none"])
def test_an_nsys_typed_by_hand_is_left_alone(environment, tmp_path, nsys, capture):
    typed = [str(nsys), "profile", "--trace=nvtx", "--sample=none", f"--output={tmp_path}/mine-%q{{USER_CHOICE}}-%p"]
    if capture == "nvtx":
        typed += ["--capture-range=nvtx", "--nvtx-capture=bridge_profiling_window", "--capture-range-end=stop"]
    environment = environment | {"USER_CHOICE": "x"}
    code, said = run(environment, tmp_path, command=[*typed, sys.executable, str(LOOP)])
    assert code == 0, said
    assert said.count("iteration 0 of") == 1
    (mine,) = tmp_path.glob("mine-x-*.nsys-rep")
    outcome = manifest(tmp_path)["profilers"][0]
    assert outcome["status"] == "complete"
    if capture == "nvtx":
        # The same file, under the name that tells its rank.
        assert os.path.samefile(mine, tmp_path / "nsys" / "iter-2-4" / "rank-0.nsys-rep")
        assert outcome["artifacts"][0]["path"] == "nsys/iter-2-4/rank-0.nsys-rep"
    else:
        assert "when the process ends" in outcome["notes"][0]
        assert outcome["artifacts"] == []


@pytest.mark.parametrize("how", [["--delay=1"], ["--delay=0", "--duration=1"]])
def test_a_collection_by_the_clock_leaves_its_report_when_it_ends(environment, tmp_path, how):
    (tmp_path / "hold").touch()
    process = start(environment, tmp_path, f"nsys_extra_args=[--capture-range=none,{','.join(how)}]", "nsys_export_sqlite=true")
    wait_for(process, r"iteration 3 of")
    time.sleep(3)
    (tmp_path / "hold").unlink()
    said = process.stdout.read()
    assert process.wait(timeout=60) == 0, said
    assert "the loop is done" in said
    outcome = manifest(tmp_path)["profilers"][0]
    assert outcome["status"] == "complete", outcome
    assert len(outcome["artifacts"]) == 2
    assert "nsys does not stop with the window" in " ".join(outcome["notes"])


def test_runs_of_four_ranks_at_once_lose_no_report_in_silence(environment, tmp_path, record_property):
    """A report may be lost; its manifest then says so. Four plain nsys at once lose one in ten: of 40 hardly ever none.

    `NSYS_RUNS=20` makes it twenty runs, as for a release.
    """
    runs = int(os.environ.get("NSYS_RUNS", "10"))
    # Two runs at a time, as two jobs on one machine: nsys waits for its own processes much of its time.
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda number: _reports_of_four_ranks(environment, tmp_path / f"run-{number}"), range(runs)))
    reports = sum(found)
    told = f"{runs} runs of 4 ranks at once: {reports} reports, {4 * runs - reports} lost, each owned up to in its manifest"
    record_property("told", told)  # tests/conftest.py shows it, also from a worker of pytest-xdist
    assert reports >= 0.95 * 4 * runs


def _reports_of_four_ranks(environment, folder):
    """How many reports a run leaves; its manifests must say the same."""
    folder.mkdir()
    job = environment | {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": folder.name}
    ranks = [start(job | {"RANK": str(rank)}, folder) for rank in range(4)]
    said = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * 4, "".join(said)
    there = [(folder / "nsys" / "iter-2-4" / f"rank-{rank}.nsys-rep").exists() for rank in range(4)]
    statuses = [manifest(folder, rank)["status"] for rank in range(4)]
    assert there == [status == "complete" for status in statuses], (folder, statuses, said)
    return sum(there)


DRIVER = """
import sys
import nemo_run as run
from bridge_profiling.plugins import NsysPlugin

if __name__ == "__main__":
    script, launcher, *options = sys.argv[1:]
    executor = run.LocalExecutor(ntasks_per_node=1, launcher=None if launcher == "None" else launcher)
    with run.Experiment("prefix", executor=executor) as experiment:
        asked = dict(export_sqlite=True, nsys_extra_args=options, nsys_gpu_metrics=True)
        plugin = NsysPlugin(profile_step_start=2, profile_step_end=4, **asked)
        experiment.add(run.Script(path=script, entrypoint="python", args=["x=[1,2]"]), plugins=[plugin], name="t")
        experiment.run(tail_logs=True)
    print("ended as", experiment.status(return_dict=True)["t"]["status"].name)
"""

#: Anybody's training with our hook in it: it starts no nsys, and would not know how.
SCRIPT = """
import os, sys, time
from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.overrides import apply_overrides

print("arguments", sys.argv[1:], flush=True)
config = ProfilingConfig()
apply_overrides(config, [text.removeprefix("profiling.") for text in sys.argv[1:] if text.startswith("profiling.")])
with ProfilingHook(config, rank=int(os.environ.get("RANK", 0))) as hook:
    for iteration in range(5):
        with hook.iteration(iteration):
            time.sleep(0.05)
"""


@pytest.mark.needs("nemo_run")
@pytest.mark.parametrize("launcher", ["None", "torchrun"])
def test_a_task_that_knows_nothing_of_nsys_gets_nemo_runs_prefix_made_to_work(environment, tmp_path, launcher):
    """NeMo-Run's default --cuda-event-trace is refused by this nsys; its prefix appends an empty argument."""
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--capture-range=nvtx", "--nvtx-capture", "bridge_profiling_window"]
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "script.py"), launcher, *options]
    environment = environment | {"NEMORUN_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr
    assert "ended as SUCCEEDED" in said, said
    assert "does not know --cuda-event-trace" in said
    assert "no GPU metrics here" in said
    assert "arguments ['x=[1,2]', 'profiling.use_nsys_profiler=true'" in said
    (job,) = tmp_path.glob("experiments/prefix/*/t")
    (report,) = job.glob("nsys_profile/*.nsys-rep")
    (sqlite,) = job.glob("nsys_profile/*.sqlite")
    assert iterations(sqlite) == ["iteration_2", "iteration_3"]
    outcome = manifest(job / "profiles")["profilers"][0]
    assert outcome["status"] == "complete", outcome
    if launcher == "None":
        assert os.path.samefile(report, job / "profiles" / "nsys" / "iter-2-4" / "rank-0.nsys-rep")
    else:
        assert "every rank that this nsys started" in outcome["notes"][0]
        assert os.path.samefile(report, outcome["artifacts"][0]["path"])


@pytest.mark.needs("nemo_run")
def test_a_prefixed_nsys_that_leaves_no_report_says_so(environment, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "script.py").write_text("print('a training without any range')")
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "script.py"), "None"]
    command += ["--capture-range=nvtx", "--nvtx-capture=bridge_profiling_window"]
    environment = environment | {"NEMORUN_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "ended as SUCCEEDED" in done.stdout
    assert "nsys left no report" in done.stdout + done.stderr


def test_an_nsys_that_was_told_to_makes_several_captures_those_of_the_config_and_one_on_request(environment, tmp_path):
    """Windows 1-2 and 3-4, and 9-10 asked for while iteration 3 is held: each report lies in its window's folder."""
    settings = ["profile_step_start=1", "profile_step_end=2", "profile_every=2", "profile_at_most=2", "nsys_captures=3"]
    settings += ["nsys_export_sqlite=true", "on_demand_seconds=0.05"]
    (tmp_path / "hold").touch()
    process = start(environment | {"ITERATIONS": "12"}, tmp_path, *settings)
    wait_for(process, r"iteration 3 of (\d+)")
    mailbox = tmp_path / "on-demand"
    (mailbox / "by-hand").write_text(json.dumps({"iterations": 1, "start": 9, "profilers": ["nsys"], "id": "third"}))
    os.rename(mailbox / "by-hand", mailbox / "request.json")
    answer = mailbox / "answers" / "third" / "rank-0.json"
    deadline = time.monotonic() + 60
    while not answer.exists():
        assert time.monotonic() < deadline, (mailbox / "refused" / "third.json").read_text()
        time.sleep(0.05)
    (tmp_path / "hold").unlink()
    said = process.stdout.read()
    assert process.wait(timeout=120) == 0, said
    for window, number, kind in (("iter-1-2", 1, "repeat"), ("iter-3-4", 3, "repeat"), ("iter-9-10", 9, "request")):
        assert iterations(tmp_path / "nsys" / window / "rank-0.sqlite") == [f"iteration_{number}"]
        told = manifest(tmp_path, window=window)
        assert (told["status"], told["trigger"]["kind"]) == ("complete", kind), told
        paths = [artifact["path"] for artifact in told["profilers"][0]["artifacts"]]
        assert paths == [f"nsys/{window}/rank-0.nsys-rep", f"nsys/{window}/rank-0.sqlite"]
    assert not left_over(tmp_path)
