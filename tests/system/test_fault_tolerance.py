"""Under ft_launcher, started by NeMo-Run as a user starts it: ranks die, hang and are told to stop, and the window survives."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.system, pytest.mark.needs("megatron", "nemo_run")]

pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WINDOW = ["--fault-tolerance", "--profiler", "torch", "--steps", "4:6", "--ranks", "0,1"]

FIRST, RESTARTED = "iter-4-6", "iter-4-6.1"
WARNING = "Nsys not supported with the FaultTolerancePlugin"


@dataclass
class Job:
    """A job that has ended."""

    folder: Path
    exit_code: int
    output: str

    @property
    def statuses(self):
        """What each rank's manifest says, by attempt."""
        attempts = {}
        for rank in (0, 1):
            for file in self.folder.rglob(f"manifest/*/rank-{rank}.json"):
                attempts.setdefault(file.parent.name, []).append(json.loads(file.read_text())["status"])
        return attempts

    def iterations(self, attempt, rank):
        """The iterations in a trace and in its manifest, which must be the same ones; none where there is no trace."""
        (manifest,) = self.folder.rglob(f"manifest/{attempt}/rank-{rank}.json")
        captured = (json.loads(manifest.read_text())["captured"] or {"iterations": []})["iterations"]
        traces = list(self.folder.rglob(f"torch/{attempt}/rank-{rank}.pt.trace.json.gz"))
        if not traces:
            assert not captured
            return []
        with gzip.open(traces[0]) as file:
            names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
        found = sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))
        assert captured == found
        return found

    def check_losses(self, iterations, *, repeated):
        """Every iteration was trained; those since the checkpoint twice, to the same bits."""
        records = [json.loads(line) for line in (self.folder / "losses.jsonl").read_text().splitlines()]
        assert {record["iteration"] for record in records} == set(range(iterations))
        assert len({(record["iteration"], record["hex"]) for record in records}) == iterations
        trained = [record["iteration"] for record in records]
        assert [iteration for iteration in range(iterations) if trained.count(iteration) > 1] == repeated


