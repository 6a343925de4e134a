"""`bridge-profiling doctor` as it is typed, in a process of its own, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REFUSE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "nemo_run", "fiddle"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
sys.argv[0] = "bridge-profiling"
from bridge_profiling.cli import main
main()
"""

RUN = ("profiling.use_pytorch_profiler=true", "train.train_iters=50", "--world-size", "4", "--nodes", "1")

#: What would change the diagnosis on the machine that runs these tests.
_TOOLS = ("CUDA_INJECTION64_PATH", "LD_PRELOAD", "BRIDGE_PROFILING_DIR", "SLURM_JOB_ID", "TMPDIR")


@pytest.fixture
def doctor(tmp_path):
    """Runs the command where there is no nsys, no srun and no nvidia-smi on PATH; gives what it did."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in _TOOLS and not name.startswith("NCCL")}
        environment = kept | {"PATH": str(Path(sys.executable).parent), "HOME": str(tmp_path)} | environ
        command = [str(Path(sys.executable).with_name("bridge-profiling")), "doctor", *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return run


def lines(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Status and finding by check, as they are printed."""
    found = {}
    for line in done.stdout.splitlines():
        status, _, rest = line.partition(" ")
        check, colon, text = rest.strip().partition(": ")
        if colon and status in ("ok", "warning", "fails", "unknown"):
            found[check] = status, text
    return found


def test_this_machine_alone(doctor, tmp_path):
    done = doctor()
    assert done.returncode == 0, done.stderr
    found = lines(done)
    assert found["output directory"] == ("ok", f"{tmp_path}/profiles can be written (will be created in {tmp_path})")
    assert found["nsys"][0] == "warning"
    assert found["GPUs"][0] == "unknown"
    assert found["NCCL settings"][0] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fits_ends_with_0(doctor):
    done = doctor(*RUN)
    assert done.returncode == 0, done.stdout
    assert lines(done)["window"] == ("ok", "iterations 10 to 11 of 0 to 49")
    assert lines(done)["ranks"] == ("ok", "0 of 4")
    assert "nsys" not in lines(done)


def test_what_will_fail_ends_with_1_and_says_what_to_do(doctor):
    done = doctor(*RUN, "train.train_iters=11", "profiling.profile_ranks=[4]", "profiling.use_nsys_profiler=true")
    assert done.returncode == 1
    assert {check for check, (status, _) in lines(done).items() if status == "fails"} >= {
        "profilers",
        "window",
        "ranks",
        "nsys",
    }
    for line in done.stdout.splitlines():
        if line.startswith("fails"):
            following = done.stdout.splitlines()[done.stdout.splitlines().index(line) + 1]
            assert following.strip().startswith("→ "), line


def test_fault_tolerance_and_nsys_fail_by_the_launcher(doctor):
    done = doctor("profiling.use_nsys_profiler=true", "train.train_iters=50", "--launcher", "ft")
    assert done.returncode == 1
    assert "Nsys not supported with the FaultTolerancePlugin" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["profiling.use_nsys=true"], "Type profiling.use_nsys_profiler"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["no_such_experiment"], "the experiment 'no_such_experiment' does not exist"),
        (["--nodes", "0"], "--nodes"),
        (["--launcher", "mpi"], "--launcher"),
        (["train.train_iters=x"], "train.train_iters"),
    ],
)
def test_a_wrong_request_ends_with_2(doctor, arguments, told):
    done = doctor(*arguments)
    assert done.returncode == 2, done.stdout
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_yaml_file_is_read_and_overrides_win_over_it(doctor, tmp_path):
    (tmp_path / "run.yaml").write_text("profiling: {use_pytorch_profiler: true}\ntrain: {train_iters: 5}\n")
    assert doctor("--config", "run.yaml").returncode == 1
    assert doctor("--config", "run.yaml", "train.train_iters=12").returncode == 0


def test_json_holds_the_same_verdicts(doctor, tmp_path):
    done = doctor(*RUN, "--json")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    (run,) = document["runs"]
    printed = lines(doctor(*RUN))
    assert {check["check"] for check in run["checks"]} == printed.keys()
    for check in run["checks"]:
        if check["check"] not in ("free space", "other profilers"):  # what other processes do between the two runs
            assert (check["status"], check["found"]) == printed[check["check"]]
    assert document["counts"]["fails"] == 0
    assert all(check["instead"] for check in run["checks"] if check["status"] in ("fails", "warning"))


def test_piped_it_is_plain_and_no_line_is_broken(doctor):
    done = doctor(*RUN, "--output-dir", "/tmp/" + "a" * 150)
    assert "\x1b" not in done.stdout
    assert any("a" * 150 in line and "will be created in /tmp" in line for line in done.stdout.splitlines())


def test_where_the_job_runs_elsewhere_this_machine_proves_nothing(doctor):
    done = doctor("profiling.use_nsys_profiler=true", "train.train_iters=50", "--elsewhere", "--output-dir", ".")
    assert done.returncode == 0, done.stdout
    assert lines(done)["nsys"] == ("unknown", "on this machine: nsys is not on this machine's PATH")
    assert "srun bridge-profiling doctor" in done.stdout


def test_inside_an_allocation_it_counts_again(doctor):
    run = ("profiling.use_nsys_profiler=true", "train.train_iters=50")
    assert doctor(*run, SLURM_JOB_ID="7").returncode == 1


def test_the_environment_is_looked_at(doctor):
    done = doctor(*RUN, NCCL_P2P_DISABLE="1", CUDA_INJECTION64_PATH="/opt/tool.so", TMPDIR="/nowhere/at/all")
    found = lines(done)
    assert found["NCCL settings"][0] == "warning"
    assert found["other profilers"][0] == "warning"
    nsys = lines(doctor("profiling.use_nsys_profiler=true", "train.train_iters=50", TMPDIR="/nowhere/at/all"))
    assert nsys["TMPDIR"][0] == "fails"


@pytest.mark.parametrize("arguments", [[], list(RUN), ["--help"]])
def test_it_needs_neither_torch_nor_nemo_run(arguments, tmp_path):
    done = subprocess.run([sys.executable, "-c", REFUSE, "doctor", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_no_check(tmp_path):
    code = (
        "import sys; sys.argv = ['bridge-profiling', '--help']\n"
        "from bridge_profiling.cli import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'nemo_run', 'omegaconf', 'bridge_profiling.doctor'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == "set()", done.stdout + done.stderr
