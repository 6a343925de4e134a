"""The analysis on a real Ray cluster, started here: the same code, the same answers."""

import json
import os
import signal

import pytest

from bridge_profiling.analysis.workers import RayEngine
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.run import Run
from tests.system.jobs import cli
from tests.traces.conftest import captures

__all__ = ["captures"]

pytestmark = [pytest.mark.system, pytest.mark.needs("ray")]


def refuse_three(value: int) -> int:
    if value == 3:
        raise ValueError("three is not accepted")
    return value


def die_of_three(value: int) -> int:
    if value == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_answers_are_those_of_processes(ray_cluster, captures, tmp_path):
    with (
        Run(captures / "kineto" / "tp2_dp2", parquet=tmp_path / "processes") as here,
        Run(captures / "kineto" / "tp2_dp2", engine="ray", parquet=tmp_path / "ray") as there,
    ):
        assert there.to_json() == here.to_json()
        assert there.operators(shapes=True).equals(here.operators(shapes=True))
        assert there.errors == []


def test_the_command_finds_a_running_cluster_by_its_address(ray_cluster, captures, tmp_path):
    address = ray_cluster.get_runtime_context().gcs_address
    where = ["--engine", "ray", "--ray-address", address, "--parquet", tmp_path]
    done = cli("analyze", captures / "kineto" / "pp2_dp2", "--json", *where)
    assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [0, 1, 2, 3]


def test_a_task_that_fails_or_dies_says_so_and_costs_no_other(ray_cluster):
    for function, said in ((refuse_three, "three is not accepted"), (die_of_three, "died")):
        outcomes = {outcome.task: outcome for outcome in RayEngine().map(function, [1, 3, 5])}
        assert (outcomes[0].answer, outcomes[2].answer) == (1, 5)
        assert said in outcomes[1].error


def test_no_cluster_at_an_address_is_an_error_that_says_what_to_type():
    import ray

    ray.shutdown()
    with pytest.raises(ProfilingConfigError, match="ray start --head"):
        RayEngine("127.0.0.1:1")
