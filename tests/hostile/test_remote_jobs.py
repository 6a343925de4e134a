"""Values for a job on another machine arrive there as one argument each, or are refused before anything changes."""

import importlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import nemo_run as run
import pytest

from bridge_profiling.config import OUTPUT_DIR_VARIABLE
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.overrides import apply_overrides
from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PreemptionPlugin, PyTorchProfilerPlugin, RayWorkersPlugin
from bridge_profiling.plugins.task import STARTS_NSYS_KEY
from bridge_profiling.ray_request import RayRequest
from tests.plugins.conftest import Container, pretrain
from tests.plugins.remote import KINDS, assigned, executors, kubeflow, nemorun_home, package, skypilot

__all__ = ["executors", "kubeflow", "nemorun_home", "skypilot"]

WINDOW = {"profile_step_start": 4, "profile_step_end": 6}

#: Values of every argument. A shell runs, splits, joins or expands most of them; `no` is no boolean.
VALUES = ["a b", "$(touch ran)", "`touch ran`", "'a b'", 'a"b', "a\\b", "a;touch ran", "*", "{a,b}", "~", "#a", "a!b", "no",
          "ü", "$HOME", "a\nb", "x,y", "[0]", "%q{HOME}", "010", "cuda", "all", "/a/b-c_d.pickle", 0, 2, True, None, ["0"],
          [0, 3]]  # fmt: skip

#: A plugin whose argument of that name has a value.
ARGUMENTS = {
    "nsys_extra_args": lambda value: NsysPlugin(**WINDOW, nsys_extra_args=[f"--env-var=A={value}"]),
    "nsys_trace": lambda value: NsysPlugin(**WINDOW, nsys_trace=[value]),
    "nsys_gpu_metrics": lambda value: NsysPlugin(**WINDOW, nsys_gpu_metrics=value),
    "profile_ranks": lambda value: NsysPlugin(**WINDOW, profile_ranks=value),
    "memory_snapshot_path": lambda value: PyTorchProfilerPlugin(**WINDOW, memory_snapshot_path=value),
    "record_memory_history": lambda value: PyTorchProfilerPlugin(**WINDOW, record_memory_history=value),
    "calc_ft_timeouts": lambda value: FaultTolerancePlugin(calc_ft_timeouts=value),
    "exit_signal_handler_for_dataloader": lambda value: PreemptionPlugin(enable_exit_handler_for_data_loader=value),
    "worker_patterns": lambda value: RayWorkersPlugin(**WINDOW, worker_patterns=value),
    "nsys_extra_options": lambda value: RayWorkersPlugin(**WINDOW, worker_patterns="*", nsys_extra_options={"sample": value}),
    OUTPUT_DIR_VARIABLE: lambda value: NsysPlugin(**WINDOW),
}

#: Programs of the job as functions of its shell, which print their arguments; the last program's count.
PROGRAMS = """
show() { printf '%s\\0' "$@" >&3; printf '\\n\\0' >&3; }
for name in python torchrun ft_launcher nsys; do eval "$name() { show $name \\"\\$@\\"; }"; done
ln() { :; }; mkdir() { show mkdir "$@"; }
"""


def shell_of(kind: str, executor, app) -> str:
    """The script that NeMo-Run makes of a role for the job's shell."""
    role = app.roles[0]
    if (macros := executor.macro_values()) is not None:
        role = macros.apply(role)
    command = [role.entrypoint, *role.args]
    module = importlib.import_module(f"nemo_run.core.execution.{kind}")
    if kind == "docker":
        client = SimpleNamespace(containers=mock.Mock())
        container = module.DockerContainer(name="t", command=command, executor=executor, extra_env={})
        with mock.patch.object(module, "ensure_network"):
            container.run(client, "1")
        command = importlib.import_module("docker.utils").split_command(client.containers.run.call_args.args[1])
        assert command[:2] == ["bash", "-c"]
        # The words behind the command write its log.
        return command[2].split(" 2>&1 | tee")[0] if len(command) == 3 else "false"
    if kind == "dgxcloud":
        request = module.DGXCloudRequest(launch_cmd=command, jobs=["t"], executor=executor, max_retries=0, extra_env={})
        return request.materialize()
    if kind == "kubeflow":
        executor.materialize_launch_script(command)
        return Path(executor.job_dir, "launch.sh").read_text()
    return " ".join(command)


