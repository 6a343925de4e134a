"""Under ft_launcher, started by NeMo-Run as a user starts it: ranks die, hang and are told to stop, and the window survives."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.jobs import ROOT, end_tree, environment, manifests, trace_iterations

pytestmark = [pytest.mark.system, pytest.mark.needs("megatron", "nemo_run")]

pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")

HERE = Path(__file__).parent
WINDOW = ["--fault-tolerance", "--profiler", "torch", "--steps", "4:6", "--ranks", "0,1"]

FIRST, RESTARTED = "iter-4-6", "iter-4-6.1"


@dataclass
class Job:
    """A job that has ended."""

    folder: Path
    exit_code: int
    output: str

    def outcomes(self, attempt):
        """Status and captured iterations of each rank's manifest; its trace may add the interrupted one."""
        found = []
        for rank, manifest in sorted(manifests(self.folder, attempt).items()):
            captured = (manifest["captured"] or {"iterations": []})["iterations"]
            traces = list(self.folder.rglob(f"torch/{attempt}/rank-{rank}.pt.trace.json.gz"))
            for trace in traces:
                assert [one for one in trace_iterations(trace) if one not in manifest["interrupted"]] == captured
            assert traces or not captured
            found.append((manifest["status"], captured))
        return found

    def check_losses(self, iterations, *, repeated):
        """Every iteration was trained; those since the checkpoint twice, to the same bits."""
        records = [json.loads(line) for line in (self.folder / "losses.jsonl").read_text().splitlines()]
        assert {record["iteration"] for record in records} == set(range(iterations))
        assert len({(record["iteration"], record["hex"]) for record in records}) == iterations
        trained = [record["iteration"] for record in records]
        assert [iteration for iteration in range(iterations) if trained.count(iteration) > 1] == repeated


def run_job(folder, command, *settings, fault=None):
    # ft_launcher puts sockets there, whose paths must be short.
    temporary = tempfile.mkdtemp(prefix="ft-", dir="/tmp")
    places = {"NEMORUN_HOME": str(folder / "nemo_run"), "TMPDIR": temporary, "PATH": f"{folder}:{os.environ['PATH']}"}
    job = environment(PYTHONPATH=f"{HERE / 'planted'}:{ROOT}", COLUMNS="200", **places)
    job |= {"PLANTED_FAULT": fault} if fault else {}
    arguments = map(str, [*command, *settings, f"logger.loss_file={folder}/losses.jsonl"])
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *arguments], env=job, cwd=folder, **streams)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end_tree(process)
        shutil.rmtree(temporary, ignore_errors=True)
    return Job(folder, process.returncode, output)


def experiment(folder, fault, *arguments, save_interval):
    """Nine iterations with checkpoints, struck by the fault."""
    checkpoints = [f"checkpoint.{name}={folder}/checkpoints" for name in ("save", "load")]
    settings = ["train.train_iters=9", *checkpoints, f"checkpoint.save_interval={save_interval}"]
    return run_job(folder, [ROOT / "launch" / "experiment.py", *WINDOW, *arguments], *settings, fault=fault)


WHOLE, MISSED, LOST = ("complete", [4, 5]), ("missed", []), ("failed", [])


@pytest.mark.parametrize(
    ("dies_in", "save_interval", "resumes_at", "first", "restarted", "repeated", "options"),
    [
        # After a checkpoint from inside the window the rest of it is captured.
        (5, 5, 5, [("partial", [4]), LOST], [("partial", [5])] * 2, [], []),
        (7, 2, 6, [WHOLE, WHOLE], [MISSED, MISSED], [6], ["--task", "partial"]),
    ],
    ids=["after a checkpoint inside it", "after the window"],
)
def test_a_rank_that_dies_is_restarted_and_captures_what_it_trains_of_the_window(
    tmp_path, dies_in, save_interval, resumes_at, first, restarted, repeated, options
):
    job = experiment(tmp_path, f"kill 1 {dies_in}", *options, save_interval=save_interval)
    assert job.exit_code == 0, job.output
    assert f"resuming at iteration {resumes_at}" in job.output
    assert (job.outcomes(FIRST), job.outcomes(RESTARTED)) == (first, restarted)
    job.check_losses(9, repeated=repeated)


def test_a_rank_that_hangs_is_killed_by_its_monitor_and_restarted(tmp_path):
    job = run_job(tmp_path, [HERE / "fault_tolerant_job.py"], "train.train_iters=8", fault="hang 1 5")
    assert job.exit_code == 0, job.output
    assert "a rank is killed without a first heartbeat after 120 s, or a later one after 10 s" in job.output
    assert "Did not get subsequent heartbeat. Waited 10.00 seconds." in job.output
    # Both ranks miss heartbeats, since rank 0 waits for rank 1. The one whose monitor is first has no time to write; its end
    # may let the launcher terminate the other before that one's monitor kills it.
    outcomes = job.outcomes(FIRST)
    assert LOST in outcomes
    assert [outcome for outcome in outcomes if outcome not in (LOST, ("partial", [4]))] == []
    # There is no checkpoint, so the second attempt starts from scratch.
    assert job.outcomes(RESTARTED) == [WHOLE, WHOLE]
    assert job.output.count("iteration 0/8") == 2


def test_terminated_the_launcher_has_the_ranks_write_partial_traces_and_restarts_nothing(tmp_path):
    job = experiment(tmp_path, "terminate the launcher 1 5", save_interval=2)
    assert job.exit_code == 1
    # The signal comes when rank 1 is in iteration 5; rank 0 may then still be in the one before.
    assert job.outcomes(FIRST) in ([("partial", captured), ("partial", [4])] for captured in ([], [4]))
    assert job.outcomes(RESTARTED) == []


#: A stand-in for nsys that leaves a mark when a rank starts it.
NSYS = "#!/bin/sh\ntouch {mark}\nexit 1\n"


@pytest.mark.parametrize(
    ("launcher", "yaml"),
    [
        # ft_launcher alone shows that fault tolerance is on.
        (["ft_launcher", "--ignore-missing-fault-tol-cfg", "--nproc-per-node=2"], "profiling: {use_nsys_profiler: true}"),
        ([], "ft: {enable_ft_package: true}\nprofiling: {use_nsys_profiler: true}"),
    ],
    ids=["ft_launcher", "setting"],
)
def test_nsys_is_off_in_a_job_that_no_plugin_has_seen(tmp_path, launcher, yaml):
    (tmp_path / "run.yaml").write_text(yaml)
    (tmp_path / "nsys").write_text(NSYS.format(mark=tmp_path / "started"))
    (tmp_path / "nsys").chmod(0o755)
    command = [
        *([Path(sys.executable).with_name(launcher[0]), *launcher[1:]] if launcher else []),
        ROOT / "launch" / "pretrain.py",
    ]
    settings = ["--config", tmp_path / "run.yaml", "train.train_iters=4", "profiling.profile_step_start=1"]
    settings += ["profiling.profile_step_end=3", "profiling.profile_ranks=all"]
    job = run_job(tmp_path, command, *settings)
    assert job.exit_code == 0, job.output
    assert job.output.count("Nsys not supported with the FaultTolerancePlugin") == 1
    assert "iteration 3/4" in job.output
    assert not (tmp_path / "started").exists()
