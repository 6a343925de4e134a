"""NeMo RL's variables through NeMo-Run: what its SlurmRay launcher starts sees them as they were asked for.

The batch script runs here, by bash, with stand-ins for Slurm's and Ray's commands.
"""

import subprocess

import nemo_run as run
import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.plugins import RayWorkersPlugin
from bridge_profiling.settings.ray import RayRequest
from tests.batch_scripts import batch_script

#: Commas, stars, quotes, spaces, and a path that NeMo-Run takes for the job's directory.
VARIABLES = {
    "NRL_NSYS_PROFILE_STEP_RANGE": "2:3",
    "NRL_NSYS_WORKER_PATTERNS": "*policy*,*vllm*",
    "BRIDGE_PROFILING_RAY_PROFILER": "nsys",
    "NRL_NSYS_EXTRA_OPTIONS": '{"gpu-metrics-device": "all", "o": "/home/me/nemo_run/reports/%p"}',
}
ASKED = {"profile_step_start": 2, "profile_step_end": 3, "worker_patterns": "*policy*,*vllm*"}
ASKED["nsys_extra_options"] = {"gpu-metrics-device": "all", "o": "/home/me/nemo_run/reports/%p"}
HEAD = "export HEAD_NODE_ADDR=$head_node_ip"

#: Slurm's srun and Ray's launcher, as far as the scripts need them; a job's program writes down its environment.
STAND_INS = {
    "scontrol": "echo localhost",
    "srun": 'if [ "${@: -1}" = --ip-address ]; then echo 127.0.0.1; else exec bash "${@: -1}"; fi',
    "hostname": "echo 127.0.0.1",
    "ray": 'if [ "$1" = status ]; then echo "Active:"; echo " 1 node_a"; echo "Pending:"; fi',
    "sleep": "true",
    "python": 'env -0 > "$SEEN"',
}


def slurm(**options) -> run.SlurmExecutor:
    settings = {"account": "team", "tunnel": run.LocalTunnel(job_dir=""), "setup_lines": HEAD, "launcher": run.SlurmRay()}
    return run.SlurmExecutor(**settings | options)


@pytest.mark.integration
def test_a_program_that_slurm_ray_starts_sees_what_was_asked_for(tmp_path):
    task = run.Script(path="train.py", entrypoint="python", args=["grpo.max_num_steps=5"])
    script = batch_script(tmp_path / "home", slurm(), task, [RayWorkersPlugin(**ASKED)])
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_NNODES": "1", "SEEN": str(tmp_path / "seen")}
    done = subprocess.run(["bash", script], env=variables, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (tmp_path / "seen").exists(), done.stdout + done.stderr
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().split("\0") if line)
    assert {name: seen.get(name) for name in VARIABLES} == VARIABLES
    assert seen["BRIDGE_PROFILING_DIR"] == f"{script.parent}/train/profiles"
    request = RayRequest.from_environment(seen)
    assert request is not None
    assert request.selects("vllm_generation_worker")


@pytest.mark.parametrize(("changed", "said"), [
    ({"profile_step_start": 0}, "profile_step_start=0 .*counted from 1"),
    ({"nsys_extra_options": {"o": "a b"}}, "nsys_extra_options.*shell"),
])  # fmt: skip
def test_a_request_that_cannot_work_changes_nothing(changed, said):
    executor = slurm()
    with pytest.raises(ProfilingConfigError, match=said):
        RayWorkersPlugin(**ASKED | changed).setup(run.Script(path="train.py"), executor)
    assert (executor.setup_lines, executor.env_vars) == (HEAD, {})


@pytest.mark.parametrize("place", ["executor", "launcher"])
def test_variables_set_twice_are_refused(place):
    theirs = {"NRL_NSYS_WORKER_PATTERNS": "*reward*"}
    executor = slurm(env_vars=theirs) if place == "executor" else slurm(launcher=run.SlurmRay(env_vars=theirs))
    with pytest.raises(ProfilingConfigError, match="both set NRL_NSYS_WORKER_PATTERNS"):
        RayWorkersPlugin(**ASKED).setup(run.Script(path="train.py"), executor)


def test_a_local_job_gets_them_in_its_environment():
    executor = run.LocalExecutor(env_vars={"A": "1"})
    RayWorkersPlugin(**ASKED | {"profiler": "torch"}).setup(run.Script(path="train.py"), executor)
    assert executor.env_vars == {"A": "1", **VARIABLES, "BRIDGE_PROFILING_RAY_PROFILER": "torch"}
