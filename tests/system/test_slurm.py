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

from tests.system.jobs import by_rank, end_tree, manifests, nvtx_iterations, trace_iterations, wait_until

pytestmark = [pytest.mark.system, pytest.mark.needs("slurm", "nemo_run", "megatron"), pytest.mark.timeout(600)]


@dataclass
class Submission:
    """A running `launch/experiment.py --executor slurm`."""

    process: subprocess.Popen
    home: Path
    output: Path

    @property
    def job_dir(self) -> Path:
        """The job's directory; there is one job."""
        (directory,) = self.home.glob("experiments/profile/profile_*/profile")
        return directory

    @property
    def job_id(self) -> str:
        """Slurm's id of the job, from NeMo-Run's own record."""
        return (self.home / ".slurm_jobs").read_text().partition("=")[0].strip()

    def log(self) -> str:
        """What the ranks have printed so far."""
        return "".join(path.read_text() for path in self.home.glob("experiments/*/*/profile/log-*.out"))

    def finish(self, code: int = 0) -> str:
        """Wait for the command to end with this exit code; the last that it printed."""
        assert self.process.wait(timeout=300) == code, self.printed()
        return self.printed()

    def printed(self) -> str:
        """The last of what the command printed, the job's log included."""
        return self.output.read_text()[-8000:]

    def iterations(self) -> dict[int, list[int]]:
        """The iterations in each rank's trace or report, by rank."""
        profiles = self.job_dir / "profiles"
        return by_rank(profiles.glob("torch/*/rank-*.gz"), trace_iterations) | by_rank(
            profiles.glob("nsys/*/rank-*.sqlite"), nvtx_iterations
        )

    def statuses(self) -> dict[int, str]:
        """The manifests' statuses, by rank."""
        return {rank: manifest["status"] for rank, manifest in manifests(self.job_dir / "profiles").items()}

    def await_iteration(self, number: int) -> None:
        """Wait until the training has got so far."""

        def reached() -> object:
            assert self.process.poll() is None, self.printed()
            return re.search(rf"iteration +{number}/", self.log())

        wait_until(reached, why=self.printed)


@pytest.fixture
def submit(slurm_cluster, committed_checkout, tmp_path):
    """Starts launch/experiment.py for gpt_tiny on two nodes of two ranks, TP=2 DP=2, ranks 0 and 3 under the profiler."""
    processes = []

    def start(*arguments: str, path: str = os.environ["PATH"]) -> Submission:
        command = [sys.executable, committed_checkout / "launch" / "experiment.py", "--executor", "slurm"]
        command += ["--account", slurm_cluster.account, "--partition", slurm_cluster.partition]
        command += ["--nodes", "2", "--nproc", "2", "--ranks", "0,3", *arguments]
        environment = os.environ | slurm_cluster.environment | {"NEMORUN_HOME": str(tmp_path / "home"), "PATH": path}
        # As the cluster's KillWait: torchrun's own patience is 30 s.
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "110"
        output = tmp_path / "output"
        with open(output, "w") as file:
            process = subprocess.Popen(
                [*command, "model.tensor_model_parallel_size=2"], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        processes.append(process)
        return Submission(process, tmp_path / "home", output)

    yield start
    for job_id in slurm_cluster.job_ids():  # a test that failed leaves one
        slurm_cluster.run("scancel", job_id)
    for process in processes:
        end_tree(process)


def test_exactly_the_ranks_asked_for_are_profiled_in_exactly_the_window(slurm_cluster, submit):
    submission = submit("--profiler", "torch", "--steps", "4:6", "train.train_iters=8")
    submission.finish()
    assert "4 cpu rank(s): tp=2 pp=1 dp=2" in submission.log()
    assert submission.iterations() == {0: [4, 5], 3: [4, 5]}
    assert submission.statuses() == {0: "complete", 3: "complete"}
    found = manifests(submission.job_dir / "profiles").values()
    assert {manifest["job"]["id"] for manifest in found} == {submission.job_id}


@pytest.mark.needs("ft")
def test_a_finished_job_under_fault_tolerance_is_not_queued_again(slurm_cluster, submit):
    submission = submit("--fault-tolerance", "--steps", "4:6", "train.train_iters=8")
    submission.finish()
    assert slurm_cluster.state(submission.job_id) == "COMPLETED"
    assert submission.iterations() == {0: [4, 5], 3: [4, 5]}
    assert not slurm_cluster.job_ids()


@pytest.mark.needs("nsys")
def test_a_job_that_is_cancelled_inside_the_window_keeps_what_it_captured(slurm_cluster, submit, nsys):
    window = ("--profiler", "nsys", "--export-sqlite", "--steps", "3:100000", "--time", "00:10:00", "train.train_iters=100000")
    submission = submit(*window, path=f"{nsys.parent}:{os.environ['PATH']}")
    submission.await_iteration(6)
    slurm_cluster.run("scancel", submission.job_id)
    submission.finish(1)
    assert slurm_cluster.state(submission.job_id) == "CANCELLED"
    # Slurm reports that state before the ranks have written and gone.
    wait_until(lambda: submission.job_id not in slurm_cluster.job_ids(), why=submission.printed)
    assert submission.statuses() == {0: "partial", 3: "partial"}
    found, captured = manifests(submission.job_dir / "profiles"), submission.iterations()
    assert captured.keys() == {0, 3}
    for rank, manifest in found.items():
        iterations = manifest["captured"]["iterations"]
        assert iterations == list(range(3, 3 + len(iterations)))
        assert len(iterations) >= 3
        assert set(iterations) <= set(captured[rank]) <= {*iterations, iterations[-1] + 1}
