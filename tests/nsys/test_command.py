"""The command lines of nsys; tests/system/test_nsys.py runs them with a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bridge_profiling.capture import ParallelLayout, start_under_nsys
from bridge_profiling.capture.nsys_profiler import nsys_request
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.nsys import launch as nsys_launch
from bridge_profiling.nsys.command import DIRECTIVES_VARIABLE, NsysVersion, directives, prefix_command, profile_command

ALL = "--trace --output --sample --cpuctxsw --cuda-graph-trace --force-overwrite --kill --wait"
NEW = NsysVersion(
    "/opt/nsys",
    "2025.5",
    frozenset(
        [*ALL.split(), "--capture-range", "--capture-range-end", "--nvtx-capture", "--cuda-event-trace", "--delay", "--export"]
    ),
)
OLD = NsysVersion("/opt/nsys", "2024.2", NEW.options - {"--cuda-event-trace"})


def command(version=NEW, cuda=True, **settings):
    request = nsys_request(ProfilingConfig(**settings), rank=0, local_rank=0, cuda=cuda)
    return profile_command(request, version, report=Path("/out/report"))


def test_the_default_is_the_cheap_one():
    assert command() == (
        [
            "/opt/nsys", "profile", "--trace=nvtx,cuda", "--output=/out/report", "--sample=none", "--cpuctxsw=none",
            "--cuda-graph-trace=node", "--cuda-event-trace=false", "--force-overwrite=true", "--kill=none", "--wait=primary",
            "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        ],
        [],
    )  # fmt: skip


def test_the_number_of_captures_is_an_option():
    assert "--capture-range-end=repeat:4" in command(use_nsys_profiler=True, nsys_captures=4)[0]
    repeated = {"use_nsys_profiler": True, "profile_every": 10, "profile_at_most": 3}
    assert "--capture-range-end=repeat:3" in command(**repeated)[0]
    assert "--capture-range-end=repeat:5" in command(**repeated, nsys_captures=5)[0]


def test_a_default_that_an_older_nsys_does_not_know_goes_without_a_word():
    options, warnings = command(OLD)
    assert "--cuda-event-trace=false" not in options
    assert warnings == []


def test_an_option_of_the_users_that_it_does_not_know_is_named():
    _, warnings = command(OLD, nsys_extra_args=["--cuda-event-trace=true"])
    assert len(warnings) == 1
    assert "--cuda-event-trace" in warnings[0]


def test_without_cuda_an_nvtx_range_is_captured():
    options, warnings = command(cuda=False)
    assert options[2] == "--trace=nvtx"
    assert "--capture-range=nvtx" in options
    assert "--nvtx-capture=bridge_profiling_window" in options
    assert warnings == []


def test_without_cuda_apis_asked_for_by_name_are_left_out_with_a_warning():
    options, warnings = command(cuda=False, nsys_trace=["cuda", "osrt", "cudnn"], nsys_gpu_metrics=True)
    assert options[2] == "--trace=osrt"
    assert warnings == ["no CUDA device: left out --trace=cuda,cudnn", "no CUDA device: no GPU metrics"]


@pytest.mark.parametrize("given", [["--sample=process-tree", "--delay=30"], ["-s", "process-tree", "-y", "30"]])
def test_the_users_options_win_by_name(given):
    options, warnings = command(nsys_extra_args=given)
    assert options[-len(given) :] == given
    assert "--sample=none" not in options
    assert warnings == []


@pytest.mark.parametrize(
    "wrong", [{"nsys_trace": ["a b"]}, {"nsys_extra_args": ["--output=x"]}, {"nsys_extra_args": "--wait=all"}]
)
def test_options_that_cannot_work_are_refused_before_anything_starts(wrong):
    with pytest.raises(ProfilingConfigError, match=r"profiling\.nsys_"):
        ProfilingConfig(**wrong).finalize()


DETACHES = NsysVersion("/opt/nsys", "2024.2.3.38-242334140272v0", OLD.options)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, "CuptiFinalizeOnStop=true"),
        ("", "CuptiFinalizeOnStop=true"),
        ("AgentLaunchTimeoutSec=240;", "AgentLaunchTimeoutSec=240;CuptiFinalizeOnStop=true"),
        ("CuptiFinalizeOnStop=false", "CuptiFinalizeOnStop=false"),
    ],
)
def test_cupti_is_detached_after_the_capture_unless_the_user_says_otherwise(own, expected):
    options = command(DETACHES)[0][2:]
    assert directives(DETACHES, options, {} if own is None else {DIRECTIVES_VARIABLE: own}) == expected


@pytest.mark.parametrize(
    ("version", "settings"),
    [
        (NEW, {}),
        (DETACHES, {"use_nsys_profiler": True, "nsys_captures": 2}),
        (DETACHES, {"nsys_extra_args": ["--capture-range-end=repeat"]}),
        (DETACHES, {"nsys_extra_args": ["--capture-range=none"]}),
    ],
)
def test_an_untried_nsys_and_one_with_several_captures_get_the_users_directives_alone(version, settings):
    assert directives(version, command(version, **settings)[0][2:], {DIRECTIVES_VARIABLE: "A=1"}) == "A=1"


@pytest.mark.parametrize(("cuda", "expected"), [(True, "CuptiFinalizeOnStop=true"), (False, None)])
def test_a_rank_sets_the_directives_of_its_nsys_if_there_is_cuda(cuda, expected, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(nsys_launch, "find_nsys", lambda: DETACHES)
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(os.environ.get(DIRECTIVES_VARIABLE)))
    monkeypatch.setattr(os, "environ", {**os.environ, "BRIDGE_PROFILING_DIR": str(tmp_path)})
    config = ProfilingConfig(use_nsys_profiler=True, profile_step_start=2, profile_step_end=4)
    start_under_nsys(config, rank=0, layout=ParallelLayout(world_size=1), local_rank=0, cuda=cuda)
    assert started == [expected]


#: Stands in for an nsys of 2024: prints the options it knows, the GPUs it samples, and the arguments it is run with.
NSYS = """#!/bin/bash
if [[ "$2" == --help ]]; then printf '\\t--trace=\\n\\t--gpu-metrics-device=\\n'; exit; fi
if [[ "$2" == *=help ]]; then printf 'Possible values of %s are:\\n\\t0: a GPU\\n' "$2"; exit; fi
printf '%s\\n' "$@"
"""


@pytest.mark.parametrize(
    ("gpu_metrics", "sampled"),
    [("", []), ("all", ["--gpu-metrics-device=all"]), ("local", ["--gpu-metrics-device=3"])],
)
def test_the_prefix_renames_options_leaves_out_unknown_ones_and_drops_the_empty_argument(gpu_metrics, sampled, tmp_path):
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    prefix = ["profile", "-s", "none", "-o", f"{tmp_path}/reports/profile_%p", "--trace", "nvtx"]
    prefix += ["--gpu-metrics-devices=0", "--cuda-event-trace=false", "$GPU_METRICS_FLAG"]
    command = ["bash", *prefix_command(prefix, gpu_metrics=gpu_metrics), "python", "a b.py", ""]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_LOCALID": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    fitted = ["profile", "-s", "none", "-o", f"{tmp_path}/reports/profile_%p", "--trace=nvtx", "--gpu-metrics-device=0"]
    assert done.stdout.splitlines() == [*fitted, *sampled, "python", "a b.py"]
    assert "this nsys does not know --cuda-event-trace: left out --cuda-event-trace=false" in done.stderr
    assert "nsys left no report under" in done.stderr
    assert list((tmp_path / "reports").iterdir()) == []
