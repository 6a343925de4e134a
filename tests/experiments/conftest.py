"""Experiments as NeMo-Run writes them."""

import pytest


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A NEMORUN_HOME with experiments that NeMo-Run wrote, and that were never submitted."""
    import nemo_run as run

    from bridge_profiling.plugins import PyTorchProfilerPlugin
    from tests.batch_scripts import written_experiment

    folder = tmp_path_factory.mktemp("submit")
    ssh = run.SSHTunnel(host="login", user="me", job_dir=str(folder / "far"), port=2222)
    bare = run.SlurmExecutor(account="team", packager=run.Packager(), tunnel=ssh)
    contained = run.SlurmExecutor(account="team", packager=run.Packager(), tunnel=ssh, container_image="image.sqsh")
    script = run.Script("train.py", entrypoint="python", args=[])
    chosen = run.Script("train.py", entrypoint="python", args=["profiling.output_dir=/scratch/mine"])
    far = {"bare": (script, bare), "contained": (script, contained), "chosen": (chosen, bare.clone())}
    for title, jobs in (("far", far), ("near", {"near": (script, run.LocalExecutor())})):
        with written_experiment(folder / "home", title) as experiment:
            for name, (task, executor) in jobs.items():
                plugin = PyTorchProfilerPlugin(profile_step_start=2, profile_step_end=4)
                experiment.add(task, executor=executor, name=name, plugins=[plugin])
            experiment.add(run.Script(inline="echo"), executor=run.LocalExecutor(), name="unprofiled")
    return folder / "home"
