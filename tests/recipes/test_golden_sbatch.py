"""The batch scripts that reach Slurm, whole: golden_sbatch/ holds one for each layout, launcher and profiler.

UPDATE_GOLDEN=1 writes them anew; what changed is then for `git diff` and a reader.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nemo_run as run
import pytest

from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin
from bridge_profiling.plugins.task import STARTS_NSYS_KEY
from recipes import executors

GOLDEN = Path(__file__).with_name("golden_sbatch")
WINDOW = {"profile_step_start": 10, "profile_step_end": 12, "profile_ranks": [0, 3]}

LAYOUTS = {
    "bare": {},
    "container": {"container_image": "image.sqsh", "mounts": ["/data:/data:ro", "/home/me/nemo_run/data:/more"]},
}
LAUNCHERS: dict[str, tuple[str | None, list[run.Plugin]]] = {
    "none": (None, []),
    "torchrun": ("torchrun", []),
    "ft": ("torchrun", [FaultTolerancePlugin()]),
}
OURS, THEIRS = "launch/pretrain.py", "train.py"
PROFILERS: dict[str, tuple[str, list[run.Plugin]]] = {
    "unprofiled": (OURS, []),
    "torch": (OURS, [PyTorchProfilerPlugin(**WINDOW)]),
    "nsys": (OURS, [NsysPlugin(**WINDOW)]),
    "nsys_on_another_script": (THEIRS, [NsysPlugin(**WINDOW)]),
}
CASES = list(itertools.product(LAYOUTS, LAUNCHERS, PROFILERS))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What NeMo-Run packages for each job: a small one, for no script says what is in it."""
    root = tmp_path_factory.mktemp("repository")
    (root / "train.py").touch()
    author = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for command in (["init", "--quiet"], ["add", "train.py"], [*author, "commit", "--quiet", "--message=a training"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


@pytest.fixture
def batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Callable[..., str]:
    """The script that NeMo-Run would submit, with what differs from machine to machine and from time to time replaced."""
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())  # what NeMo-Run starts reads from it
    monkeypatch.chdir(repository)

    def make(executor: run.SlurmExecutor, path: str = OURS, plugins: list[run.Plugin] | None = None) -> str:
        metadata = {STARTS_NSYS_KEY: True} if path == OURS else {}
        task = run.Script(path=path, entrypoint="python", args=["train.train_iters=20"], metadata=metadata)
        with run.Experiment("golden") as experiment:
            experiment.add(task, executor=executor, name="train", plugins=plugins or [])
            experiment.dryrun(log=False, delete_exp_dir=False)
        (written,) = tmp_path.rglob("*_sbatch.sh")
        text = written.read_text().replace(str(tmp_path), "/HOME").replace(sys.prefix, "/VENV")
        text = re.sub(r"golden_\d+", "golden_TIME", text)
        return re.sub(r"--rdzv-id \d+", "--rdzv-id RANDOM", text)

    return make


@pytest.mark.parametrize(("layout", "launcher", "profiler"), CASES, ids=["-".join(case) for case in CASES])
def test_the_batch_script_is_the_golden_one(batch_script, layout, launcher, profiler):
    launcher_name, first = LAUNCHERS[launcher]
    path, plugins = PROFILERS[profiler]
    executor = executors.slurm(
        "team", "batch", nodes=2, gpus_per_node=2, time="01:00:00", launcher=launcher_name, **LAYOUTS[layout]
    )
    _compare(batch_script(executor, path, [*first, *plugins]), f"{layout}-{launcher}-{profiler}")


def test_values_of_the_environment_are_quoted_in_the_golden_script(batch_script):
    variables = {
        "PLAIN": "1,2",
        "SENTENCE": "it's two words",
        "JSON": '{"a": ["$b", 1]}',
        "ELSEWHERE": "/home/me/nemo_run/data",
        "IN_THE_JOB": "/nemo_run/code",
        "http_proxy": "proxy:3128",
    }
    _compare(batch_script(executors.slurm("team", env=variables, setup_lines="module load cuda")), "environment")


def test_through_ssh_every_path_is_one_of_the_cluster(batch_script):
    executor = executors.slurm("team", host="login", user="me", job_dir="/scratch/me/jobs", venv="/shared/venv")
    text = batch_script(executor)
    assert "/HOME" not in text
    assert "/VENV" not in text
    _compare(text, "ssh")


def test_every_golden_script_is_one_of_a_case():
    names = {f"{'-'.join(case)}.sh" for case in CASES} | {"environment.sh", "ssh.sh"}
    assert {path.name for path in GOLDEN.iterdir()} == names


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sh")), ids=lambda path: path.stem)
def test_bash_reads_every_golden_script(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _compare(text: str, name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"
