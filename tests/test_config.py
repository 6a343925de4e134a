"""finalize() refuses what cannot be carried out, and says what to type instead."""

import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest

from bridge_profiling import ProfilingConfig, ProfilingConfigError
from bridge_profiling.common.slow_iterations import SlowThreshold, SlowWatch, slow_threshold
from bridge_profiling.manifest import Window
from bridge_profiling.settings.window import ARGUMENTS, FIELDS, OPTIONS, check_request


def test_the_defaults_are_megatron_bridges():
    config = ProfilingConfig()
    assert {config.use_nsys_profiler, config.use_pytorch_profiler, config.nsys_export_sqlite} == {False}
    assert (config.profile_step_start, config.profile_step_end, config.profile_ranks) == (10, 12, [0])
    assert config.memory_snapshot_path == "snapshot.pickle"
    config.finalize()
    with pytest.raises(TypeError):
        ProfilingConfig(True)


COUNTS = ("profile_at_most", "nsys_captures", "pytorch_profiler_warmup")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"use_nsys_profiler": True, "use_pytorch_profiler": True}, "Keep one of them"),
        ({"profile_step_start": -1}, "profile_step_start=-1 .*: -1 is not an integer from 0"),
        ({"profile_step_start": 5, "profile_step_end": 5}, "window is empty.*profile_step_end=6 to capture"),
        ({"profile_step_start": 9, "profile_step_end": 5}, "Type profiling.profile_step_start=5 profiling.profile_step_end=9"),
        ({"profile_step_start": 1.5}, "not an integer"),
        ({"profile_ranks": []}, r"names no rank.*profile_ranks=all"),
        ({"profile_ranks": [0, -1]}, "holds -1"),
        ({"profile_ranks": "every"}, "the words are 'all' and 'pp'"),
        ({"profile_every": 1}, "an integer of at least 2; windows of 2 iterations would overlap.*profile_every=100"),
        ({"profile_every": 5, "profile_at_most": 0}, "profile_at_most=0 is not an integer of at least 1 and at most 1000"),
        ({"profile_every": 2**63 - 11, "profile_at_most": 2}, "window 2 of profiling.profile_every=.* ends after iteration"),
        ({"nsys_captures": 1001}, "nsys_captures=1001 is not an integer of at least 1 and at most 1000"),
        ({"on_demand_seconds": 0}, "on_demand_seconds=0 is not a number from 0.01"),
        ({"on_demand_seconds": 3601}, "on_demand_seconds=3601 is not a number from 0.01 to 3600"),
        ({"slow_iteration_factor": 1}, "factor=1 is not a number above 1.*slow_iteration_factor=2"),
        ({"slow_iteration_factor": 2, "slow_iteration_captures": 0}, "slow_iteration_captures=0 is not an integer"),
        ({"slow_iteration_factor": 2, "on_demand": False}, "Leave profiling.on_demand out"),
        *(({"nsys_trace": words}, r"profiling\.nsys_trace") for words in (["a b"], ["nvtx", "foo"])),
        *(({"nsys_extra_args": words}, r"profiling\.nsys_extra_args") for words in (["--output=x"], "--wait=all")),
        # The ends of a range are valid.
        ({"profile_step_start": 0, "profile_step_end": 1, "profile_every": 1}, None),
        (dict.fromkeys(COUNTS, 1) | {"on_demand_seconds": 0.01}, None),
        (dict.fromkeys(COUNTS, 1000) | {"on_demand_seconds": 3600}, None),
        ({"slow_iteration_factor": 1.01, "slow_iteration_captures": 1}, None),
    ],
)
def test_a_contradiction_is_refused_before_anything_runs(asked, message):
    config = ProfilingConfig(**asked)
    with pytest.raises(ProfilingConfigError, match=message) if message else nullcontext():
        config.finalize()


@pytest.mark.parametrize(("given", "kept"), [("all", "all"), ("pp", "pp"), (3, [3]), ((0, 1), [0, 1]), ([1, 1, 0], [1, 0])])
def test_ranks_take_one_form(given, kept):
    config = ProfilingConfig(profile_ranks=given)
    config.finalize(world_size=4)
    assert config.profile_ranks == kept


