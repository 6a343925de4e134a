"""A rank sends heartbeats and its time-outs to the launcher's monitor; the monitors here are real."""

import gc
import json
import re
import sys

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.settings.profiling import FaultToleranceConfig

pytest.importorskip("megatron.core")
resiliency = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance", reason="nvidia-resiliency-ext is not installed")

import torch  # noqa: E402

from bridge_profiling.common.launch_env import MONITOR_VARIABLE  # noqa: E402
from recipes.megatron.fault_tolerance import RankMonitor, check_installed  # noqa: E402
from tests.recipes.builders import finalized  # noqa: E402
from tests.recipes.trainings import window  # noqa: E402

ENABLED = "ft.enable_ft_package=true"
ON = f"{ENABLED} ft.calc_ft_timeouts=true"


def opened(overrides, start=0):
    """As rank 0 opens it; from `start` iterations on when a checkpoint holds so many."""
    config = finalized("gpt_tiny", f"train.train_iters=40 {overrides}")
    config.train.start_iteration = start
    return RankMonitor(config, rank=0, resumed=start > 0)


@pytest.mark.parametrize(("overrides", "said"), [("", ""), (ON, "these ranks are not monitored.*FaultTolerancePlugin")])
def test_without_a_monitor_training_goes_on_and_the_line_says_who_would_start_one(monkeypatch, overrides, said):
    monkeypatch.delenv(MONITOR_VARIABLE, raising=False)
    if not overrides:
        # Switched off, it does not look for one.
        monkeypatch.setenv(MONITOR_VARIABLE, "/nowhere/socket")
    with opened(overrides) as rank:
        rank.iteration_done()
        rank.checkpoint_done(1)
        assert re.search(said, rank.describe()) if said else rank.describe() is None


def test_asked_for_and_not_installed_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    check_installed(FaultToleranceConfig())
    with pytest.raises(ProfilingConfigError, match=r"pip install .*ft.enable_ft_package=false"):
        check_installed(FaultToleranceConfig(enable_ft_package=True))


@pytest.fixture
def monitor(tmp_path, monkeypatch):
    """A monitor as ft_launcher starts one for each rank, for this process, the only rank.

    Gives the time-outs that it applies: a function, since it sends them to the next client.
    """
    socket = str(tmp_path / "monitor.socket")
    monkeypatch.setenv(MONITOR_VARIABLE, socket)
    monkeypatch.setenv("RANK", "0")
    timeouts = {"initial_rank_heartbeat_timeout": 600, "rank_heartbeat_timeout": 300, "workload_check_interval": 2}
    config = resiliency.FaultToleranceConfig(enable_nic_monitor=False, **timeouts)
    context = torch.multiprocessing.get_context("fork")
    # The fork would crash if it collected what other tests left: process groups have threads, which it lacks.
    gc.collect()
    gc.freeze()
    monitor = resiliency.RankMonitorServer.run_in_subprocess(config, socket, mp_ctx=context)
    gc.unfreeze()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)

    def applied():
        client = resiliency.RankMonitorClient()
        client.init_workload_monitoring()
        client.shutdown_workload_monitoring()
        return client.cfg.initial_rank_heartbeat_timeout, client.cfg.rank_heartbeat_timeout

    yield applied
    torch.distributed.destroy_process_group()
    monitor.terminate()
    monitor.join()


def train(rank, first, last):
    """The calls of the loop, with a checkpoint at the end."""
    for _ in range(first, last):
        rank.iteration_done()
    rank.checkpoint_done(last)


def directory(folder):
    return f"checkpoint.save={folder} checkpoint.load={folder}"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("overrides", "too_early", "seen"),
    [("", 15, 16), (window(28, 30), 29, 30), ("train.eval_interval=30", 20, 21)],
    ids=["16 iterations are needed", "not before the window lies behind", "not before an evaluation"],
)
def test_at_a_checkpoint_time_outs_are_calculated_and_kept(monitor, tmp_path, capsys, overrides, too_early, seen):
    file = tmp_path / "ft_state.json"
    with opened(f"{ON} {directory(tmp_path)} {overrides}") as rank:
        assert "without a first heartbeat after 600 s, or a later one after 300 s" in rank.describe()
        train(rank, 0, too_early)
        assert not file.exists()
        rank.evaluation_done()
        train(rank, too_early, seen)
    # Iterations of microseconds: 2 s is how often the monitor looks. How long loading takes was not seen, so 600 s stay.
    assert monitor() == (600, 2)
    kept = json.loads(file.read_text())["current_timeouts"]
    assert kept["heartbeat"] == {"initial": 600, "subsequent": 2, "were_calculated": True}
    assert f"kept in {file}" in capsys.readouterr().out


KEPT = '{"current_timeouts": {"heartbeat": {"initial": 50.0, "subsequent": 7.0, "were_calculated": true}}}'


@pytest.mark.integration
@pytest.mark.parametrize(
    ("overrides", "start", "kept", "timeouts"),
    [
        (ON, 10, KEPT, (50, 7)),
        (f"{ON} {window(10, 12)}", 10, KEPT, (600, 300)),
        (ON, 10, '{"current_timeouts": {"heartbeat": {"first": 1}}}', (600, 300)),
    ],
    ids=["resumed", "the window ahead", "of another kind"],
)
def test_kept_time_outs_hold_where_they_are_true(monitor, tmp_path, capsys, overrides, start, kept, timeouts):
    (tmp_path / "ft_state.json").write_text(kept)
    with opened(f"{overrides} {directory(tmp_path)}", start=start):
        pass
    assert monitor() == timeouts
    assert (f"{tmp_path}/ft_state.json is not used" in capsys.readouterr().out) == (kept is not KEPT)
