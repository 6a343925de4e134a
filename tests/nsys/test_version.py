"""Options fitted to the nsys of a machine; the answers of real programs, 2024.2.3 and 2025.3.1, shortened."""

from __future__ import annotations

import pytest

from bridge_profiling.errors import CaptureError
from bridge_profiling.nsys import command as nsys_command
from bridge_profiling.nsys.command import NsysVersion, find_nsys

HELP_2024 = """
usage: nsys profile [<args>] [application] [<application args>]

	-c, --capture-range=
	--cuda-graph-trace=<granularity>[:<launch origin>]
	--gpu-metrics-device=
	-s, --sample=
	-t, --trace=
"""

OLD = NsysVersion(
    "/opt/nsys", "2024.2.3", frozenset({"--capture-range", "--cuda-graph-trace", "--gpu-metrics-device", "--trace"})
)
NEW = NsysVersion(
    "/opt/nsys", "2025.3.1", OLD.options - {"--gpu-metrics-device"} | {"--gpu-metrics-devices", "--cuda-event-trace"}
)


def program(folder, text):
    path = folder / "nsys"
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)
    return path


def test_a_version_and_its_options_are_what_the_program_says(tmp_path, monkeypatch):
    program(
        tmp_path,
        f"if [ $1 = --version ]; then echo NVIDIA Nsight Systems version 2024.2.3.38; else cat <<'E'\n{HELP_2024}\nE\nfi",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = find_nsys()
    assert found.text == "2024.2.3.38"
    assert found.options == {"--capture-range", "--cuda-graph-trace", "--gpu-metrics-device", "--sample", "--trace"}


def test_a_program_that_is_no_nsys_is_refused(tmp_path, monkeypatch):
    program(tmp_path, "echo hello")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(CaptureError, match="does not answer as nsys does"):
        find_nsys()


def test_a_missing_program_is_said_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CaptureError, match="not on PATH here"):
        find_nsys()


@pytest.mark.parametrize(
    ("version", "options", "adapted", "warned"),
    [
        (OLD, ["--capture-range=nvtx", "-t", "cuda"], ["--capture-range=nvtx", "-t", "cuda"], []),
        (OLD, ["--cuda-event-trace=false", "--trace=nvtx"], ["--trace=nvtx"], ["--cuda-event-trace"]),
        (OLD, ["--cuda-event-trace", "false", "--trace", "nvtx"], ["--trace", "nvtx"], ["--cuda-event-trace"]),
        (NEW, ["--cuda-event-trace=false"], ["--cuda-event-trace=false"], []),
        (OLD, ["--gpu-metrics-devices=0"], ["--gpu-metrics-device=0"], ["as --gpu-metrics-device"]),
        (NEW, ["--gpu-metrics-device", "0"], ["--gpu-metrics-devices", "0"], ["as --gpu-metrics-devices"]),
        (NEW, ["--gpu-metrics-devices=0"], ["--gpu-metrics-devices=0"], []),
    ],
)
def test_options_are_renamed_or_left_out_and_each_is_named(version, options, adapted, warned):
    result, warnings = version.adapt(options)
    assert result == adapted
    assert len(warnings) == len(warned)
    for text, expected in zip(warnings.values(), warned, strict=True):
        assert expected in text
        assert version.text in text


DEVICES = """Possible --gpu-metrics-device values are:
	0: NVIDIA H100 80GB HBM3 PCI[0000:19:00.0]
	3: NVIDIA H100 80GB HBM3 PCI[0000:3b:00.0]
	all: Select all supported GPUs
	none: Disable GPU Metrics [Default]
"""
REFUSED = """Possible --gpu-metrics-device values are:
	Insufficient privilege, see https://developer.nvidia.com/ERR_NVGPUCTRPERM
"""


@pytest.mark.parametrize(("visible", "local_rank", "device"), [("", 0, "0"), ("0,3", 1, "3"), ("GPU-aa,GPU-bb", 0, "0")])
def test_a_rank_samples_its_own_gpu(monkeypatch, visible, local_rank, device):
    monkeypatch.setattr(nsys_command, "run_nsys", lambda *arguments: DEVICES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert OLD.gpu_metrics_device(local_rank) == device


@pytest.mark.parametrize(("answer", "local_rank", "why"), [(REFUSED, 0, "ERR_NVGPUCTRPERM"), (DEVICES, 1, "not of 1")])
def test_a_gpu_that_cannot_be_sampled_is_reported_in_nsys_words(monkeypatch, answer, local_rank, why):
    monkeypatch.setattr(nsys_command, "run_nsys", lambda *arguments: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(CaptureError, match=why):
        OLD.gpu_metrics_device(local_rank)
