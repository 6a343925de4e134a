"""The command for Nsight Compute: what a shell makes of it, and which kernels ncu finds by its filter."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.findings.kernels import kernel_filter, ncu_command
from bridge_profiling.manifest import Manifest, RankCapture
from bridge_profiling.traces.types import RankInfo

BFLOAT = "void k<c10::BFloat16>(c10::BFloat16*)"
COUNTS = {"void k<float>(float*)": 6, BFLOAT: 40, "gemm": 2}

#: As `bridge-profiling run` starts a script.
RUN = ["python", "-u", "-m", "bridge_profiling.frameworks.start", "--profiler", "torch", "--steps", "3:8", "--ranks", "all"]
SPAWNED = "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)"


def made(command=None, kernel="gemm", *, rank=0, world_size=1, iterations=2, hosts=1, counts=COUNTS, **config):
    info = RankInfo(rank=rank, rank_source="trace", source="kineto", files=[], world_size=world_size)
    manifest = RankCapture(Path(), "iter-1-3", Manifest(rank=0, status="complete", command=command or [], config=config))
    known = None if command is None else manifest
    return ncu_command(kernel, info, counts, iterations=iterations, manifest=known, hosts=hosts)


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, ["gemm", "--launch-skip", "3", "--launch-count", "1"]),
        # Launches of three iterations are skipped, and a few profiled.
        (
            {"kernel": BFLOAT},
            [f"regex:{kernel_filter(BFLOAT, list(COUNTS)).options[-1][6:]}", "--launch-skip", "60", "--launch-count", "4"],
        ),
        ({"iterations": 0}, ["gemm", "--launch-count", "1"]),
    ],
)
def test_a_single_process_is_started_by_ncu(options, launches):
    found = made(["python", "my train.py", "--lr=1e-3"], **options)
    words = shlex.split(found.command)
    assert words[:3] == ["ncu", "--set", "full"]
    end = ["--target-processes", "all", "-o", "ncu-rank-0", "python", "my train.py", "--lr=1e-3"]
    assert words[words.index("--kernel-name") + 1 :] == [*launches, *end]
    assert any("No iteration is marked" in note for note in found.notes) == ("iterations" in options)


@pytest.mark.parametrize(
    ("command", "started"),
    [
        (
            ["python", "launch/pretrain.py", "--recipe", "gpt_125m"],
            "python launch/pretrain.py --recipe gpt_125m profiling.use_pytorch_profiler=false",
        ),
        # Without `bridge-profiling run`.
        ([*RUN, "--light", "--set", "profile_every=9", "my train.py", "--x"], "ncu-rank-0 python -u 'my train.py' --x"),
        # A command that is not known, or whose process got its work from its parent.
        (None, "ncu-rank-0 <your command>"),
        (["python", "-c", SPAWNED, "--multiprocessing-fork"], "ncu-rank-0 <your command>"),
    ],
)
def test_the_training_is_started_without_its_own_profiler(command, started):
    found = made(command, use_pytorch_profiler=True, use_nsys_profiler=False)
    assert found.command.endswith(started)
    assert any("does not record its command" in note for note in found.notes) == ("<your" in started)


@pytest.mark.integration
@pytest.mark.parametrize("kernel", ["operator'$x\"`!\\", "void 核<float, 'a', \"b$c\">(int)"])
@pytest.mark.parametrize("environment", [{}, {"SLURM_PROCID": "1"}, {"RANK": "0"}])
def test_one_rank_starts_ncu_and_every_argument_and_name_survives_the_shell(tmp_path, kernel, environment):
    """The line as a shell runs it, with a launcher that starts one rank, and programs that print what they are given."""
    (tmp_path / "python").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
    (tmp_path / "torchrun").write_text('#!/bin/sh\nshift 3; exec "$@"\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    (tmp_path / "ncu").symlink_to("python")
    command = ["python", "my train.py", "a=[1, 2]", "b='x' \"y\"", "$HOME `id` \\n !1", "", "ü*?", "line\nbreak"]
    counts = dict.fromkeys((kernel, kernel.replace("float", "double"), kernel[:-1] + "<int, $, '>"), 3)
    found = made(command, kernel, rank=1, world_size=2 if environment else 1, counts=counts)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    program, *words = json.loads(subprocess.check_output(["bash", "-c", found.command], env=path | environment, text=True))
    assert [Path(program).name, *words][-len(command) :] == command
    if environment != {"RANK": "0"}:
        wanted = kernel_filter(kernel, [each for each in counts if each != kernel]).options
        assert (Path(program).name, words[:2], words[2 : 2 + len(wanted)]) == ("ncu", ["--set", "full"], wanted)


@pytest.mark.parametrize(
    ("name", "others", "options", "also"),
    [
        ("void ns::softmax<float, 4>(float*)", ["void ns::other<float>(float*)"], ["--kernel-name", "softmax"], []),
        ("_Z6kernelIfEvPT_", [], ["--kernel-name-base", "mangled", "--kernel-name", "_Z6kernelIfEvPT_"], []),
        ("void k<float>()", ["void k<float, 4>()"], ["--kernel-name-base", "demangled"], ["void k<float, 4>()"]),
        ("void k<float, 4>()", ["void k<float>()", "void k<int, 4>()"], ["--kernel-name-base", "demangled"], []),
    ],
)
def test_a_kernel_is_chosen_by_as_little_of_its_name_as_is_its_own(name, others, options, also):
    found = kernel_filter(name, others)
    assert (found.options[: len(options)], found.also) == (options, also)
