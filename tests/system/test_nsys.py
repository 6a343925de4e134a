"""Real nsys: the ranks asked for start themselves under it, and whatever becomes of nsys, the training and the truth go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bridge_profiling.common.processes import command_of, find_by_variable
from tests.system import jobs
from tests.system.jobs import ROOT, ended_well, nvtx_iterations, nvtx_ranges, wait_until

pytestmark = [pytest.mark.system, pytest.mark.needs("nsys", "megatron")]

LOOP = Path(__file__).with_name("nsys_loop.py")
PRETRAIN = ROOT / "launch" / "pretrain.py"


@pytest.fixture
def environment(nsys, tmp_path):
    """A job's environment, with nsys on PATH and a folder for what a job leaves in the temporary one."""
    (tmp_path / "tmp").mkdir()
    path = f"{nsys.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return jobs.environment(PATH=path, TMPDIR=str(tmp_path / "tmp"))


def start(environment, folder, *settings, command=(sys.executable, str(LOOP))):
    return subprocess.Popen(
        [*command, str(folder), *settings], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture
def held(environment, tmp_path):
    """A training that waits in iteration 3, with its own process id, and what releases and ends it."""
    processes = []

    def start_held(*settings, **more):
        (tmp_path / "hold").touch()
        process = start(environment | more, tmp_path, *settings)
        processes.append(process)
        return process, int(wait_for(process, r"iteration 3 of (\d+)").group(1))

    yield start_held
    for process in processes:
        jobs.end_tree(process)


def ends(process, *codes):
    """What it says until it ends, with one of these exit codes, or else with 0."""
    said = process.stdout.read()
    assert process.wait(timeout=60) in (codes or (0,)), said
    return said


def manifest(folder, rank=0, window="iter-2-4"):
    return jobs.manifests(folder, window)[rank]


def wait_for(process, pattern):
    """Read what a process says until it says this; the match."""
    for line in process.stdout:
        match = re.search(pattern, line)
        if match:
            return match
    raise AssertionError(f"it ended with {process.wait()} before it said {pattern}")


def pids(pattern):
    """Processes whose command line has this in it."""
    return [int(pid) for pid in subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()]


def agents(folder):
    """The agents of nsys of a job that has its temporary files in this folder."""
    return [pid for pid in find_by_variable("TMPDIR", str(folder / "tmp")) if "--start-agent" in command_of(pid)]


def test_the_ranks_asked_for_run_under_nsys_and_the_others_without(environment, tmp_path):
    """Must-show 1, on one machine: TP=2 DP=2 under torchrun, ranks 0 and 3."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--nproc-per-node", "4", str(PRETRAIN), "--recipe", "gpt_tiny", "train.train_iters=8"]
    command += ["model.tensor_model_parallel_size=2", "profiling.use_nsys_profiler=true", "profiling.profile_ranks=[0,3]"]
    command += ["profiling.profile_step_start=4", "profiling.profile_step_end=6", "profiling.nsys_export_sqlite=true"]
    profiles = tmp_path / "profiles"
    command.append(f"profiling.output_dir={profiles}")
    ended_well(command, env=environment, timeout=400)
    written = sorted(path.name for path in (profiles / "nsys" / "iter-4-6").iterdir())
    assert written == ["rank-0.nsys-rep", "rank-0.sqlite", "rank-3.nsys-rep", "rank-3.sqlite"]
    assert [path.name for path in (profiles / "nsys").iterdir()] == ["iter-4-6"], "nothing half-written is left"
    for rank in (0, 3):
        assert nvtx_iterations(profiles / "nsys" / "iter-4-6" / f"rank-{rank}.sqlite") == [4, 5]
        said = manifest(profiles, rank, "iter-4-6")
        assert (said["status"], said["captured"]["iterations"]) == ("complete", [4, 5])
        assert said["coordinates"]["tp"] == [rank % 2, 2]
        paths = [artifact["path"] for artifact in said["profilers"][0]["artifacts"]]
        assert paths == [f"nsys/iter-4-6/rank-{rank}.nsys-rep", f"nsys/iter-4-6/rank-{rank}.sqlite"]
    assert not (profiles / "manifest" / "iter-4-6" / "rank-1.json").exists()


def test_the_rank_asked_for_runs_under_nsys_and_its_report_holds_the_phases(environment, tmp_path, nsys):
    """Of an unchanged script under `bridge-profiling run`."""
    options = ("--nproc", "2", "--profiler", "nsys", "--ranks", "1", "--steps", "3:6", ROOT / "docs/examples/plain_loop.py")
    ended = jobs.cli("run", *options, cwd=tmp_path, env=environment)
    written = manifest(tmp_path / "profiles", 1, "iter-3-6")
    assert (written["status"], written["captured"]["iterations"]) == ("complete", [3, 4, 5]), ended.stderr
    (report,) = (tmp_path / "profiles" / "nsys" / "iter-3-6").glob("*.nsys-rep")
    assert report.name == "rank-1.nsys-rep"
    ended_well([nsys, "export", "--type=sqlite", f"--output={tmp_path}/rank-1.sqlite", report])
    names = nvtx_ranges(tmp_path / "rank-1.sqlite")
    assert [name for name in names if name.startswith("iteration_")] == ["iteration_3", "iteration_4", "iteration_5"]
    assert [names.count(name) for name in ("data-loading", "forward", "backward", "optimizer")] == [3, 3, 3, 3]
    assert f"bridge-profiling report {tmp_path}/profiles" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["of the job", "of nsys alone"])
def test_an_nsys_that_is_ended_while_it_starts_leaves_no_agent(environment, tmp_path, number):
    if number == signal.SIGTERM:
        (tmp_path / "hold").touch()  # should it run already
    process = start(environment, tmp_path)
    wait_until(lambda: agents(tmp_path), 60)
    if number == signal.SIGTERM:
        process.terminate()
        assert "the loop is done" not in ends(process, 143)
    else:
        session = command_of(agents(tmp_path)[0])
        os.kill(int(session[session.index("--session-name") + 1].removeprefix("profile-")), number)
        assert ends(process, 0, 1).count("the loop is done") == 1
    assert not agents(tmp_path)


def kill_nsys(process, training, folder):
    (agent,) = agents(folder)
    os.kill(agent, signal.SIGKILL)
    time.sleep(1)
    (folder / "hold").unlink()


@pytest.mark.parametrize(
    ("strike", "code", "status", "reason", "said"),
    [
        (lambda process, training, folder: process.terminate(), 143, "partial", "the process exited (code 143)", ""),
        (lambda process, training, folder: os.kill(training, signal.SIGKILL), 137, "partial", "ended inside the window", ""),
        (kill_nsys, 0, "failed", "report", "goes on without it"),
        # The training goes along. Nobody can correct the manifest; it said beforehand what is true now.
        (lambda process, training, folder: process.kill(), -signal.SIGKILL, "failed", "died inside the window", ""),
    ],
    ids=["SIGTERM", "the training is killed", "nsys is killed", "the supervisor is killed"],
)
def test_what_was_captured_is_there_and_the_manifest_true_whichever_process_ends(
    held, tmp_path, strike, code, status, reason, said
):
    process, training = held("nsys_export_sqlite=true")
    assert training != process.pid, "the launcher's process is the supervisor's"
    strike(process, training, tmp_path)
    printed = ends(process, code)
    assert said in printed
    assert ("the loop is done" in printed) == (code == 0)
    wait_until(lambda: not psutil.pid_exists(training), 60)
    found = manifest(tmp_path)
    assert (found["status"], reason in found["reason"]) == (status, True), found["reason"]
    if status == "partial":
        ranges = nvtx_iterations(tmp_path / "nsys" / "iter-2-4" / "rank-0.sqlite")
        # A killed one takes its open range along, or not, and could not say what it had captured.
        assert ranges == [2, 3] or (code == 137 and ranges == [2])
        assert (found["captured"] or {}).get("iterations") == ([2] if code == 143 else None)


@pytest.mark.parametrize(
    ("settings", "path", "status", "parts"),
    [
        (["nsys_extra_args=[--sample=bogus]"], None, "failed", ["bogus"]),
        # Options this nsys does not know are left out with a warning.
        (
            ["nsys_extra_args=[--cuda-event-trace=false,--not-an-option]", "nsys_gpu_metrics=true"],
            None,
            "complete",
            ["--not-an-option", "no GPU metrics"],
        ),
        ([], "/usr/bin:/bin", "failed", ["nsys is not on PATH here"]),
    ],
    ids=["refused options", "unknown options", "no nsys"],
)
def test_the_training_runs_to_its_end_and_the_manifest_says_what_became_of_nsys(
    environment, tmp_path, settings, path, status, parts
):
    said = ends(start(environment | ({"PATH": path} if path else {}), tmp_path, *settings))
    assert "the loop is done" in said
    found = manifest(tmp_path, window="*")
    assert found["status"] == status
    for part in parts:
        if status == "complete":
            assert part in said
            assert part in " ".join(found["profilers"][0]["notes"])
        else:
            assert part in found["reason"]
    wait_until(lambda: not pids(str(tmp_path)), 20)


def test_an_nsys_typed_by_hand_is_left_alone(environment, tmp_path, nsys):
    typed = [str(nsys), "profile", "--trace=nvtx", "--sample=none", f"--output={tmp_path}/mine-%q{{USER_CHOICE}}-%p"]
    typed += ["--capture-range=nvtx", "--nvtx-capture=bridge_profiling_window", "--capture-range-end=stop"]
    said = ends(start(environment | {"USER_CHOICE": "x"}, tmp_path, command=[*typed, sys.executable, str(LOOP)]))
    assert said.count("iteration 0 of") == 1
    (mine,) = tmp_path.glob("mine-x-*.nsys-rep")
    outcome = manifest(tmp_path)["profilers"][0]
    assert outcome["status"] == "complete"
    # The same file, under the name that has its rank.
    assert os.path.samefile(mine, tmp_path / "nsys" / "iter-2-4" / "rank-0.nsys-rep")
    assert outcome["artifacts"][0]["path"] == "nsys/iter-2-4/rank-0.nsys-rep"


#: Anybody's training with our hook in it: it starts no nsys, and would not know how.
SCRIPT = """
import os, sys, time
from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.settings.overrides import apply_overrides

print("arguments", sys.argv[1:], flush=True)
config = ProfilingConfig()
apply_overrides(config, [text.removeprefix("profiling.") for text in sys.argv[1:] if text.startswith("profiling.")])
with ProfilingHook(config, rank=int(os.environ.get("RANK", 0))) as hook:
    for iteration in range(5):
        with hook.iteration(iteration):
            time.sleep(0.05)
"""


@pytest.mark.needs("nemo_run")
def test_a_task_that_knows_nothing_of_nsys_gets_nemo_runs_prefix_made_to_work(environment, tmp_path, nsys):
    """This nsys refuses NeMo-Run's default --cuda-event-trace, and loses its first start; the prefix has an empty argument."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, LOOP.with_name("local_job.py"), tmp_path / "script.py"]
    (tmp_path / "bin").mkdir()
    once = 'case "$*" in *script.py*) [ -e lost ] || { touch lost; echo End of file; exit 1; } ;; esac'
    (tmp_path / "bin" / "nsys").write_text(f'#!/bin/bash\n{once}\nexec {nsys} "$@"\n')
    (tmp_path / "bin" / "nsys").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{environment['PATH']}"
    ended_well(command, env=environment | {"NEMORUN_HOME": str(tmp_path), "PATH": path}, cwd=tmp_path)
    (job,) = tmp_path.glob("experiments/local/*/t")
    # NeMo-Run can lose the last lines of a job that it follows; the job's log has all of them.
    said = "".join(path.read_text() for path in job.rglob("combined.log"))
    assert "does not know --cuda-event-trace" in said
    assert "no GPU metrics here" in said
    assert "(start 1 of 3)" in said
    assert "arguments ['x=[1,2]', 'profiling.use_nsys_profiler=true'" in said
    (report,) = job.glob("nsys_profile/*.nsys-rep")
    (sqlite,) = job.glob("nsys_profile/*.sqlite")
    assert nvtx_iterations(sqlite) == [2, 3]
    outcome = manifest(job / "profiles")["profilers"][0]
    assert outcome["status"] == "complete", outcome
    assert "every rank that this nsys started" in outcome["notes"][0]
    assert os.path.samefile(report, outcome["artifacts"][0]["path"])


def test_an_nsys_that_was_told_to_makes_several_captures_those_of_the_config_and_one_on_request(held, tmp_path):
    """Windows 1-2 and 3-4, and 9-10 asked for while iteration 3 is held: each report lies in its window's folder."""
    settings = ["profile_step_start=1", "profile_step_end=2", "profile_every=2", "profile_at_most=2", "nsys_captures=3"]
    settings += ["nsys_export_sqlite=true", "on_demand_seconds=0.05"]
    process, _ = held(*settings, ITERATIONS="12")
    requests = tmp_path / "on-demand"
    (requests / "by-hand").write_text(json.dumps({"iterations": 1, "start": 9, "profilers": ["nsys"], "id": "third"}))
    os.rename(requests / "by-hand", requests / "request.json")
    refused = requests / "refused" / "third.json"
    wait_until((requests / "answers" / "third" / "rank-0.json").exists, 60, refused.read_text)
    (tmp_path / "hold").unlink()
    ends(process)
    for window, number, kind in (("iter-1-2", 1, "repeat"), ("iter-3-4", 3, "repeat"), ("iter-9-10", 9, "request")):
        assert nvtx_iterations(tmp_path / "nsys" / window / "rank-0.sqlite") == [number]
        found = manifest(tmp_path, window=window)
        assert (found["status"], found["trigger"]["kind"]) == ("complete", kind), found
        paths = [artifact["path"] for artifact in found["profilers"][0]["artifacts"]]
        assert paths == [f"nsys/{window}/rank-0.nsys-rep", f"nsys/{window}/rank-0.sqlite"]
    wait_until(lambda: not pids(str(tmp_path)), 20)
