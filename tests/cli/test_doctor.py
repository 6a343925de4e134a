"""`bridge-profiling doctor` as it is typed, on this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TORCH = ("profiling.use_pytorch_profiler=true", "train.train_iters=50", "--world-size", "4", "--nodes", "1")
NSYS = ("profiling.use_nsys_profiler=true", "train.train_iters=50")


@pytest.fixture
def doctor(typed, tmp_path, monkeypatch):
    """Types the command in an empty directory, where there is no nsys, no srun and no nvidia-smi on PATH."""
    for name in [name for name in os.environ if name.startswith(("NCCL", "SLURM"))]:
        monkeypatch.delenv(name)
    for name in ("CUDA_INJECTION64_PATH", "LD_PRELOAD", "BRIDGE_PROFILING_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return lambda *arguments, **environ: typed("doctor", *arguments, **environ)


def lines(done):
    """Status and finding by check, as they are printed."""
    found = re.findall(r"^(ok|warning|fails|unknown) +(.+?): (.*)$", done.stdout, re.M)
    return {check: (status, text) for status, check, text in found}


def test_this_machine_alone(doctor):
    done = doctor()
    found = lines(done)
    assert done.returncode == 0, done.stderr
    assert found["output directory"] == ("ok", f"{os.getcwd()}/profiles can be written (will be created in {os.getcwd()})")
    assert [found[check][0] for check in ("nsys", "GPUs", "NCCL settings")] == ["warning", "unknown", "ok"]
    assert os.listdir() == []


def test_the_json_of_a_run_that_fits_holds_the_verdicts_that_are_printed(doctor):
    done = doctor(*TORCH)
    printed = lines(done)
    assert done.returncode == 0, done.stdout
    assert (printed["window"], printed["ranks"]) == (("ok", "iterations 10 to 11 of 0 to 49"), ("ok", "0 of 4"))
    checks = json.loads(doctor(*TORCH, "--json").stdout)["runs"][0]["checks"]
    assert {check["check"]: check["status"] for check in checks} == {name: status for name, (status, _) in printed.items()}


def test_what_will_fail_ends_with_1_and_says_what_to_do(doctor):
    done = doctor(*TORCH, "train.train_iters=11", "profiling.profile_ranks=[4]", "profiling.use_nsys_profiler=true")
    failed = {check for check, (status, _) in lines(done).items() if status == "fails"}
    assert done.returncode == 1
    assert failed >= {"profilers", "window", "ranks", "nsys"}
    assert len(re.findall(r"^fails .*\n +→ ", done.stdout, re.M)) == len(failed)


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "said"),
    [
        ((*NSYS, "--launcher", "ft"), {}, 1, "Nsys not supported with the FaultTolerancePlugin"),
        # A job that runs elsewhere: this machine proves nothing.
        ((*NSYS, "--elsewhere", "--output-dir", "."), {}, 0, "unknown nsys: on this machine: nsys is not"),
        (("--config", "run.yaml", "train.train_iters=12"), {}, 0, "ok      window"),
        # Piped, no line is broken.
        ((*TORCH, "--output-dir", "/tmp/" + "a" * 150), {}, 0, "a" * 150 + " can be written (will be created in /tmp)"),
    ],
)
def test_the_verdict_follows_launcher_place_environment_and_file(doctor, arguments, environ, code, said):
    Path("run.yaml").write_text("profiling: {use_pytorch_profiler: true}\ntrain: {train_iters: 5}\n")
    done = doctor(*arguments, **environ)
    assert done.returncode == code, done.stdout
    assert said in done.stdout


@pytest.mark.integration
@pytest.mark.parametrize("arguments", [["doctor", *TORCH], ["doctor", "--help"]])
def test_it_needs_neither_torch_nor_nemo_run_and_help_loads_no_check(arguments, tmp_path):
    code = """
import sys
sys.modules |= dict.fromkeys(("torch", "megatron", "nemo_run", "fiddle"))  # importing them is an error
sys.argv[0] = "bridge-profiling"
from bridge_profiling.cli import main
try:
    main()
finally:
    print({"omegaconf", "bridge_profiling.doctor"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.splitlines()[-1] == "set()") == ("--help" in arguments)
