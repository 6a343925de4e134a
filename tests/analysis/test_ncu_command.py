"""The command for Nsight Compute: what a shell makes of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Thresholds
from bridge_profiling.analysis.findings.kernels import kernel_filter, ncu_command
from bridge_profiling.manifest import Manifest, RankCapture
from bridge_profiling.traces.types import RankInfo
from tests.analysis.findings.simulated_jobs import Here
from tests.planted.cases import CASES

TEMPLATES = {"void k<float>(float*)": 6, "void k<c10::BFloat16>(c10::BFloat16*)": 40, "gemm": 2}


def info(rank=0, world_size=1):
    return RankInfo(rank=rank, rank_source="trace", source="kineto", files=[], world_size=world_size)


def manifest(command, **config):
    return RankCapture(Path("."), "iter-1-3", Manifest(rank=0, status="complete", command=command, config=config))


def made(kernel="gemm", *, rank=0, world_size=1, iterations=2, given=None, hosts=1):
    return ncu_command(kernel, info(rank, world_size), TEMPLATES, iterations=iterations, manifest=given, hosts=hosts)


def test_a_single_process_is_started_by_ncu():
    found = made(given=manifest(["python", "my train.py", "--lr=1e-3"]))
    assert shlex.split(found.command) == [
        *("ncu", "--set", "full", "--kernel-name", "gemm", "--launch-skip", "3", "--launch-count", "1"),
        *("--target-processes", "all", "-o", "ncu-rank-0", "python", "my train.py", "--lr=1e-3"),
    ]
    assert any("own profiler off" in note for note in found.notes)


def test_launches_of_three_iterations_are_skipped_and_a_few_profiled():
    words = shlex.split(made("void k<c10::BFloat16>(c10::BFloat16*)", given=manifest(["python", "t.py"])).command)
    assert words[words.index("--launch-skip") + 1] == "60"
    assert words[words.index("--launch-count") + 1] == "4"
    words = shlex.split(made(iterations=0, given=manifest(["python", "t.py"])).command)
    assert "--launch-skip" not in words
    assert words[words.index("--launch-count") + 1] == "1"


def test_our_own_entry_point_gets_its_profilers_switched_off():
    command = ["python", "launch/pretrain.py", "--recipe", "gpt_125m", "profiling.use_pytorch_profiler=true"]
    found = made(given=manifest(command, use_pytorch_profiler=True, use_nsys_profiler=False))
    assert shlex.split(found.command)[-1] == "profiling.use_pytorch_profiler=false"
    assert "profiling.use_nsys_profiler=false" not in found.command
    assert found.notes == []


@pytest.mark.parametrize("given", [None, manifest([])])
def test_a_command_that_is_not_known_is_not_made_up(given):
    found = made(given=given)
    assert found.command.endswith(" <your command>")
    assert any("does not record its command" in note for note in found.notes)


RUN = ["python", "-u", "-m", "bridge_profiling.easy.start", "--profiler", "torch", "--steps", "3:8", "--ranks", "all"]


@pytest.mark.parametrize(
    ("options", "script"),
    [
        ([], ["my train.py", "--lr", "0.1"]),
        (["--output-dir", "a b"], ["train.py", "-m", "--steps"]),
        (["--output-dir=here", "-m"], ["package.train"]),
    ],
)
def test_what_bridge_profiling_run_profiled_runs_without_it(options, script):
    found = made(given=manifest([*RUN, *options, *script], use_pytorch_profiler=True))
    module = ["-m"] if "-m" in options else []
    assert shlex.split(found.command)[-len(script) - len(module) - 2 :] == ["python", "-u", *module, *script]
    assert found.notes == []


def test_a_local_rank_that_the_launcher_gave_one_rank_is_not_given_to_all():
    given = manifest(["python", "-u", "train.py", "--local_rank=1", "--deepspeed"])
    found = made(rank=1, world_size=2, given=given)
    assert found.command.startswith("<your launcher")
    assert found.command.endswith(" sh python -u train.py --deepspeed")
    assert any("deepspeed --no_python" in note for note in found.notes)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)", "--multiprocessing-fork"],
        ["python", "-u", "/site/ray/_private/workers/default_worker.py", "--node-ip-address=10.0.0.1"],
    ],
)
def test_a_process_that_its_parent_told_what_to_do_cannot_be_started_again(command):
    assert made(given=manifest(command)).command.endswith(" <your command>")


def test_every_argument_and_every_kernels_name_survives_the_shell(tmp_path):
    arguments = ["my train.py", "a=[1, 2]", "b='x' \"y\"", "$HOME `id` \\n !1", "", "ü*?", "line\nbreak"]
    (tmp_path / "python").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (tmp_path / "python").chmod(0o755)
    for name in ("ncu", "torchrun"):
        (tmp_path / name).symlink_to("python")
    kernels = ("operator'$x\"`!\\", "void 核<float, 'a', \"b$c\">(int)", "k" * 4000)
    for kernel in kernels:
        for world_size in (1, 2):
            counts = dict.fromkeys((kernel, kernel.replace("float", "double"), kernel[:-1] + "<int, $, '>"), 3)
            found = ncu_command(
                kernel, info(1, world_size), counts, iterations=1, manifest=manifest(["python", *arguments]), hosts=1
            )
            subprocess.run(["bash", "-n", "-c", found.command], check=True)
            environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RANK": "1"}
            words = printed(found.command, environment)
            if world_size > 1:
                # What torchrun was given is a command of its own, which starts ncu.
                words = printed(shlex.join(words[words.index("--no-python") + 1 :]), environment)
            assert words[-len(arguments) - 1 :] == ["python", *arguments]
            wanted = kernel_filter(kernel, [each for each in counts if each != kernel]).options
            assert words[2 : 2 + len(wanted)] == wanted


def printed(command, environment):
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("variable", "value"), [("RANK", "1"), ("SLURM_PROCID", "1"), ("RANK", "0")])
def test_of_several_ranks_one_starts_ncu_and_the_others_what_they_always_start(tmp_path, variable, value):
    """The line as a shell runs it, with a launcher that starts one rank, and an ncu that says what it was given."""
    found = made("void k<float>(float*)", rank=1, world_size=2, given=manifest(["python", "my train.py"]))
    assert found.command.startswith("torchrun --nproc-per-node 2 --no-python sh -c ")
    for name, script in {
        "torchrun": 'shift 3; exec "$@"',
        "ncu": 'printf "ncu\\n"; printf "%s\\n" "$@"',
        "python": 'printf "python\\n"; printf "%s\\n" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", variable: value}
    done = subprocess.run(["sh", "-c", found.command], env=environment, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    if value == "0":
        assert said == ["python", "my train.py"]
    else:
        assert said[:5] == ["ncu", "--set", "full", "--kernel-name-base", "demangled"]
        assert said[6] == "regex:(^|[^A-Za-z0-9_])k<(.*[^A-Za-z0-9_])?float[^A-Za-z0-9_]"
        assert said[-3:] == ["ncu-rank-1", "python", "my train.py"]


@pytest.mark.parametrize("hosts", [None, 2])
def test_across_hosts_the_launcher_is_the_users(hosts):
    found = made(rank=9, world_size=16, hosts=hosts, given=manifest(["python", "t.py"]))
    assert found.command.startswith("<your launcher")
    assert any("as you start the training" in note for note in found.notes)


def test_a_finding_of_a_real_capture_carries_it(tmp_path):
    with Run(CASES["data_loading_2"].folder, parquet=tmp_path, engine=Here()) as run:
        found = [one for one in run.findings(Thresholds(dominant_kernel=0.1)) if one.id == "dominant_kernel"]
    assert found
    for finding in found:
        command = finding.evidence["ncu_command"]
        assert command.startswith("torchrun --nproc-per-node 2 --no-python sh -c ")
        assert "--launch-skip" in command
        assert finding.evidence["ncu_notes"]
