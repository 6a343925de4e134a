"""`bridge-profiling run` of an unchanged script, and `doctor`, on a real Slurm; and `run` under a real nsys."""

import os
import sys

import pytest

from tests.frameworks.scripts import bridge_profiling
from tests.system.jobs import ROOT, ended_well, environment, manifests, nvtx_ranges

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PLAIN_LOOP = ROOT / "docs" / "examples" / "plain_loop.py"
RUN = [sys.executable, "-m", "bridge_profiling.cli", "run", "--steps", "3:6"]


@pytest.mark.needs("slurm")
def test_srun_starts_the_ranks_of_two_nodes(slurm_cluster, tmp_path):
    # Its nodes n1 and n2 are names of this machine that only Slurm knows.
    address = {"MASTER_ADDR": "127.0.0.1"}
    job = environment(**slurm_cluster.environment, GLOO_SOCKET_IFNAME="lo", **address)
    ended = ended_well(["srun", "--nodes=2", "--ntasks=2", *RUN, PLAIN_LOOP], cwd=tmp_path, env=job, timeout=400)
    found = manifests(tmp_path / "profiles")
    assert [(found[rank]["captured"]["iterations"], found[rank]["world_size"]) for rank in (0, 1)] == [([3, 4, 5], 2)] * 2
    assert found[0]["job"]["id"] == found[1]["job"]["id"] is not None
    assert [path.name for path in (tmp_path / "profiles" / "torch").iterdir()] == ["iter-3-6"]
    assert ended.stdout.count("step 15: loss") == 2


@pytest.mark.needs("nsys")
def test_the_rank_asked_for_runs_under_nsys_and_its_report_holds_the_phases(nsys, tmp_path):
    options = ("--nproc", "2", "--profiler", "nsys", "--ranks", "1", "--steps", "3:6")
    variables = {"PATH": f"{nsys.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = bridge_profiling(tmp_path, "run", *options, str(PLAIN_LOOP), **variables)
    assert ended.returncode == 0, ended.stderr
    written = manifests(tmp_path / "profiles")[1]
    assert (written["status"], written["captured"]["iterations"]) == ("complete", [3, 4, 5]), ended.stderr
    (report,) = (tmp_path / "profiles" / "nsys" / "iter-3-6").glob("*.nsys-rep")
    assert report.name == "rank-1.nsys-rep"
    ended_well([nsys, "export", "--type=sqlite", f"--output={tmp_path}/rank-1.sqlite", report])
    names = nvtx_ranges(tmp_path / "rank-1.sqlite")
    assert [name for name in names if name.startswith("iteration_")] == ["iteration_3", "iteration_4", "iteration_5"]
    assert [names.count(name) for name in ("data-loading", "forward", "backward", "optimizer")] == [3, 3, 3, 3]
    assert f"bridge-profiling report {tmp_path}/profiles" in ended.stderr
