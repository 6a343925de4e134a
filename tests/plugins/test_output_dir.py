"""Where each executor's job writes its profiles, and what NeMo-Run would start there: golden roles, compared whole.

No cluster and no network: NeMo-Run packages a task from what it knows.
"""

import copy
import getpass
import importlib
import itertools
import json
import re
from pathlib import Path

import nemo_run as run
import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin
from tests.batch_scripts import check_golden
from tests.plugins.conftest import KINDS, assigned, package

pytestmark = pytest.mark.usefixtures("nemorun_home")

GOLDEN = Path(__file__).parent / "golden_roles"
PLUGINS = {
    "nsys": NsysPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 3]),
    "torch": PyTorchProfilerPlugin(profile_step_start=4, profile_step_end=6, profile_ranks=[0, 3]),
}
LAUNCHERS = {"no-launcher": None, "torchrun": "torchrun"}


@pytest.mark.parametrize(("kind", "launcher"), zip(KINDS, itertools.cycle(LAUNCHERS), strict=False))
def test_what_nemo_run_starts_is_what_the_golden_file_says(kind, launcher, executors, tmp_path):
    executor = assigned(executors[kind](launcher=LAUNCHERS[launcher]))
    script = run.Script(path="train.py", entrypoint="python", args=["--recipe", "mine"])
    PLUGINS["torch"].setup(script, executor)
    role = package(script, executor).roles[0]
    content = {"env": executor.env_vars | role.env, "entrypoint": role.entrypoint, "args": role.args}
    text = json.dumps(content, indent=1).replace(f"/{getpass.getuser()}/exp_1", "/<user>/exp_1") + "\n"
    assert str(tmp_path) not in text, "a directory of the client"
    text = re.sub(r'("--rdzv-id",\s*)"\d+"', r'\1"<random>"', text)
    check_golden(GOLDEN / f"{kind}-{launcher}.json", text)


def kuberay():
    return importlib.import_module("nemo_run.core.execution.kuberay").KubeRayExecutor(namespace="team", image="image")


@pytest.mark.parametrize(
    ("profiler", "kind", "message"),
    [
        ("torch", "skypilot that goes down", "Pass storage_mounts with a bucket.*BRIDGE_PROFILING_DIR"),
        ("torch", "kubeflow without a volume", 'workdir_pvc="CLAIM".*pull_results'),
        ("torch", "kuberay", "KubeRayExecutor starts a Ray cluster"),
        *(("nsys", kind, "NsysPlugin does not work on .*Executor; .*Pass PyTorchProfilerPlugin") for kind in KINDS),
    ],
)
def test_an_executor_that_loses_the_profiles_is_refused(profiler, kind, message, task, executors, skypilot, kubeflow):
    more = {"skypilot that goes down": lambda: skypilot(autodown=True), "kubeflow without a volume": kubeflow}
    executor = kuberay() if kind == "kuberay" else assigned((executors | more)[kind]())
    before = copy.deepcopy((task, executor.env_vars, executor.launcher))
    with pytest.raises(ProfilingConfigError, match=message):
        PLUGINS[profiler].setup(task, executor)
    assert (task, executor.env_vars, executor.launcher) == before


@pytest.mark.parametrize(
    ("variables", "overrides"),
    [({"BRIDGE_PROFILING_DIR": "/data/profiles"}, []), ({}, ["profiling.output_dir=/data/profiles"])],
)
def test_a_place_of_the_users_own_is_believed(variables, overrides, script, kubeflow):
    executor = assigned(kubeflow(env_vars=dict(variables)))
    script.args = overrides
    PLUGINS["torch"].setup(script, executor)
    assert executor.env_vars == variables
