"""Operators on the CPU that prepare a batch are data loading, and others are not."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

from bridge_profiling.facts.host_ranges import StretchCollector
from bridge_profiling.findings.idle import data_loading
from tests.findings.simulated_jobs import MS, US, SimulatedJob


def _compute(job, count=8):
    for _ in range(count):
        job.be_in(0, "aten::index", 1 * MS, category="operator")


def _step(*, read_bytes=0, within=None, copies=True):
    def step(job, _):
        if read_bytes:
            job.copy(0, 10 * US, memory="pageable", size=read_bytes, out=True)
        with job.within(within) if within else nullcontext():
            _compute(job)
        if copies:
            job.copy(0, 100 * US, memory="pinned")
        job.busy()

    return step


@pytest.mark.parametrize("read_bytes", [0, 8])
def test_operators_before_a_copy_to_the_device_prepare_a_batch(find, read_bytes):
    (found,) = find(SimulatedJob(_step(read_bytes=read_bytes)), data_loading).values()
    assert found.recoverable_us_per_iteration == pytest.approx(8_000, rel=0.05)
    assert found.title.startswith("Preparing data with operators on the CPU stalls")
    assert "workers" in found.action
    assert {event.name for event in found.events} == {"operators on the CPU, before a copy to the device"}


@pytest.mark.parametrize(
    "how",
    [
        {"copies": False},
        {"read_bytes": 1 << 20},  # metrics of what the device computed
        {"within": "Optimizer.step#AdamW.step"},  # states in the host's memory
    ],
)
def test_other_operators_on_the_cpu_load_nothing(find, how):
    assert not find(SimulatedJob(_step(**how)), data_loading)


def test_a_program_that_thinks_longer_than_it_computes_is_not_known_to_load(find):
    def step(job, _):
        _compute(job, 3)
        job.host_ns[0] += 4 * MS
        job.copy(0, 100 * US, memory="pinned")
        job.busy()

    assert not find(SimulatedJob(step), data_loading)


def test_stretches_are_the_same_in_blocks_of_any_size():
    chance, now_ns, rows = random.Random(1), 0, []
    for _ in range(2_000):
        now_ns += chance.choice([1, 50, 200]) * US
        called = chance.random() < 0.1
        took_ns = 5 * US if called else chance.choice([10, 900]) * US
        rows.append((now_ns, now_ns + took_ns, called, called and chance.random() < 0.8))
        now_ns += 0 if chance.random() < 0.2 and not called else took_ns
    start, end, called, enqueues = (np.array(column) for column in zip(*rows, strict=True))
    found = []
    for size in (len(rows), 1, 7):
        collector = StretchCollector()
        for begin in range(0, len(rows), size):
            block = slice(begin, begin + size)
            collector.add(start[block], end[block], called[block], enqueues[block])
        stretches = collector.result()
        found.append([*stretches.time.start_ns, *stretches.time.end_ns, *stretches.after_ns, *stretches.before_ns])
    assert len(found[0]) > 4 * 10
    assert found[0] == found[1] == found[2]
