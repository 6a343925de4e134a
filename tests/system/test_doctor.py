"""`bridge-profiling doctor` against a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

DOCTOR = str(Path(sys.executable).with_name("bridge-profiling"))


def doctor(*arguments: str, around: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*around, DOCTOR, "doctor", *arguments]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=300)


def line(done: subprocess.CompletedProcess[str], check: str) -> str:
    return next(text for text in done.stdout.splitlines() if f" {check}: " in text)


@pytest.fixture
def cluster(slurm_cluster):
    """What a user of the cluster exports."""
    return slurm_cluster.environment | {
        "SLURM_ACCOUNT": slurm_cluster.account,
        "SLURM_PARTITION": slurm_cluster.partition,
    }


@pytest.mark.needs("slurm")
@pytest.mark.parametrize(
    ("nodes", "verdict"),
    [
        ("2", "ok      shared by the nodes: 2 nodes (n1, n2) read a file written here, and this machine sees theirs"),
        ("3", "unknown shared by the nodes: the nodes could not be reached: `srun"),
    ],
)
def test_a_directory_that_both_nodes_see_is_ok_and_more_nodes_are_unknown(cluster, tmp_path, nodes, verdict):
    done = doctor("--nodes", nodes, "--output-dir", str(tmp_path), **cluster)
    assert line(done, "shared by the nodes").startswith(verdict)
    assert list(tmp_path.iterdir()) == []
