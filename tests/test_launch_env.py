"""Rank, world size, node and rendezvous, as each launcher leaves them in the environment."""

from types import SimpleNamespace

import pytest

from bridge_profiling.common import launch_env
from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.common.launch_env import LAUNCH_VARIABLE, LaunchEnv, export_for_torch, first_host

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "gpu[07-08]"}
STEP |= {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "1234"}
TORCHRUN |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ("none", 0, 1, None)),
        (TORCHRUN, ("torchrun", 3, 8, 1)),
        (STEP, ("slurm", 9, 16, 1)),
        (STEP | TORCHRUN, ("torchrun", 3, 8, 1)),
        (OPEN_MPI, ("mpi", 5, 16, 5)),
        (HYDRA, ("mpi", 2, 4, 0)),
        # mpirun in a Slurm job: srun has started one daemon a node, and its variables are the daemon's.
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"} | OPEN_MPI, ("mpi", 5, 16, 5)),
        # srun --mpi=pmi2 sets both.
        (STEP | {"PMI_RANK": "9", "PMI_SIZE": "16"}, ("slurm", 9, 16, 1)),
        # A batch script has the job's number of tasks, and is a single process; so is a shell that srun opened.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ("none", 0, 1, None)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("none", 0, 1, None)),
        (TORCHRUN | {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "17"}, ("ray", 3, 8, 1)),
        ({"RANK": "x", "WORLD_SIZE": "8"}, ("none", 0, 1, None)),
        # An unknown local rank is not derived from the rank.
        ({"RANK": "9", "WORLD_SIZE": "16"}, ("torchrun", 9, 16, None)),
    ],
)
def test_each_launcher_names_a_place(environ, place):
    env = LaunchEnv.read(environ)
    assert (env.launcher, env.rank, env.world_size, env.local_rank) == place
    assert env.device_index == (place[3] or 0)


@pytest.mark.parametrize(("environ", "place"), [({}, (2, 4)), (TORCHRUN, (3, 8))])
def test_without_a_launcher_the_place_is_that_in_the_process_group(environ, place, monkeypatch):
    group = SimpleNamespace(get_rank=lambda: 2, get_world_size=lambda: 4)
    for joined, expected in ((group, place), (None, place if environ else (0, 1))):
        monkeypatch.setattr(launch_env, "initialized_distributed", lambda joined=joined: joined)
        env = LaunchEnv.current(environ)
        assert (env.rank, env.world_size) == expected


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (TORCHRUN, (1, 2, "run", ("gpu01", 1234), None)),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, (1, 2, "run", ("gpu01", 1234), ("gpu01", 1234))),
        (STEP | {"SLURM_RESTART_COUNT": "3"}, (1, 3, "4711", ("gpu07", 24711), None)),
        ({"RANK": "9", "WORLD_SIZE": "16"}, (None, None, None, None, None)),
    ],
)
def test_node_restarts_job_rendezvous_and_agent_store(environ, found):
    env = LaunchEnv.read(environ)
    assert (env.node_rank, env.restarts, env.job_id, env.rendezvous, env.agent_store) == found


def test_two_launches_differ_and_the_ranks_of_one_agree():
    assert LaunchEnv.read(STEP).launch_id == LaunchEnv.read(STEP | {"SLURM_PROCID": "3"}).launch_id
    assert LaunchEnv.read(STEP).launch_is_named
    for changed in ({"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}):
        assert LaunchEnv.read(STEP).launch_id != LaunchEnv.read(STEP | changed).launch_id
    assert LaunchEnv.read(TORCHRUN).launch_id != LaunchEnv.read(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}).launch_id
    assert not LaunchEnv.read(TORCHRUN).launch_is_named
    given = {LAUNCH_VARIABLE: "mine"}
    # Workers of one driver may be on several ports, and of several steps that started the Ray of their machines.
    workers = given | STEP, given | STEP | {"SLURM_STEP_ID": "1", "MASTER_PORT": "2"}
    assert len({LaunchEnv.read(worker).launch_id for worker in workers}) == 1
    assert LaunchEnv.read(workers[0] | {"SLURM_RESTART_COUNT": "1"}).launch_id != LaunchEnv.read(workers[0]).launch_id
    assert LaunchEnv.read(given).launch_is_named


@pytest.mark.parametrize("environ", [STEP, OPEN_MPI, HYDRA])
def test_torch_finds_the_ranks_of_srun_and_mpirun(environ):
    exported = dict(environ)
    export_for_torch(exported)
    before, after = LaunchEnv.read(environ), LaunchEnv.read(exported)
    assert (after.rank, after.world_size, after.local_rank) == (before.rank, before.world_size, before.local_rank)
    assert after.rendezvous == (before.rendezvous or ("localhost", 29500))


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        (STEP | {"MASTER_ADDR": "here", "MASTER_PORT": "1"}, {"RANK", "WORLD_SIZE", "LOCAL_RANK"}),
        (STEP | TORCHRUN, set()),
        ({}, set()),
    ],
)
def test_variables_that_are_set_stay(environ, added):
    exported = dict(environ)
    export_for_torch(exported)
    assert exported.keys() - environ.keys() == added
    assert exported | environ == exported


@pytest.mark.parametrize("environ", [{"RANK": "0"}, {"RANK": "8", "WORLD_SIZE": "8"}, {"RANK": "", "WORLD_SIZE": "8"}])
def test_half_a_place_is_refused(environ):
    with pytest.raises(ProfilingConfigError, match="WORLD_SIZE"):
        LaunchEnv.check(environ)


@pytest.mark.parametrize(("nodes", "first"), [("gpu[07-09,12],cpu1", "gpu07"), ("a1,a2", "a1"), ("gpu[1,3]-ib", "gpu1-ib")])
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first
