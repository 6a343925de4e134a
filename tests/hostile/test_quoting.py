"""What is typed arrives in the job, as one argument each, or is refused; nothing of it is run by a shell on the way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nemo_run as run
import pytest
from markupsafe import escape

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.common.printable import shell_path
from bridge_profiling.frameworks.outcome import lines
from bridge_profiling.manifest import find_captures
from bridge_profiling.nsys.command import prefix_command
from bridge_profiling.plugins import NsysPlugin, PyTorchProfilerPlugin
from bridge_profiling.plugins.task import STARTS_NSYS_KEY
from bridge_profiling.settings.overrides import apply_overrides
from bridge_profiling.settings.profiling import ProfilingConfig
from bridge_profiling.traces.discover import find_run
from recipes.executors import slurm
from tests.batch_scripts import batch_script
from tests.hostile.runs import write_run
from tests.plugins.conftest import Container, pretrain

#: Each writes a file named `ran` if a shell runs it, or splits into words.
RUN_BY_A_SHELL = ["$(touch ran)", "`touch ran`", "a;touch ran", "a\ntouch ran", "a|touch ran", "a&touch ran", "a>ran"]
SPLIT = ["a b", "a\tb", "a\u00a0b", "'a b", 'a"b', "a\\"]

WINDOW = {"profile_step_start": 4, "profile_step_end": 6}
NSYS_EXTRA = ["--cuda-graph-trace=graph", "--duration", "30", "-y", "2", "--env-var=A=%q{HOME},B=1", "--nvtx-capture=range@*"]

#: A program of every name in a job: prints its arguments as JSON to a file, and answers as that program would.
FAKE = r"""
import json, os, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ["ARGUMENTS"], "a") as file:
    file.write(json.dumps([name, *arguments]) + "\n")
if name == "hostname":
    print("127.0.0.1")
elif name == "scontrol":
    print("node1")
elif name == "nsys" and "--help" in arguments:
    # An older one: it knows --gpu-metrics-devices as --gpu-metrics-device, and no --cuda-event-trace.
    print("--gpu-metrics-device= --trace --output --export --cuda-graph-trace --duration --env-var --nvtx-capture --sample")
elif name == "nsys" and "--gpu-metrics-device=help" in arguments:
    print("devices:\n  0: a GPU")
elif name == "nsys":
    application = arguments[arguments.index("bash") :]
    os.execvp(application[0], application)
