"""The nsys command of a rank; that it runs is shown by tests/system/test_nsys.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_profiling.capture.nsys_launch import nsys_command
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.nsys_versions import NsysVersion

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
    return nsys_command(ProfilingConfig(**settings), version, report=Path("/out/report"), local_rank=0, cuda=cuda)


def test_the_default_is_the_cheap_one():
    assert command() == (
        [
            "/opt/nsys", "profile", "--trace=nvtx,cuda", "--output=/out/report", "--sample=none", "--cpuctxsw=none",
            "--cuda-graph-trace=node", "--cuda-event-trace=false", "--force-overwrite=true", "--kill=none", "--wait=primary",
            "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        ],
        [],
    )  # fmt: skip


def test_one_that_is_to_make_several_captures_is_told_how_many():
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