def test_ranks_and_a_window_must_be_inside_the_training_and_of_repeated_windows_only_the_first():
    window = {"profile_step_start": 4, "profile_step_end": 6, "profile_every": 10}
    config = ProfilingConfig(use_pytorch_profiler=True, profile_ranks=[0, 4, 7], **window)
    config.finalize(train_iters=6, world_size=8)
    assert [str(window) for window in config.windows[:3]] == ["4-6", "14-16", "24-26"]
    assert len(config.windows) == 10
    for job, message in (
        ({"train_iters": 5}, "exceeds train.train_iters=5; .*profile_step_start=3 profiling.profile_step_end=5"),
        ({"world_size": 4}, "names 4, 7, but the job has 4 ranks"),
    ):
        with pytest.raises(ProfilingConfigError, match=message):
            config.finalize(**job)
    ProfilingConfig().finalize(train_iters=3, world_size=1)  # no profiler: a short run may keep the default window


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        (FIELDS, "profiling.profile_step_start=9 profiling.profile_step_end=5.*Type profiling.profile_step_start=5 profiling"),
        (OPTIONS, "--steps 9:5: the window is empty.*Type --steps 5:9"),
        (ARGUMENTS, "^profile_step_start=9 profile_step_end=5: .*Type profile_step_start=5 profile_step_end=9"),
    ],
)
def test_one_check_names_a_request_as_its_caller_does(spelled, message):
    assert check_request(5, 9, [1, 1], spelled=spelled, train_iters=9, world_size=2) == (Window(5, 9), [1])
    with pytest.raises(ProfilingConfigError, match=message):
        check_request(9, 5, "all", spelled=spelled)
    with pytest.raises(ProfilingConfigError, match=f"exceeds {spelled.limit}=7; the last iteration is 6.*3.*7"):
        check_request(5, 9, "all", spelled=spelled, train_iters=7)
    with pytest.raises(ProfilingConfigError, match=f"^{spelled.ranks} names 2, but the job has 2 ranks.*{spelled.ranks}.all"):
        check_request(5, 9, [2, 0], spelled=spelled, world_size=2)
    with pytest.raises(ProfilingConfigError, match="0 is not an integer from 1"):
        check_request(0, 9, "all", spelled=replace(spelled, first=1))


@pytest.mark.parametrize(("rank", "warnings"), [("0", 1), ("1", 0)])
def test_under_ft_launcher_nsys_is_off_and_rank_0_warns_once(rank, warnings, monkeypatch, caplog):
    for name, value in {"FT_RANK_MONITOR_IPC_SOCKET": "/x", "RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config, torch = ProfilingConfig(use_nsys_profiler=True), ProfilingConfig(use_pytorch_profiler=True)
    for one in (config, config, torch):
        one.finalize()
    assert (config.use_nsys_profiler, torch.use_pytorch_profiler) == (False, True)
    assert caplog.text.count("Nsys not supported with the FaultTolerancePlugin") == warnings
    with pytest.raises(ProfilingConfigError, match="Keep one of them"):
        ProfilingConfig(use_nsys_profiler=True, use_pytorch_profiler=True).finalize()


def test_an_error_keeps_its_parts_across_processes():
    error = ProfilingConfigError("x is wrong", why="because", instead="Type y")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "x is wrong; because. Type y."
    assert (copy.what, copy.why, copy.instead) == ("x is wrong", "because", "Type y")


def test_the_threshold_is_a_multiple_of_the_median():
    durations = [3.0, 1.0, 2.0, 2.0] * 5
    assert slow_threshold(durations, factor=1.5, at_least=20) == SlowThreshold(above=3.0, median=2.0, count=20)


def durations(count, first=0, nanoseconds=10_000_000):
    return tuple((iteration, nanoseconds) for iteration in range(first, first + count))


def test_an_iteration_is_slow_against_the_median_of_those_before_it():
    watch = SlowWatch(2.0, lambda iteration: False)
    assert watch.check((*durations(10), (10, 10**9))) is None, "too few before it"
    watch = SlowWatch(2.0, lambda iteration: False)
    assert watch.check(durations(11)) is None
    assert watch.check((*durations(11), (11, 20_000_000))) is None, "not above the factor"
    slow = "iteration 12 took 23.0 ms, 2.3 x the median 10.0 ms of the 11 iterations before it"
    # Iteration 11 was compared before.
    assert watch.check((*durations(11), (11, 30_000_000), (12, 23_000_000))) == slow
    assert watch.check((*durations(11), (11, 10_000_000), (12, 23_000_000))) is None, "reported once"