elif name == "srun":
    # As srun does: its own options come first, some with a value of their own.
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        takes_value = "=" not in option and (option == "-w" or option.startswith(("--output", "--error", "--c")))
        arguments = arguments[takes_value:]
    os.environ |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
    os.execvp(arguments[0], arguments)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch):
    """Runs a command where srun, nsys and the applications are fakes; returns the arguments of each call by name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "nsys", "scontrol", "hostname", "python", "torchrun", "ft_launcher"):
        (folder / name).write_text(f"#!{sys.executable}\n{FAKE}")
        (folder / name).chmod(0o755)

    def call(*command: str) -> dict[str, list[list[str]]]:
        log, calls = tmp_path / "arguments", {}
        log.write_text("")
        environ = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "ARGUMENTS": log,
            "SLURM_JOB_NODELIST": "node1",
            "HOME": tmp_path,
            "TMPDIR": tmp_path,
        }
        done = subprocess.run(command, env=environ, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120)
        (tmp_path / "stderr").write_text(done.stderr)
        for line in log.read_text().splitlines():
            name, *arguments = json.loads(line)
            calls.setdefault(name, []).append(arguments)
        return calls

    return call


def _case(number: int) -> dict[str, object]:
    """A row of a table in which most pairs of values occur together."""
    columns = {
        "task": ("script", "module", "partial", "own nsys"),
        "launcher": (None, "torchrun", "ft"),
        "image": (None, "docker://nvcr.io#nvidia/nemo:25.04"),
        "nsys_gpu_metrics": (True, False),
        "export_sqlite": (False, True),
        "nsys_extra_args": (None, NSYS_EXTRA, ["--sample=cpu"]),
        "nsys_trace": (None, ["nvtx", "cuda", "nccl"]),
        "profile_ranks": (None, [0, 1], "all", "pp"),
        "record_shapes": (True, False),
    }
    places = {name: number * (2 * place + 1) + number // 4 + place for place, name in enumerate(columns)}
    return {name: values[places[name] % len(values)] for name, values in columns.items()}


def _plugin(case: dict[str, object]) -> NsysPlugin:
    return NsysPlugin(**WINDOW, **{name: value for name, value in case.items() if name not in ("task", "launcher", "image")})


def _task(kind: str) -> run.Partial | run.Script:
    if kind == "partial":
        return run.Partial(pretrain, config=run.Config(Container))
    metadata = {STARTS_NSYS_KEY: True} if kind == "own nsys" else {}
    module = kind == "module"
    return run.Script(path="a.b" if module else "train.py", entrypoint="python", m=module, args=["--x"], metadata=metadata)


@pytest.mark.integration
@pytest.mark.parametrize("number", range(12))
def test_every_argument_of_nsys_and_of_the_script_arrives_as_one(programs, tmp_path, number):
    case = _case(number)
    executor = slurm("me", ntasks_per_node=2, launcher=case["launcher"], container_image=case["image"], venv="/venv")
    script = batch_script(tmp_path / "home", executor, _task(case["task"]), [_plugin(case)])
    calls = programs("bash", str(script))
    prefixed = case["task"] != "own nsys" and case["launcher"] != "ft"
    _check_calls(calls, case, prefixed=prefixed)
    said = (tmp_path / "stderr").read_text()
    left_out = "this nsys does not know --cuda-event-trace: left out --cuda-event-trace=false"
    assert (left_out in said, "nsys left no report under" in said) == (prefixed, prefixed)
    (container,) = {one for arguments in calls["srun"] for one in arguments if "nvcr.io" in one} or {None}
    assert container == case["image"]


@pytest.mark.integration
def test_an_empty_last_argument_is_dropped(programs):
    """NeMo-Run adds it."""
    prefix = prefix_command(["profile", "--trace", "nvtx", "$GPU_METRICS_FLAG"], gpu_metrics="")
    calls = programs("bash", *prefix, "python", "a b.py", "")
    *options, shell, _, program, script = calls["nsys"][-1]
    assert [*options, shell, program, script] == ["profile", "--trace=nvtx", "bash", "python", "a b.py"]
    assert calls["python"] == [["a b.py"]]


def _check_calls(calls: dict[str, list[list[str]]], case: dict[str, object], *, prefixed: bool) -> None:
    profiled = [arguments for arguments in calls.get("nsys", []) if "--help" not in arguments and arguments[-1] != "true"]
    assert len(profiled) == prefixed
    launched = {"torchrun": "torchrun", "ft": "ft_launcher"}.get(case["launcher"], "python")
    arguments = profiled[0] if prefixed else calls[launched][0]
    if prefixed:
        application = next(place for place, one in enumerate(arguments) if os.path.basename(one) == launched)
        options, arguments = arguments[:application], arguments[application + 1 :]
        assert not [one for one in options if "FLAG" in one or "cuda-event-trace" in one or one == ""]
        gpus = {"all"} if case["launcher"] else {"1"}
        sampled = {one.partition("=")[2] for one in options if one.startswith("--gpu-metrics-device=")}
        assert sampled == (gpus if case["nsys_gpu_metrics"] else set())
        assert options.count("--export=sqlite") == case["export_sqlite"]
        assert options[options.index("-t") + 1] == ",".join(case["nsys_trace"] or ["nvtx", "cuda"])
        # A long option and its value become one argument, so that the script can rename the option.
        extra = " ".join(case["nsys_extra_args"] or ()).replace("--duration ", "--duration=").split()
        assert " ".join(extra) in " ".join(options)
        assert set(extra) <= set(options)
    if case["task"] != "partial":
        given = [one for one in arguments if one.startswith(("profiling.", "'profiling."))]
        settings = Container()
        apply_overrides(settings, given)
        found = settings.profiling
        assert found.profile_ranks == ([0] if case["profile_ranks"] is None else case["profile_ranks"])
        assert (found.use_nsys_profiler, found.record_shapes) == (case["launcher"] != "ft", case["record_shapes"])
        if case["task"] == "own nsys" and case["launcher"] != "ft":
            wanted = (case["nsys_extra_args"] or [], case["nsys_trace"], case["nsys_gpu_metrics"], case["export_sqlite"])
            assert (found.nsys_extra_args, found.nsys_trace, found.nsys_gpu_metrics, found.nsys_export_sqlite) == wanted


IMAGE = {"container_image": "image.sqsh"}
SLURM_VALUES = [
    *({"container_image": value} for value in (*RUN_BY_A_SHELL, *SPLIT, "", 5)),
    *(IMAGE | {"mounts": [f"/a:{value}"]} for value in ("$(touch /ran)", "/a b", "/a\n:/b", "/a;b", "/'a")),
    IMAGE | {"mounts": ["/$(touch ran):/b"]},
    *({name: value} for name in ("job_name_prefix", "account") for value in (*RUN_BY_A_SHELL, *SPLIT, "a/b", "../a", 5)),
    *({name: "a\ntouch ran"} for name in ("partition", "comment", "qos", "mem", "gres", "constraint", "exclude", "array")),
    *({"srun_args": [value]} for value in (*RUN_BY_A_SHELL, "a b", "a\tb", "'a b", 'a"b', "a\\", "", 5)),
    {"srun_args": "--mpi=pmix"},
    *({"container_env": [value]} | IMAGE for value in RUN_BY_A_SHELL),
    *({"additional_parameters": value} for value in ({"a": "b\ntouch ran"}, {"a\ntouch ran": 1})),
    *({name: value} for name in ("heterogeneous", "memory_measure") for value in ("no", "false")),
]  # fmt: skip


@pytest.mark.parametrize("options", SLURM_VALUES, ids=lambda one: repr(one)[-60:])
def test_an_executor_refuses_a_value_that_a_shell_would_run_or_split(options):
    with pytest.raises(ProfilingConfigError):
        slurm(**{"account": "me", "venv": "/venv"} | options)


@pytest.mark.integration
def test_values_of_an_executor_that_are_accepted_arrive_unchanged(programs, tmp_path):
    executor = slurm(
        "me_project", "gpu", container_image="/img/a~b+c@1%.sqsh", mounts=["/data:/data", "/x:/y:ro"], launcher=None,
        env={"A": "$(touch ran) `touch ran` 'x' \"y\" \\ ünï", "B": "a b"}, srun_args=["--mpi=pmix", "--comment='my run'"],
        additional_parameters={"mail-user": "me@x.org"}, job_name_prefix="me.run:", constraint="[a|b]*2&c",
        container_env=["A", "B"], comment="my 'run' $(touch ran)",
    )  # fmt: skip
    plugins = [PyTorchProfilerPlugin(**WINDOW, record_memory_history=True, memory_snapshot_path="/a/b%c.pickle")]
    script = batch_script(tmp_path / "home", executor, _task("script"), plugins)
    calls = programs("bash", str(script))
    srun = calls["srun"][-1]
    assert {"/img/a~b+c@1%.sqsh", "--mpi=pmix", "--comment=my run", "A,B"} <= set(srun)
    assert any(one.startswith("/data:/data,/x:/y:ro,") for one in srun)
    (arguments,) = calls["python"]
    settings = Container()
    apply_overrides(settings, arguments[2:])
    assert settings.profiling == ProfilingConfig(
        use_pytorch_profiler=True, record_memory_history=True, memory_snapshot_path="/a/b%c.pickle", **WINDOW
    )
    assert not list(tmp_path.rglob("ran"))


#: Names of files, as a command to copy has them.
PATHS = [
    *RUN_BY_A_SHELL, *SPLIT, "-x", "--help", "-", "*", "[a]?", "~", "a'b'c", "#a", "!a", "a=b", "\x1b[31m", "\r", "\n\n",
    "\t012", "\u202e",
    "ünï", "a\udcff\udc80b", "\\", "\\012", "a\nb'\\", "{a,b}", "$HOME", "",
]  # fmt: skip


@pytest.mark.integration
def test_a_path_in_a_command_to_copy_arrives_unchanged_and_is_no_option(tmp_path):
    words = [shell_path(path) for path in PATHS]
    assert all(word.isprintable() for word in words)
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], cwd=tmp_path, capture_output=True, check=True)
    arrived = [os.fsdecode(each) for each in done.stdout.split(b"\0")[:-1]]
    assert arrived == [f"./{path}" if path.startswith("-") else path for path in PATHS]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a  b$(touch ran)'", "a\nb", "-x"])
def test_every_command_that_is_printed_quotes_its_path(typed, folder, name):
    write_run(folder / name)
    place = shell_path(name)
    done = typed("report", "--output", "page.html", "--", name)
    assert done.returncode == 0, done.stderr
    assert str(escape(f"bridge-profiling merge {place} -o")) in (folder / "page.html").read_text()
    captured = lines(Path(name), find_captures(Path(name)))
    assert captured[-1].endswith(f"bridge-profiling report {place}")
    shutil.copytree(folder / name / "torch" / "iter-0-2", folder / name / "torch" / "iter-9-11")
    (caveat,) = (each for each in find_run(Path(name)).caveats if each.code == "captures_skipped")
    assert caveat.text.partition(" pass ")[2] in [shell_path(f"{name}/torch/{window}") for window in ("iter-0-2", "iter-9-11")]
