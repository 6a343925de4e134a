"""Where each executor's job writes its profiles, and what NeMo-Run would start there: golden roles, compared whole.

They are chosen pairwise: each value of kind, launcher and profiler meets each value of the other two.

No cluster and no network: NeMo-Run packages a task from what it knows.
"""

import copy
import getpass
import importlib
import json
import re
from pathlib import Path

import nemo_run as run
import pytest

from bridge_profiling.errors import ProfilingConfigError
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
#: Of two neighbours, one has nsys with torchrun and the other torch.
CASES = [
    (kind, launcher, profiler)
    for place, kind in enumerate(KINDS)
    for launcher, profiler in zip(LAUNCHERS, sorted(PLUGINS, reverse=place % 2 == 0), strict=True)
]


@pytest.mark.parametrize(("kind", "launcher", "profiler"), CASES)
def test_what_nemo_run_starts_is_what_the_golden_file_says(kind, launcher, profiler, executors, tmp_path):
    executor = assigned(executors[kind](launcher=LAUNCHERS[launcher]))
    script = run.Script(path="train.py", entrypoint="python", args=["--recipe", "mine"])
    PLUGINS[profiler].setup(script, executor)
    role = package(script, executor).roles[0]
    content = {"env": executor.env_vars | role.env, "entrypoint": role.entrypoint, "args": role.args}
    text = json.dumps(content, indent=1).replace(f"/{getpass.getuser()}/exp_1", "/<user>/exp_1") + "\n"
    assert str(tmp_path) not in text, "a directory of the client"
    text = re.sub(r'("--rdzv-id",\s*)"\d+"', r'\1"<random>"', text)
    check_golden(GOLDEN / f"{kind}-{launcher}-{profiler}.json", text)


@pytest.mark.parametrize(
    ("profiler", "make", "message"),
    [
        ("torch", "skypilot_down", "Pass storage_mounts with a bucket.*BRIDGE_PROFILING_DIR"),
        ("torch", "kubeflow", 'workdir_pvc="CLAIM".*pull_results'),
        # Reports in a place of the user's own, without a shell to make it.
        ("nsys", "kubeflow_elsewhere", "workdir_pvc"),
        ("torch", "kuberay", "KubeRayExecutor starts a Ray cluster"),
    ],
)
def test_an_executor_that_loses_the_profiles_is_refused(profiler, make, message, task, skypilot, kubeflow):
    kuberay = importlib.import_module("nemo_run.core.execution.kuberay")
    executor = {
        "skypilot_down": lambda: assigned(skypilot(autodown=True)),
        "kubeflow": lambda: assigned(kubeflow()),
        "kubeflow_elsewhere": lambda: assigned(kubeflow(env_vars={"BRIDGE_PROFILING_DIR": "/data/profiles"})),
        "kuberay": lambda: kuberay.KubeRayExecutor(namespace="team", image="image"),
    }[make]()
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


def test_nsys_reports_follow_the_users_own_place(script, executors):
    executor = assigned(executors["docker"](env_vars={"BRIDGE_PROFILING_DIR": "/data/profiles"}))
    PLUGINS["nsys"].setup(script, executor)
    role = package(script, executor).roles[0]
    assert role.entrypoint == "mkdir -p /data/profiles/nsys_profile && nsys"
    assert role.args[role.args.index("-o") + 1] == "/data/profiles/nsys_profile/profile_%h_%p"