def run_job(folder, command, *settings, fault=None):
    environment = os.environ | {
        "NEMORUN_HOME": str(folder / "nemo_run"),
        "PYTHONPATH": os.pathsep.join([str(HERE / "planted"), str(ROOT)]),
        # ft_launcher puts sockets there, whose paths must be short.
        "TMPDIR": "/tmp",
        "COLUMNS": "200",
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    if fault is not None:
        environment["PLANTED_FAULT"] = fault
    arguments = [*command, *settings, f"logger.loss_file={folder}/losses.jsonl"]
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        # NeMo-Run starts the launcher, and that the ranks, in sessions of their own: a job that is late would stay.
        for running in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            running.kill()
    return Job(folder, process.returncode, output)


def experiment(folder, fault, *arguments, save_interval):
    """Nine iterations with checkpoints, struck by the fault."""
    checkpoints = [f"checkpoint.{name}={folder}/checkpoints" for name in ("save", "load")]
    settings = ["train.train_iters=9", *checkpoints, f"checkpoint.save_interval={save_interval}"]
    return run_job(folder, [ROOT / "launch" / "experiment.py", *WINDOW, *arguments], *settings, fault=fault)


def test_a_rank_that_dies_before_the_window_is_restarted_and_the_window_is_captured_whole(tmp_path):
    job = experiment(tmp_path, "kill 1 3", save_interval=2)
    assert job.exit_code == 0, job.output
    assert "resuming at iteration 2" in job.output
    assert job.statuses == {FIRST: ["missed", "missed"], RESTARTED: ["complete", "complete"]}
    assert [job.iterations(FIRST, rank) for rank in (0, 1)] == [[], []]
    assert [job.iterations(RESTARTED, rank) for rank in (0, 1)] == [[4, 5], [4, 5]]
    job.check_losses(9, repeated=[2])


def test_a_window_that_a_death_cut_is_captured_whole_after_a_checkpoint_from_before_it(tmp_path):
    job = experiment(tmp_path, "kill 1 5", save_interval=2)
    assert job.exit_code == 0, job.output
    assert "resuming at iteration 4" in job.output
    assert job.statuses == {FIRST: ["partial", "failed"], RESTARTED: ["complete", "complete"]}
    assert [job.iterations(FIRST, rank) for rank in (0, 1)] == [[4], []]
    assert [job.iterations(RESTARTED, rank) for rank in (0, 1)] == [[4, 5], [4, 5]]
    job.check_losses(9, repeated=[4])


def test_after_a_checkpoint_from_inside_the_window_the_rest_of_it_is_captured(tmp_path):
    job = experiment(tmp_path, "kill 1 5", save_interval=5)
    assert job.exit_code == 0, job.output
    assert "resuming at iteration 5" in job.output
    assert job.statuses == {FIRST: ["partial", "failed"], RESTARTED: ["partial", "partial"]}
    assert [job.iterations(FIRST, rank) for rank in (0, 1)] == [[4], []]
    assert [job.iterations(RESTARTED, rank) for rank in (0, 1)] == [[5], [5]]
    job.check_losses(9, repeated=[])


def test_a_death_after_the_window_leaves_its_capture_alone(tmp_path):
    job = experiment(tmp_path, "kill 1 7", "--task", "partial", save_interval=2)
    assert job.exit_code == 0, job.output
    assert "resuming at iteration 6" in job.output
    assert job.statuses == {FIRST: ["complete", "complete"], RESTARTED: ["missed", "missed"]}
    assert [job.iterations(FIRST, rank) for rank in (0, 1)] == [[4, 5], [4, 5]]
    assert [job.iterations(RESTARTED, rank) for rank in (0, 1)] == [[], []]
    job.check_losses(9, repeated=[6])


def test_a_rank_that_hangs_is_killed_by_its_monitor_and_restarted(tmp_path):
    command = [HERE / "fault_tolerant_job.py", "hangs_noticed_soon"]
    job = run_job(tmp_path, command, "train.train_iters=8", fault="hang 1 5")
    assert job.exit_code == 0, job.output
    assert "a rank is killed without a first heartbeat after 120 s, or a later one after 10 s" in job.output
    assert "Did not get subsequent heartbeat. Waited 10.00 seconds." in job.output
    # SIGKILL leaves no rank the time to write; there is no checkpoint, so the second attempt starts from scratch.
    assert job.statuses[RESTARTED] == ["complete", "complete"]
    assert job.statuses[FIRST][1] == "failed"
    assert job.iterations(FIRST, 1) == []
    assert [job.iterations(RESTARTED, rank) for rank in (0, 1)] == [[4, 5], [4, 5]]
    assert job.output.count("iteration 0/8") == 2


def test_told_to_stop_the_launcher_has_the_ranks_write_partial_traces_and_restarts_nothing(tmp_path):
    job = experiment(tmp_path, "terminate the launcher 1 5", save_interval=2)
    assert job.exit_code == 1
    assert job.statuses == {FIRST: ["partial", "partial"]}
    # The launcher is told when rank 1 is in iteration 5; rank 0 may then still be in the one before.
    assert job.iterations(FIRST, 1) == [4]
    assert job.iterations(FIRST, 0) in ([], [4])


@pytest.fixture
def tripwire(tmp_path):
    """An nsys that comes first on the job's PATH, and leaves a file when it is called."""
    nsys = tmp_path / "nsys"
    nsys.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/nsys-was-called\nexit 1\n')
    nsys.chmod(0o755)
    return tmp_path / "nsys-was-called"


@pytest.mark.parametrize("job", ["nsys_before", "nsys_after", "nsys_by_hand"])
def test_with_nsys_asked_for_the_job_trains_under_the_launcher_and_no_nsys_runs(job, tmp_path, tripwire):
    done = run_job(tmp_path, [HERE / "fault_tolerant_job.py", job], "train.train_iters=6")
    assert done.exit_code == 0, done.output
    assert len(re.findall(WARNING, done.output)) == 1
    assert "ft_launcher" in done.output
    assert not tripwire.exists()
    assert not [path for path in tmp_path.rglob("*nsys*") if path != tmp_path / "nsys"]
    done.check_losses(6, repeated=[])
