"""A rank sends heartbeats to the launcher's monitor, which is a real one here, and says what it has to expect of it."""

import gc
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

ON = FaultToleranceConfig(enable_ft_package=True)


def test_without_a_monitor_training_goes_on_and_the_line_says_who_would_start_one(monkeypatch):
    monkeypatch.delenv(MONITOR_VARIABLE, raising=False)
    with RankMonitor(ON) as rank:
        rank.send()
        assert re.search("these ranks are not monitored.*FaultTolerancePlugin", rank.describe())
    # Switched off, it does not look for one.
    monkeypatch.setenv(MONITOR_VARIABLE, "/nowhere/socket")
    with RankMonitor(FaultToleranceConfig()) as rank:
        assert rank.describe() is None


def test_asked_for_and_not_installed_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    check_installed(FaultToleranceConfig())
    with pytest.raises(ProfilingConfigError, match=r"pip install .*ft.enable_ft_package=false"):
        check_installed(ON)


@pytest.fixture
def monitor(tmp_path, monkeypatch):
    """A monitor as ft_launcher starts one for each rank, for this process, the only rank."""
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
    yield
    torch.distributed.destroy_process_group()
    monitor.terminate()
    monitor.join()


@pytest.mark.integration
def test_a_monitored_rank_says_after_how_long_it_is_killed(monitor):
    with RankMonitor(ON) as rank:
        rank.send()
        assert "without a first heartbeat after 600 s, or a later one after 300 s" in rank.describe()
