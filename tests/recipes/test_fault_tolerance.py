"""A rank sends heartbeats and its time-outs to the launcher's monitor; the monitors here are real."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest

from bridge_profiling.config import FaultToleranceConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.overrides import apply_overrides

pytestmark = pytest.mark.needs("megatron")

resiliency = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance", reason="nvidia-resiliency-ext is not installed")

import torch  # noqa: E402

from recipes.finalize import finalize  # noqa: E402
from recipes.megatron.fault_tolerance import MONITOR_SOCKET, RankMonitor, check_installed  # noqa: E402
from recipes.models import gpt_tiny  # noqa: E402

ON = ["ft.enable_ft_package=true", "ft.calc_ft_timeouts=true"]


def opened(*overrides, start=0):
    """As rank 0 opens it; from `start` iterations on when a checkpoint holds so many."""
    config = gpt_tiny()
    apply_overrides(config, ["train.train_iters=40", *overrides])
    finalize(config, 1)
    config.train.start_iteration = start
    return RankMonitor(config, rank=0, resumed=start > 0)


@pytest.fixture
def start_monitor(tmp_path, monkeypatch):
    """Starts a monitor as ft_launcher starts one for each rank, and shows this process the way to it."""
    started = []

    def start(**timeouts):
        socket = str(tmp_path / "monitor.socket")
        config = resiliency.FaultToleranceConfig(enable_nic_monitor=False, **timeouts)
        context = torch.multiprocessing.get_context("fork")
        started.append(resiliency.RankMonitorServer.run_in_subprocess(config, socket, mp_ctx=context))
        monkeypatch.setenv(MONITOR_SOCKET, socket)
        monkeypatch.setenv("RANK", "0")
        return started[-1]

    yield start
    for monitor in started:
        monitor.terminate()
        monitor.join()


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def monitor(start_monitor, one_rank):
    start_monitor(initial_rank_heartbeat_timeout=600, rank_heartbeat_timeout=300, workload_check_interval=2)


def timeouts_of_the_monitor():
    """The time-outs that the monitor applies now, as it sends them to the next client."""
    client = resiliency.RankMonitorClient()
    client.init_workload_monitoring()
    client.shutdown_workload_monitoring()
    return client.cfg.initial_rank_heartbeat_timeout, client.cfg.rank_heartbeat_timeout


def train(rank, iterations, *, first=0, save_at=()):
    """The calls of the loop."""
    for completed in range(first + 1, first + iterations + 1):
        rank.iteration_done()
        if completed in save_at:
            rank.checkpoint_done(completed)


def directory(folder):
    return [f"checkpoint.save={folder}", f"checkpoint.load={folder}"]


def test_switched_off_it_neither_looks_for_a_monitor_nor_says_anything(monkeypatch):
    monkeypatch.setenv(MONITOR_SOCKET, "/nowhere/socket")
    with opened() as rank:
        train(rank, 20, save_at=[20])
        assert rank.describe() is None


def test_without_a_monitor_training_goes_on_and_the_line_says_who_would_start_one(monkeypatch):
    monkeypatch.delenv(MONITOR_SOCKET, raising=False)
    with opened(*ON) as rank:
        train(rank, 20, save_at=[20])
        assert "these ranks are not monitored" in rank.describe()
        assert "FaultTolerancePlugin" in rank.describe()


def test_asked_for_and_not_installed_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    check_installed(FaultToleranceConfig())
    with pytest.raises(ProfilingConfigError) as error:
        check_installed(FaultToleranceConfig(enable_ft_package=True))
    assert "pip install" in error.value.instead
    assert "ft.enable_ft_package=false" in error.value.instead


def test_the_launchers_time_outs_hold_until_others_are_calculated(monitor, tmp_path):
    with opened(*ON, *directory(tmp_path)) as rank:
        assert "without a first heartbeat after 600 s, or a later one after 300 s" in rank.describe()
        train(rank, 15, save_at=[15])  # 16 iterations are needed
    assert timeouts_of_the_monitor() == (600, 300)
    assert not (tmp_path / "ft_state.json").exists()


def test_at_a_checkpoint_the_time_outs_are_calculated_and_kept_beside_it(monitor, tmp_path, capsys):
    with opened(*ON, *directory(tmp_path)) as rank:
        train(rank, 20, save_at=[10, 20])
    # Iterations of microseconds: 2 s is how often the monitor looks. How long loading takes was not seen, so 600 s stay.
    assert timeouts_of_the_monitor() == (600, 2)
    kept = json.loads((tmp_path / "ft_state.json").read_text())
    assert kept["current_timeouts"]["heartbeat"] == {"initial": 600, "subsequent": 2, "were_calculated": True}
    assert f"kept in {tmp_path}/ft_state.json" in capsys.readouterr().out


def test_a_rank_that_resumed_knows_how_long_its_start_takes(monitor, tmp_path):
    with opened(*ON, *directory(tmp_path), start=10) as rank:
        train(rank, 20, first=10, save_at=[30])
    assert timeouts_of_the_monitor()[0] < 600


@pytest.fixture
def kept(tmp_path):
    state = {"current_timeouts": {"heartbeat": {"initial": 50.0, "subsequent": 7.0, "were_calculated": True}}}
    (tmp_path / "ft_state.json").write_text(json.dumps(state))


def test_a_resumed_rank_goes_by_the_kept_time_outs(monitor, kept, tmp_path):
    with opened(*ON, *directory(tmp_path), start=10) as rank:
        assert "after 50 s, or a later one after 7 s" in rank.describe()
    assert timeouts_of_the_monitor() == (50, 7)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (ON, 0),
        (ON[:1], 10),
        ([*ON, "profiling.use_pytorch_profiler=true", "profiling.profile_step_end=12"], 10),
    ],
    ids=["from scratch", "not asked for", "the window ahead"],
)
def test_kept_time_outs_are_left_where_they_would_not_be_true(overrides, start, monitor, kept, tmp_path):
    with opened(*overrides, *directory(tmp_path), start=start):
        pass
    assert timeouts_of_the_monitor() == (600, 300)


def test_nothing_is_calculated_before_the_window_lies_behind(monitor, tmp_path):
    window = ["profiling.use_pytorch_profiler=true", "profiling.profile_step_start=28", "profiling.profile_step_end=30"]
    with opened(*ON, *directory(tmp_path), *window) as rank:
        train(rank, 29, save_at=[20, 29])
        assert not (tmp_path / "ft_state.json").exists()
        train(rank, 1, first=29, save_at=[30])
    assert timeouts_of_the_monitor() == (600, 2)


def test_nothing_is_calculated_before_an_evaluation_was_seen(monitor, tmp_path):
    with opened(*ON, *directory(tmp_path), "train.eval_interval=30") as rank:
        train(rank, 20, save_at=[20])
        assert not (tmp_path / "ft_state.json").exists()
        rank.evaluation_done()
        train(rank, 1, first=20, save_at=[21])
    assert (tmp_path / "ft_state.json").exists()


def test_without_one_directory_for_checkpoints_the_line_says_that_nothing_is_calculated(monitor, tmp_path):
    with opened(*ON, f"checkpoint.save={tmp_path}") as rank:
        assert "checkpoint.save and checkpoint.load are not one directory" in rank.describe()
        train(rank, 20, save_at=[20])
    assert timeouts_of_the_monitor() == (600, 300)


@pytest.mark.parametrize("content", ["", "[1", "3", '{"current_timeouts": {"heartbeat": {"first": 1}}}'])
def test_a_file_that_cannot_be_read_leaves_the_launchers_time_outs(content, monitor, tmp_path, capsys):
    (tmp_path / "ft_state.json").write_text(content)
    with opened(*ON, *directory(tmp_path), start=10):
        pass
    assert timeouts_of_the_monitor() == (600, 300)
    assert f"{tmp_path}/ft_state.json is not used" in capsys.readouterr().out


def test_a_rank_whose_monitor_is_gone_fails_so_that_the_launcher_starts_it_again(start_monitor):
    gone = start_monitor(rank_heartbeat_timeout=300)
    with opened(ON[0]) as rank:
        rank.iteration_done()
        gone.kill()
        gone.join()
        with pytest.raises(resiliency.RankMonitorClientError):
            rank.iteration_done()


@pytest.fixture
def exit_code(start_monitor):
    """Lets a rank live in a process of its own, where a heartbeat is due every 3 s; gives that process's exit code."""
    start_monitor(initial_rank_heartbeat_timeout=60, rank_heartbeat_timeout=3, workload_check_interval=0.2)

    def run(live, *arguments):
        rank = torch.multiprocessing.get_context("fork").Process(target=live, args=arguments)
        rank.start()
        rank.join(120)
        return rank.exitcode

    return run


def beat_for_4_seconds_and_fall_silent(last_words):
    with opened(ON[0]) as rank:
        for _ in range(20):
            time.sleep(0.2)
            rank.iteration_done()
        last_words.write_text("20 heartbeats")
        time.sleep(300)


def test_a_rank_lives_while_it_beats_and_is_killed_when_it_falls_silent(exit_code, tmp_path):
    assert exit_code(beat_for_4_seconds_and_fall_silent, tmp_path / "last words") == -signal.SIGKILL
    assert (tmp_path / "last words").read_text() == "20 heartbeats"


def leave_and_live_on_for_4_seconds():
    with opened(ON[0]) as rank:
        rank.iteration_done()
    time.sleep(4)


def test_a_rank_that_has_left_is_not_watched_any_more(exit_code):
    assert exit_code(leave_and_live_on_for_4_seconds) == 0
