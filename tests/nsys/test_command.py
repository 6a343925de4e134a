"""Command lines of nsys and the files shared with its supervisor; tests/system/test_nsys.py runs them with a real nsys."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from bridge_profiling.capture import ParallelLayout, start_under_nsys
from bridge_profiling.capture.nsys_profiler import nsys_request
from bridge_profiling.common.errors import CaptureError
from bridge_profiling.nsys import command as nsys_command
from bridge_profiling.nsys import launch as nsys_launch
from bridge_profiling.nsys.channel import CHANNEL_VARIABLE, Capture, Channel, Spec, Training
from bridge_profiling.settings.profiling import ProfilingConfig

ALL = "--trace --output --sample --cpuctxsw --cuda-graph-trace --force-overwrite --kill --wait --capture-range"
ALL += " --capture-range-end --nvtx-capture --delay --export"
OLD = nsys_command.NsysVersion("/opt/nsys", "2024.2", frozenset([*ALL.split(), "--gpu-metrics-device"]))
NEW = nsys_command.NsysVersion("/opt/nsys", "2025.5", frozenset([*ALL.split(), "--gpu-metrics-devices", "--cuda-event-trace"]))
DETACHES = nsys_command.NsysVersion("/opt/nsys", "2024.2.3.38-242334140272v0", OLD.options)

DEVICES = "Possible --gpu-metrics-device values are:\n\t0: NVIDIA H100 80GB\n\t3: NVIDIA H100 80GB\n\tall: Select all\n"
UNSUPPORTED = "Possible --gpu-metrics-device values are:\n\tSome GPUs are not supported:\n\tCan't load NVPW library.\n"


def command(version=NEW, cuda=True, **settings):
    request = nsys_request(ProfilingConfig(**settings), rank=0, local_rank=0, cuda=cuda)
    return nsys_command.profile_command(request, version, report=Path("/out/report"))


def test_a_version_and_its_options_are_as_the_program_prints_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CaptureError, match="not on PATH here"):
        nsys_command.find_nsys()
    monkeypatch.setattr("shutil.which", lambda name: f"/opt/{name}")
    version, known = "NVIDIA Nsight Systems version 2024.2.3.38", "\t-t, --trace=\n\t--sample=<how>\n\t--gpu-metrics-device=\n"
    answers = {}
    monkeypatch.setattr(nsys_command, "run_nsys", lambda executable, *arguments: answers[arguments[-1]])
    for answers["--version"], answers["--help"] in (("hello", known), (version, "--sample=<how>"), ("hello", "hello")):
        with pytest.raises(CaptureError, match="does not answer as nsys does"):
            nsys_command.find_nsys()
    answers |= {"--version": version, "--help": known}
    found = nsys_command.find_nsys()
    assert (found.text, found.options) == ("2024.2.3.38", {"--trace", "--sample", "--gpu-metrics-device"})


def test_nsys_takes_the_reports_path_as_it_is():
    request = nsys_request(ProfilingConfig(), rank=0, local_rank=0, cuda=True)
    command, _ = nsys_command.profile_command(request, NEW, report=Path("/100%/%q{HOME}"))
    assert "--output=/100%%/%%q{HOME}" in command


@pytest.mark.parametrize(
    ("version", "options", "adapted", "warned"),
    [
        (OLD, ["--capture-range=nvtx", "-t", "cuda"], ["--capture-range=nvtx", "-t", "cuda"], []),
        (OLD, ["--cuda-event-trace=false", "--trace=nvtx"], ["--trace=nvtx"], ["--cuda-event-trace"]),
        (OLD, ["--cuda-event-trace", "false", "--trace", "nvtx"], ["--trace", "nvtx"], ["--cuda-event-trace"]),
        (OLD, ["--gpu-metrics-devices=0"], ["--gpu-metrics-device=0"], ["as --gpu-metrics-device"]),
    ],
)
def test_options_are_renamed_or_left_out_and_each_is_named(version, options, adapted, warned):
    result, warnings = version.adapt(options)
    assert result == adapted
    assert all(each in text and version.text in text for text, each in zip(warnings.values(), warned, strict=True))


@pytest.mark.parametrize(
    ("answer", "visible", "local_rank", "device"),
    [(DEVICES, "", 0, "0"), (DEVICES, "0,3", 1, "3"), (DEVICES, "GPU-aa,GPU-bb", 0, "0"), (DEVICES, "", 1, "not of 1"),
     (UNSUPPORTED, "", 0, "Can't load NVPW library")],
)  # fmt: skip
def test_a_rank_samples_its_own_gpu_or_gives_nsys_reason(monkeypatch, answer, visible, local_rank, device):
    monkeypatch.setattr(nsys_command, "run_nsys", lambda *arguments: answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with nullcontext() if device.isdigit() else pytest.raises(CaptureError, match=device):
        assert OLD.gpu_metrics_device(local_rank) == device


@pytest.mark.parametrize(("answer", "kept"), [(DEVICES, True), (UNSUPPORTED, False)])
def test_metrics_that_nsys_cannot_sample_are_left_out_of_the_users_options(monkeypatch, answer, kept):
    monkeypatch.setattr(nsys_command, "run_nsys", lambda *arguments: answer)
    options, warnings = command(OLD, nsys_extra_args=["--gpu-metrics-device", "all"])
    assert (options[-2:] == ["--gpu-metrics-device", "all"], "Can't load NVPW" in " ".join(warnings)) == (kept, not kept)
    assert bool(command(NEW, nsys_gpu_metrics=True)[1]) != kept


def test_the_default_is_the_cheap_one():
    assert command() == (
        [
            "/opt/nsys", "profile", "--trace=nvtx,cuda", "--output=/out/report", "--sample=none", "--cpuctxsw=none",
            "--cuda-graph-trace=node", "--cuda-event-trace=false", "--force-overwrite=true", "--kill=none", "--wait=primary",
            "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        ],
        [],
    )  # fmt: skip


REPEATED = {"use_nsys_profiler": True, "profile_every": 10, "profile_at_most": 3}
NVTX = ["--trace=nvtx", "--capture-range=nvtx", "--nvtx-capture=bridge_profiling_window"]
WITHOUT_CUDA = {"cuda": False, "nsys_trace": ["cuda", "osrt", "cudnn"], "nsys_gpu_metrics": True}
NO_CUDA = ["no CUDA device: left out --trace=cuda,cudnn", "no CUDA device: no GPU metrics"]
UNKNOWN = "nsys 2024.2 does not know --cuda-event-trace: left out --cuda-event-trace=true"


@pytest.mark.parametrize(
    ("version", "settings", "contained", "left_out", "warned"),
    [
        (NEW, {"use_nsys_profiler": True, "nsys_captures": 4}, ["--capture-range-end=repeat:4"], [], []),
        (NEW, REPEATED, ["--capture-range-end=repeat:3"], [], []),
        # A default that an older nsys does not know goes without a word, and an option of the user's does not.
        (OLD, {}, [], ["--cuda-event-trace=false"], []),
        (OLD, {"nsys_extra_args": ["--cuda-event-trace=true"]}, [], ["--cuda-event-trace=true"], [UNKNOWN]),
        (NEW, {"nsys_extra_args": ["--sample=process-tree", "--delay=30"]}, ["--delay=30"], ["--sample=none"], []),
        (NEW, {"nsys_extra_args": ["-s", "process-tree", "-y", "30"]}, ["-s", "process-tree"], ["--sample=none"], []),
        (NEW, {"cuda": False}, NVTX, [], []),
        (NEW, WITHOUT_CUDA, ["--trace=osrt"], [], NO_CUDA),
    ],
)
def test_options_follow_the_settings_the_user_and_the_machine(version, settings, contained, left_out, warned):
    options, warnings = command(version, **settings)
    assert set(contained) <= set(options)
    assert not set(left_out) & set(options)
    assert warnings == warned


@pytest.mark.parametrize(
    ("version", "settings", "own", "expected"),
    [
        (DETACHES, {}, "", "CuptiFinalizeOnStop=true"),
        (DETACHES, {}, "AgentLaunchTimeoutSec=240;", "AgentLaunchTimeoutSec=240;CuptiFinalizeOnStop=true"),
        (DETACHES, {}, "CuptiFinalizeOnStop=false", "CuptiFinalizeOnStop=false"),
        (NEW, {}, "A=1", "A=1"),
        (DETACHES, {"use_nsys_profiler": True, "nsys_captures": 2}, "A=1", "A=1"),
        (DETACHES, {"nsys_extra_args": ["--capture-range=none"]}, "A=1", "A=1"),
    ],
)
def test_cupti_is_detached_after_the_only_capture_unless_the_user_says_otherwise(version, settings, own, expected):
    options, environ = command(version, **settings)[0][2:], {nsys_command.DIRECTIVES_VARIABLE: own}
    assert nsys_command.directives(version, options, environ) == expected


@pytest.mark.parametrize(
    ("cuda", "captures", "variable", "expected"),
    [
        (True, 1, "ANY", [("CuptiFinalizeOnStop=true", True)]),
        (False, 1, "ANY", [(None, True)]),
        (False, 2, "ANY", [(None, False)]),  # the reports come after the last capture
        (True, 1, "NSYS_PROFILING_SESSION_ID", []),
        (True, 1, nsys_launch.REFUSED_VARIABLE, []),
        (True, 1, "FT_RANK_MONITOR_IPC_SOCKET", []),  # under ft_launcher
    ],
)
def test_a_rank_starts_nsys_once_and_sets_directives_with_cuda(cuda, captures, variable, expected, monkeypatch, tmp_path):
    started = []

    def start(*_):
        spec = nsys_launch.Channel.of_this_process(os.environ).spec
        started.append((os.environ.get(nsys_command.DIRECTIVES_VARIABLE), spec.reports_with_range))

    monkeypatch.setattr(nsys_launch, "find_nsys", lambda: DETACHES)
    monkeypatch.setattr(os, "execv", start)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(os, "environ", {**os.environ, "BRIDGE_PROFILING_DIR": str(tmp_path)})
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py"])
    config = ProfilingConfig(use_nsys_profiler=True, profile_step_start=2, profile_step_end=4, nsys_captures=captures)
    start_under_nsys(config, rank=0, layout=ParallelLayout(world_size=1), local_rank=0, cuda=cuda)
    assert started == expected


@pytest.mark.parametrize(("known", "asked"), [("--include-blobs=true|false", True), ("--type=", False)])
def test_nccls_messages_are_exported_by_an_nsys_that_leaves_them_out(known, asked, monkeypatch):
    monkeypatch.setattr(nsys_command, "run_nsys", lambda *arguments: known)
    command = nsys_command.export_command("nsys", Path("a.nsys-rep"), Path("a.sqlite"))
    assert ("--include-blobs=true" in command) is asked


@pytest.mark.parametrize("launcher", [[], [(20, ["torchrun", "train.py"]), (15, ["nsys-launcher"])]])
def test_the_report_of_an_nsys_above_is_the_one_that_its_output_names(launcher, monkeypatch):
    commands = [(os.getpid(), ["python", "train.py"]), *launcher]
    application, command = commands[min(1, len(launcher))]
    commands.append((10, ["/opt/nsys", "profile", "--output=lr=1/%p", *command]))
    monkeypatch.setattr(nsys_launch, "ancestors", lambda pid: [pid for pid, _ in commands[1:]])
    monkeypatch.setattr(nsys_launch, "command_of", dict(commands).get)
    monkeypatch.setattr(nsys_launch, "environment_of", lambda pid: {})
    monkeypatch.setattr(nsys_launch, "working_directory_of", lambda pid: Path("/runs"))
    found = nsys_launch.ExternalNsys.of_this_process()
    assert (found.report, found.wraps_one_rank) == (Path(f"/runs/lr=1/{application}.nsys-rep"), not launcher)


@pytest.mark.parametrize(
    ("writers", "written", "message"), [([[7], []], True, None), ([[], [], []], False, "nsys left no report")]
)
def test_a_report_is_complete_when_no_process_writes_it(writers, written, message, monkeypatch, tmp_path):
    monkeypatch.setattr(nsys_launch, "ancestors", lambda pid: [])
    monkeypatch.setattr(nsys_launch, "find_by_argument", lambda argument: writers.pop(0))
    commands = iter([["nsys"], ["nsys"], ["nsys"], []])
    monkeypatch.setattr(nsys_launch, "command_of", lambda pid: next(commands))
    report = tmp_path / "a.nsys-rep"
    nsys = nsys_launch.ExternalNsys(10, report, stops_with_range=True, wraps_one_rank=True)
    if written:
        report.touch()
    with pytest.raises(CaptureError, match=message) if message else nullcontext():
        assert nsys.await_report() == report
    assert (len(writers), len(list(commands))) == (0, 1 if written else 0)


@pytest.mark.parametrize(
    ("options", "captures", "at_its_end"),
    [("", 1, True), ("-end=repeat:3", 3, True), ("-end=stop", 1, True), ("-end=none", 1, False)],
)
def test_options_say_how_many_ranges_are_captured_and_when_the_report_is_written(options, captures, at_its_end):
    arguments = ["--capture-range=nvtx", *([f"--capture-range{options}"] if options else [])]
    assert (nsys_command.captures_of(arguments), nsys_command.reports_with_range(arguments)) == (captures, at_its_end)


PATHS = {"nsys": ["nsys", "profile"], "command": ["python", "train.py"], "report": "report.nsys-rep"}
SPEC = Spec(rank=0, supervisor=1, notes=[], export_sqlite=False, captures=2, reports_with_range=False, **PATHS)


def test_captures_are_numbered_and_one_that_never_stopped_is_replaced(tmp_path):
    channel = Channel(tmp_path)
    channel.write(SPEC)
    first, second = Capture("m1", "r1"), Capture("m2", "r2")
    assert channel.announce(first) == channel.announce(second) == 1
    channel.write(replace(second, stopped=True), 1)
    assert channel.announce(first) == 2
    channel.write(replace(first, stopped=True), 2)
    with pytest.raises(CaptureError, match="make 2 captures and has made them"):
        channel.announce(first)


def test_a_process_that_the_training_started_has_no_channel(tmp_path):
    """A message that is damaged is none."""
    channel, environ = Channel(tmp_path), {CHANNEL_VARIABLE: str(tmp_path)}
    assert Channel.of_this_process({}) is None
    assert Channel.of_this_process(environ) == channel
    (tmp_path / "training.json").write_text(f'{{"pid": {os.getppid()}, "more": 2}}')
    assert Channel.of_this_process(environ) == channel
    for pid, expected in ((os.getpid(), channel), (os.getppid(), None)):
        channel.write(Training(pid))
        assert Channel.of_this_process(environ) == expected
