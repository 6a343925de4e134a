"""The batch scripts that reach Slurm, whole: golden_sbatch/ holds one for each pair of layout, launcher and profiler."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import nemo_run as run
import pytest

from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin
from bridge_profiling.plugins.task import STARTS_NSYS_KEY
from recipes import executors
from tests.batch_scripts import batch_script, check_golden, comparable

# NeMo-Run starts a shell for each experiment.
pytestmark = pytest.mark.integration

GOLDEN = Path(__file__).with_name("golden_sbatch")
WINDOW = {"profile_step_start": 10, "profile_step_end": 12, "profile_ranks": [0, 3]}
OPTIONS = {"nsys_trace": ["nvtx", "osrt"], "nsys_extra_args": ["--env-var=A=1,B=2"]}
OPTIONS |= {"nsys_gpu_metrics": True, "export_sqlite": True}
OURS, THEIRS = "launch/pretrain.py", "train.py"

LAYOUTS = {
    "bare": {},
    "container": {"container_image": "image.sqsh", "mounts": ["/data:/data:ro", "/home/me/nemo_run/data:/more"]},
}
LAUNCHERS = {"none": (None, []), "torchrun": ("torchrun", []), "ft": ("torchrun", [FaultTolerancePlugin()])}
PROFILERS = {
    "unprofiled": (OURS, []),
    "torch": (OURS, [PyTorchProfilerPlugin(**WINDOW)]),
    "nsys": (OURS, [NsysPlugin(**WINDOW, **OPTIONS)]),
    "nsys_on_another_script": (THEIRS, [NsysPlugin(**WINDOW)]),
}
#: Every launcher with every profiler, in one layout after the other.
CASES = [
    (list(LAYOUTS)[(row + column) % 2], launcher, profiler)
    for row, launcher in enumerate(LAUNCHERS)
    for column, profiler in enumerate(PROFILERS)
]


@pytest.fixture
def check(tmp_path):
    """Compares the script that NeMo-Run would submit to the golden one."""

    def compare(name: str, executor: run.SlurmExecutor, path: str = OURS, plugins: Sequence[run.Plugin] = ()) -> None:
        metadata = {STARTS_NSYS_KEY: True} if path == OURS else {}
        task = run.Script(path=path, entrypoint="python", args=["train.train_iters=20"], metadata=metadata)
        check_golden(GOLDEN / f"{name}.sh", comparable(batch_script(tmp_path, executor, task, plugins), tmp_path))

    return compare


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_batch_script_is_the_golden_one(check, case):
    layout, launcher, profiler = case
    launcher_name, first = LAUNCHERS[launcher]
    path, plugins = PROFILERS[profiler]
    options = {"nodes": 2, "gpus_per_node": 2, "time": "01:00:00", "launcher": launcher_name}
    check("-".join(case), executors.slurm("team", "batch", **options, **LAYOUTS[layout]), path, [*first, *plugins])


def test_through_ssh_every_path_is_one_of_the_cluster(check):
    tunnel = run.SSHTunnel(host="login", user="me", job_dir="/scratch/me/jobs")
    executor = executors.slurm("team", tunnel=tunnel, venv="/shared/venv")
    check("ssh", executor)


def test_every_golden_script_is_one_of_a_case_and_bash_reads_it():
    assert {path.stem for path in GOLDEN.iterdir()} == {"-".join(case) for case in CASES} | {"ssh"}
    for path in GOLDEN.iterdir():
        subprocess.run(["bash", "-n", path], check=True)
