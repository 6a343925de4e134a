"""A real Ray: workers of two profiled groups and one that is not, some of which end early; and the analysis on it."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge_profiling.facts.engines import RayEngine
from bridge_profiling.frameworks.ray import worker_runtime_env
from bridge_profiling.manifest import Manifest, find_captures
from bridge_profiling.run import Run
from tests.planted.cases import CASES
from tests.system.jobs import ROOT, cli, ended_well, wait_until

pytestmark = [pytest.mark.system, pytest.mark.needs("ray")]

EXAMPLE = ROOT / "docs" / "examples" / "ray_workers.py"


class Group:
    """The workers of one group, and the steps they are sent to."""

    def __init__(self, ray: Any, name: str, size: int) -> None:
        # Inside a function, so that Ray sends the class itself: a worker has no tests to import.
        class Worker:
            def __init__(self, rank: int) -> None:
                import torch

                from bridge_profiling.frameworks.ray import WorkerProfiling

                self.torch = torch
                self.profiling = WorkerProfiling(name, rank=rank, world_size=size)

            def train(self, step: int) -> int:
                with self.profiling.step(step), self.profiling.range("forward"):
                    self.torch.ones(8, 8) @ self.torch.ones(8, 8)
                return step

            def close(self) -> None:
                self.profiling.close()

        self._ray, self._actor, self._name = ray, ray.remote(num_cpus=0.1)(Worker), name
        self.workers = [self._started(rank) for rank in range(size)]

    def _started(self, rank: int) -> Any:
        environment = worker_runtime_env(self._name, rank=rank, runtime_env={"env_vars": {"GREETING": "hello"}})
        return self._actor.options(runtime_env=environment).remote(rank)

    def train(self, *steps: int) -> None:
        for step in steps:
            self._ray.get([worker.train.remote(step) for worker in self.workers])

    def close(self) -> None:
        self._ray.get([worker.close.remote() for worker in self.workers])


def ask(monkeypatch: pytest.MonkeyPatch, steps: str, folder: Path, profiler: str) -> None:
    monkeypatch.setenv("NRL_NSYS_PROFILE_STEP_RANGE", steps)
    monkeypatch.setenv("NRL_NSYS_WORKER_PATTERNS", "*policy*,*vllm*")
    monkeypatch.setenv("BRIDGE_PROFILING_RAY_PROFILER", profiler)
    monkeypatch.setenv("BRIDGE_PROFILING_DIR", str(folder))


def manifests(folder: Path) -> dict[int, Manifest]:
    return {capture.rank: capture.manifest for capture in find_captures(folder)}


def iterations(folder: Path) -> dict[int, list[int]]:
    """What the analysis reads in the captures of one group, by rank."""
    with Run(folder) as run:
        answers = json.loads(run.to_json())["ranks"]
    return {rank["rank"]: [one["iteration"] for one in rank["iterations"]] for rank in answers}


def test_torch_traces_of_two_groups_hold_exactly_their_steps(ray_cluster, tmp_path, monkeypatch):
    """The example's policy: complete. vLLM: resumed at 3, and closed after it."""
    ask(monkeypatch, "2:5", tmp_path, "torch")
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.get_runtime_context().gcs_address)
    ended_well([sys.executable, EXAMPLE])
    for name, steps in (("vllm_generation", (3,)), ("reward", (1, 2, 3))):
        group = Group(ray_cluster, name, 1)
        group.train(*steps)
        group.close()

    assert iterations(tmp_path / "policy_worker") == {0: [2, 3, 4], 1: [2, 3, 4]}
    assert iterations(tmp_path / "vllm_generation") == {0: [3]}
    found = manifests(tmp_path / "policy_worker")
    assert [found[0].status, found[1].status] == ["complete", "complete"]
    framework = {"name": "ray", "worker": "policy_worker", "version": ray_cluster.__version__}
    assert framework.items() <= (found[1].framework or {}).items()
    assert manifests(tmp_path / "vllm_generation")[0].status == "partial"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy_worker", "vllm_generation"], "reward was not selected"
    assert {path.name for path in (tmp_path / "policy_worker" / "torch").iterdir()} == {"iter-2-5"}, "ranks share a folder"
    assert len(EXAMPLE.read_text().splitlines()) <= 30


@pytest.mark.needs("nsys")
def test_reports_of_nsys_are_named_by_worker_and_rank_and_hold_exactly_the_steps(ray_cluster, nsys, tmp_path, monkeypatch):
    """Policy runs through the window; a vLLM worker is killed inside it, which leaves no time but to nsys."""
    ask(monkeypatch, "2:4", tmp_path, "nsys")
    policy = Group(ray_cluster, "policy", 2)
    policy.train(1, 2, 3, 4)
    policy.close()
    vllm = Group(ray_cluster, "vllm_generation", 1)
    vllm.train(1, 2)
    ray_cluster.kill(vllm.workers[0])
    reports = tmp_path / "nsight"
    wait_until(lambda: list(reports.glob("vllm_generation_rank-0_2-4_*.nsys-rep")))

    pids = {rank: manifest.pid for rank, manifest in manifests(tmp_path / "policy").items()}
    expected = {f"policy_rank-{rank}_2-4_{pid}.nsys-rep" for rank, pid in pids.items()}
    assert {path.name for path in reports.glob("policy*.nsys-rep")} == expected
    assert iterations(tmp_path / "policy") == {0: [2, 3], 1: [2, 3]}
    assert {manifest.status for manifest in manifests(tmp_path / "policy").values()} == {"complete"}
    assert manifests(tmp_path / "vllm_generation")[0].status == "failed", "nobody could write what came after"


# -- the analysis on a Ray cluster: the same code, the same answers ---------------------------------------------------


def raise_or_die(value: int) -> int:
    if value == 3:
        raise ValueError("three is not accepted")
    if value == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_a_task_that_fails_or_dies_says_so_and_costs_no_other(ray_cluster):
    outcomes = {outcome.task: outcome for outcome in RayEngine().map(raise_or_die, [1, 3, 4, 5])}
    assert (outcomes[0].answer, outcomes[3].answer) == (1, 5)
    assert "three is not accepted" in outcomes[1].error
    assert "died" in outcomes[2].error


def test_answers_are_those_of_processes(ray_cluster, tmp_path):
    """The command finds the running cluster by its address."""
    folder, address = CASES["slow_link_4"].folder, ray_cluster.get_runtime_context().gcs_address
    where = (["--engine", "ray", "--ray-address", address, "--parquet", tmp_path / "ray"], ["--parquet", tmp_path / "here"])
    there, here = (cli("analyze", folder, "--json", *options).stdout for options in where)
    assert json.loads(there) == json.loads(here)
    assert [rank["rank"] for rank in json.loads(there)["ranks"]] == [0, 1, 2, 3]