def run_in_job(script: str, folder: Path) -> tuple[list[list[str]], dict[str, str]]:
    """The calls that a script makes, and its profiling variables at the end."""
    # The exit of a script must not end the shell before it shows its variables.
    text = f"{PROGRAMS}\ntrap 'env -0 >&4' EXIT\n{script}"
    (folder / "job").mkdir()
    with open(folder / "calls", "w") as calls, open(folder / "variables", "w") as variables:
        subprocess.run(
            ["bash", "-c", 'exec 3>&"$0" 4>&"$1"; eval "$2"', str(calls.fileno()), str(variables.fileno()), text],
            cwd=folder / "job", pass_fds=(calls.fileno(), variables.fileno()), capture_output=True, timeout=60, check=False,
            env={"PATH": "/usr/bin:/bin", "HOSTNAME": "pod-0"},
        )  # fmt: skip
    made = [call.split("\0")[:-1] for call in (folder / "calls").read_text().split("\n\0") if call]
    found = dict(one.split("=", 1) for one in (folder / "variables").read_text().split("\0") if "=" in one)
    return made, found


def _task(kind: str) -> run.Partial | run.Script:
    if kind == "partial":
        return run.Partial(pretrain, config=run.Config(Container))
    return run.Script("train.py", entrypoint="python", args=["--x"], metadata={STARTS_NSYS_KEY: True} if "nsys" in kind else {})


def _arrived(argument: str, value: object, task, calls: list[list[str]], variables: dict[str, str]) -> bool:
    """Whether the job received the value, in the place where it reads it."""
    program, *arguments = calls[-1]
    applications = [place for place, one in enumerate(arguments) if one in ("python", "torchrun")]
    options = arguments[: applications[0]] if program == "nsys" and applications else []
    if len([call for call in calls if call[0] != "mkdir"]) != 1 or (isinstance(task, run.Script) and "--x" not in arguments):
        return False
    if argument in ("worker_patterns", "nsys_extra_options"):
        request = RayRequest.from_environment(variables)
        if argument == "worker_patterns":
            return request.patterns == tuple(value.split(","))
        return request.extra_options == {"sample": "true" if value is True else str(value)}
    if argument == OUTPUT_DIR_VARIABLE:
        report = f"{value}/nsys_profile/profile_%h_%p"
        return variables[OUTPUT_DIR_VARIABLE] == value and (not options or options[options.index("-o") + 1] == report)
    if options and argument == "nsys_extra_args":
        return f"--env-var=A={value}" in options
    if options and argument == "nsys_trace":
        return options[options.index("-t") + 1] == value
    if isinstance(task, run.Partial):
        return True  # in a file, which no shell reads
    config = Container()
    apply_overrides(config, [one for one in arguments if re.match(r"'?(profiling|ft|train)\.\w+=", one)])
    expected = {
        "nsys_extra_args": [f"--env-var=A={value}"],
        "nsys_trace": [value],
        "profile_ranks": {None: [0]}.get(value, [value]) if isinstance(value, int | None) else value,
    }
    sections = (config.profiling, config.ft, config.train)
    found = next(getattr(section, argument) for section in sections if hasattr(section, argument))
    return found == expected.get(argument, value) or (bool(options) and argument == "nsys_gpu_metrics")


@pytest.mark.integration
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_value_arrives_unchanged_or_is_refused(kind, argument, executors, tmp_path):
    changed, accepted = [], []
    for number, value in enumerate(VALUES, KINDS.index(kind)):
        launcher, task = (None, "torchrun")[number % 2], _task(("script", "own nsys", "partial")[number % 3])
        variables = {OUTPUT_DIR_VARIABLE: value} if argument == OUTPUT_DIR_VARIABLE else {}
        executor = assigned(executors[kind](launcher=launcher, env_vars=variables))
        try:
            ARGUMENTS[argument](value).setup(task, executor)
        except ProfilingConfigError:
            continue
        accepted.append(value)
        (folder := tmp_path / str(number)).mkdir()
        calls, found = run_in_job(shell_of(kind, executor, package(task, executor)), folder)
        ran = list((folder / "job").iterdir())
        if ran or not calls or not _arrived(argument, value, task, calls, executor.env_vars | found):
            changed.append((value, launcher, task, calls))
    assert changed == []
    # These have no way for JSON.
    assert accepted or (kind in ("dgxcloud", "kubeflow") and argument == "nsys_extra_options")
