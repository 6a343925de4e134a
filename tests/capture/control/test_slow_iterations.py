"""The one capture that slow iterations lead to."""

import re
import time

import pytest

from bridge_profiling.capture import ProfilingHook, hook
from bridge_profiling.slow_iterations import COOL_DOWN


@pytest.fixture
def lose_time(monkeypatch):
    """Makes the running iteration 1.5 s longer, on the hook's clock alone."""
    lost = []
    monkeypatch.setattr(hook, "perf_counter_ns", lambda: time.perf_counter_ns() + sum(lost))
    return lambda: lost.append(1_500_000_000)


def test_a_slow_iteration_is_captured_once_with_its_reason(run, lose_time):
    """A second one comes well after the first one's capture, and one capture is what was allowed."""
    slow = [60]

    def on_iteration(iteration):
        if iteration in slow:
            lose_time()
        if run.done() and len(slow) == 1:
            slow.append(iteration + COOL_DOWN + 60)

    config = run.config(5, 7, use_pytorch_profiler=False, slow_iteration_factor=100.0)
    run.listen(range(10**5), on_iteration, config=config, until=lambda: len(slow) == 2 and len(run.losses) > slow[1] + 60)
    [folder] = run.folders()
    assert run.outcome(folder)[0] == "complete"
    manifest = run.manifest(folder)
    assert manifest["window"]["end"] - manifest["window"]["start"] == 2
    assert manifest["window"]["start"] > 60
    assert (manifest["trigger"]["kind"], manifest["trigger"]["requested_by"]) == ("slow_iteration", "rank 0")
    reason = re.fullmatch(r"iteration 60 took ([\d.]+) ms, [\d.]+ x the median .* on rank 0", manifest["trigger"]["reason"])
    assert reason is not None
    assert float(reason[1]) >= 1500
    profiled, run.losses = run.losses, []
    run.train(None, range(len(profiled)))
    assert profiled == run.losses


def test_a_checkpoint_or_an_evaluation_inside_an_iteration_does_not_make_it_slow(run, lose_time):
    config = run.config(use_pytorch_profiler=False, slow_iteration_factor=100.0, on_demand_seconds=0.03)
    with ProfilingHook(config, rank=0, output_dir=run.root) as opened:
        for iteration in range(60):
            with opened.iteration(iteration), opened.range({40: "checkpoint", 45: "evaluation"}.get(iteration, "")):
                time.sleep(0.004)
                if iteration in (40, 45):
                    lose_time()
        time.sleep(0.1)
    assert run.folders() == []
