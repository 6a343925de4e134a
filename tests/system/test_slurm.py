"""On a real Slurm of two nodes: trainings are profiled, and interrupted ones keep what they had.

A container layout cannot run here, for want of Pyxis: tests/recipes/golden_sbatch holds its batch scripts.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.jobs import (
    ROOT,
    by_rank,
    end_tree,
    ended_well,
    environment,
    manifests,
    nvtx_iterations,
    trace_iterations,
    wait_until,
)
from tests.system.slurm_cluster import ACCOUNT, PARTITION

pytestmark = [pytest.mark.system, pytest.mark.needs("slurm"), pytest.mark.timeout(600)]


@dataclass
class Submission:
    """A running `launch/experiment.py --executor slurm`."""

    process: subprocess.Popen
    home: Path

    def log(self) -> str:
        """What the command and the ranks have printed so far."""
        ranks = self.home.glob("experiments/*/*/profile/log-*.out")
        return "".join(path.read_text() for path in [*ranks, self.home / "output"])

    def finish(self, code: int = 0) -> str:
        """Wait for the command to end with this exit code; the job's id, from NeMo-Run's own record."""
        assert self.process.wait(timeout=300) == code, self.log()[-8000:]
        return (self.home / ".slurm_jobs").read_text().partition("=")[0].strip()

    def captured(self) -> tuple[dict[int, dict], dict[int, list[int]]]:
        """Each rank's manifest, and the iterations in its trace or report."""
        (profiles,) = self.home.glob("experiments/profile/profile_*/profile/profiles")
        traces, reports = profiles.glob("torch/*/rank-*.gz"), profiles.glob("nsys/*/rank-*.sqlite")
        return manifests(profiles), by_rank(traces, trace_iterations) | by_rank(reports, nvtx_iterations)


@pytest.fixture
def submit(slurm_cluster, committed_checkout, tmp_path):
    """Starts launch/experiment.py for gpt_tiny on two nodes of two ranks, TP=2 DP=2, ranks 0 and 3 under the profiler."""
    submissions = []

    def start(*arguments: str, path: str = os.environ["PATH"]) -> Submission:
        command = [sys.executable, committed_checkout / "launch" / "experiment.py", "--executor", "slurm"]
        command += ["--account", ACCOUNT, "--partition", PARTITION, "--nodes", "2", "--nproc", "2"]
        command += ["--ranks", "0,3", *arguments, "model.tensor_model_parallel_size=2"]
        # As the cluster's KillWait: torchrun's own patience is 30 s.
        patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110", "NEMORUN_HOME": str(tmp_path), "PATH": path}
        with open(tmp_path / "output", "w") as file:
            process = subprocess.Popen(
                command, env=os.environ | slurm_cluster.environment | patience, stdout=file, stderr=subprocess.STDOUT
            )
        submissions.append(Submission(process, tmp_path))
        return submissions[-1]

    yield start
    for submission in submissions:
        end_tree(submission.process)
        slurm_cluster.run("scancel", "--account", ACCOUNT)  # a test that failed leaves one


@pytest.mark.needs("ft", "megatron", "nemo_run")
def test_exactly_the_ranks_asked_for_are_profiled_in_exactly_the_window(slurm_cluster, submit):
    """Under fault tolerance, which queues a job again unless it has finished."""
    submission = submit("--fault-tolerance", "--profiler", "torch", "--steps", "4:6", "train.train_iters=8")
    job_id = submission.finish()
    assert "4 cpu rank(s): tp=2 pp=1 dp=2" in submission.log()
    found, captured = submission.captured()
    assert captured == {0: [4, 5], 3: [4, 5]}
    outcomes = {rank: (manifest["status"], manifest["job"]["id"]) for rank, manifest in found.items()}
    assert outcomes == {0: ("complete", job_id), 3: ("complete", job_id)}
    assert (slurm_cluster.state(job_id), slurm_cluster.job_ids()) == ("COMPLETED", [])


@pytest.mark.needs("nsys", "megatron", "nemo_run")
def test_a_job_that_is_cancelled_inside_the_window_keeps_what_it_captured(slurm_cluster, submit, nsys):
    window = ("--profiler", "nsys", "--export-sqlite", "--steps", "3:100000", "--time", "00:10:00", "train.train_iters=100000")
    submission = submit(*window, path=f"{nsys.parent}:{os.environ['PATH']}")
    reached = lambda: submission.process.poll() is not None or re.search(r"iteration +6/", submission.log())  # noqa: E731
    wait_until(reached, why=submission.log)
    slurm_cluster.run("scancel", "--account", ACCOUNT)
    job_id = submission.finish(1)
    assert slurm_cluster.state(job_id) == "CANCELLED"
    # Slurm reports that state before the ranks have written and gone.
    wait_until(lambda: not slurm_cluster.job_ids(), why=submission.log)
    found, captured = submission.captured()
    assert {rank: manifest["status"] for rank, manifest in found.items()} == {0: "partial", 3: "partial"}
    assert captured.keys() == {0, 3}
    for rank, manifest in found.items():
        iterations = manifest["captured"]["iterations"]
        assert iterations == list(range(3, 3 + len(iterations)))
        assert len(iterations) >= 3
        assert set(iterations) <= set(captured[rank]) <= {*iterations, iterations[-1] + 1}


def test_srun_starts_the_ranks_of_an_unchanged_script_on_two_nodes(slurm_cluster, tmp_path):
    # The nodes n1 and n2 are names of this machine that only Slurm knows.
    job = environment(**slurm_cluster.environment, GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    run = [sys.executable, "-m", "bridge_profiling.cli", "run", "--steps", "3:6", ROOT / "docs" / "examples" / "plain_loop.py"]
    ended = ended_well(["srun", "--nodes=2", "--ntasks=2", *run], cwd=tmp_path, env=job, timeout=400)
    found = manifests(tmp_path / "profiles")
    assert [(found[rank]["captured"]["iterations"], found[rank]["world_size"]) for rank in (0, 1)] == [([3, 4, 5], 2)] * 2
    assert found[0]["job"]["id"] == found[1]["job"]["id"] is not None
    assert [path.name for path in (tmp_path / "profiles" / "torch").iterdir()] == ["iter-3-6"]
    assert ended.stdout.count("step 15: loss") == 2
