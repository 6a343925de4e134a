"""A recipe's own settings reach `bridge-profiling doctor`, which imports no recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("megatron", "nemo_run")

from bridge_profiling.doctor import read_experiment  # noqa: E402
from bridge_profiling.doctor.request import Request, apply_arguments  # noqa: E402
from bridge_profiling.doctor.trace_size import UNCERTAINTY, estimate  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

SUBMIT = """
import nemo_run as run
from bridge_profiling.plugins import PyTorchProfilerPlugin
from launch.request import TaskKind
from launch.submission import make_task

with run.Experiment("study") as experiment:
    for kind in TaskKind:
        task = make_task(kind, "gpt_125m", None, ["train.global_batch_size=8", "model.num_layers=6"], packaged=True)
        executor = run.LocalExecutor(ntasks_per_node=1, launcher="torchrun")
        plugin = PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6)
        experiment.add(task, executor=executor, name=kind.value, plugins=[plugin])
    experiment.dryrun(delete_exp_dir=False)
"""


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    environment = os.environ | {"NEMORUN_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SUBMIT], cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (directory,) = (home / "experiments" / "study").iterdir()
    return {request.name.rpartition("/")[2]: request for request in read_experiment(directory)}


@pytest.mark.system
@pytest.mark.parametrize("kind", ["script", "partial"])
def test_an_experiment_reports_the_settings_of_its_recipe(requests, kind):
    request, size = requests[kind], estimate(requests[kind])
    # The recipe's own, by default the section's own, and set over the recipe.
    batches = [request.integer(f"train.{name}") for name in ("train_iters", "micro_batch_size", "global_batch_size")]
    assert batches == [50, 2, 8]
    assert request.integer("model.num_layers") == 6
    assert (size.caveat, size.uncertainty) == ("", UNCERTAINTY)


@pytest.mark.system
def test_both_kinds_of_task_come_to_the_same(requests):
    assert estimate(requests["script"]) == estimate(requests["partial"])


def test_a_description_prints_the_settings_as_doctors_arguments(capsys):
    from launch import describe

    assert describe.main(["--recipe", "llama3_8b", "--settings", "train.global_batch_size=64"]) == 0
    request = Request()
    apply_arguments(request, capsys.readouterr().out.split())
    known = request.settings
    assert (known["model.num_layers"], known["model.tensor_model_parallel_size"]) == (32, 2)
    assert (known["model.position_embedding_type"], known["model.gated_linear_unit"]) == ("rope", True)
    assert (known["train.train_iters"], known["train.global_batch_size"]) == (50, 64)
    assert "model.num_moe_experts" not in known
