"""`bridge-profiling doctor` against a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), pytest.mark.needs("slurm")]

DOCTOR = str(Path(sys.executable).with_name("bridge-profiling"))


@pytest.mark.parametrize(
    ("nodes", "verdict"),
    [
        ("2", "ok      shared by the nodes: 2 nodes (n1, n2) read a file written here, and this machine sees theirs"),
        ("3", "unknown shared by the nodes: the nodes could not be reached: `srun"),
    ],
)
def test_a_directory_that_both_nodes_see_is_ok_and_more_nodes_are_unknown(slurm_cluster, tmp_path, nodes, verdict):
    # What a user of the cluster exports.
    exported = {"SLURM_ACCOUNT": slurm_cluster.account, "SLURM_PARTITION": slurm_cluster.partition}
    environment = os.environ | slurm_cluster.environment | exported
    command = [DOCTOR, "doctor", "--nodes", nodes, "--output-dir", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    said = next(text for text in done.stdout.splitlines() if " shared by the nodes: " in text)
    assert said.startswith(verdict)
    assert list(tmp_path.iterdir()) == []
