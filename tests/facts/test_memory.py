"""Memory over time: peaks, growth, sites, fragmentation, what changed."""

import pickle
import random
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.facts.memory import difference, memory_facts
from bridge_profiling.facts.memory_series import UNRECORDED, site
from bridge_profiling.traces import cache
from tests.facts.ranks_in_hand import rank, values

MIB = 1 << 20
S = 1_000_000_000

_TRAIN = "forward_step /home/me/train.py:40"
_LAYER = "forward /opt/venv/lib/python3.11/site-packages/megatron/core/tensor_parallel/layers.py:488"
_TORCH = "linear /opt/venv/lib/python3.11/site-packages/torch/nn/functional.py:2319"


def _allocation(size, begin, end, stack=_TRAIN):
    return {"device": 0, "bytes": size, "allocated_ns": begin, "free_requested_ns": end, "freed_ns": end, "stack": stack}


def _of_rank(table):
    return table.append_column("rank", pa.array([0] * len(table), pa.int32()))


def _recorded(folder, *, points=2000, source="memory", **tables):
    """The tables about memory of a capture, and the caveats of all of them."""
    cache.write(rank(source=source, **tables), folder / "0")
    kept = cache.open_entry(folder / "0")
    found = memory_facts(kept, kept["iterations"], points=points)
    return SimpleNamespace(caveats=found["memory"].caveats, **{name: _of_rank(fact.table) for name, fact in found.items()})


def test_the_peak_is_the_most_that_lived_at_once_with_what_was_there_before(tmp_path):
    # The largest is taken when another is freed.
    times = ((20, 2 * S, None), (900, 6 * S, 7 * S), (1000, 7 * S, 8 * S), (25, None, None))
    segments = [
        {"device": 0, "bytes": 4096, "allocated_ns": None, "active_bytes": 45, "largest_free_bytes": 1000},
        {"device": 0, "bytes": 2048, "allocated_ns": 6 * S, "active_bytes": 0, "largest_free_bytes": 2048},
    ]
    found = _recorded(tmp_path, allocations=[_allocation(*each) for each in times], segments=segments)
    names = ("peak_bytes", "peak_ns", "end_bytes", "peak_reserved_bytes", "end_reserved_bytes", "largest_free_bytes")
    expected = (1045, 7 * S, 45, 6144, 6144, 2048, pytest.approx(1 - 2048 / (6144 - 45)))
    assert values(found.memory, *names, "fragmentation") == [expected]
    assert values(found.memory_at_peak, "bytes", "allocated_ns") == [(1000, 7 * S), (25, None), (20, 2 * S)]


_TIMES = st.one_of(st.none(), st.integers(0, 12)), st.one_of(st.none(), st.integers(1, 9))


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 9), *_TIMES, st.integers(0, 2)), min_size=1, max_size=12))
def test_amounts_agree_with_counting_moment_by_moment(tmp_path_factory, rows):
    made = [
        _allocation(size, begin, None if lasts is None else (begin or 0) + lasts, f"f /me/a.py:{line}")
        for size, begin, lasts, line in rows
    ]
    found = _recorded(tmp_path_factory.mktemp("m"), allocations=made)
    # No time is later than 21.
    held = [sum(row["bytes"] for row in made if (row["allocated_ns"] or 0) <= at < (row["freed_ns"] or 99)) for at in range(30)]
    assert values(found.memory, "peak_bytes", "end_bytes") == [(max(held), held[-1])]
    assert sum(found.memory_at_peak["bytes"].to_pylist()) == sum(found.memory_sites["bytes_at_peak"].to_pylist()) == max(held)
    assert sum(found.memory_sites["end_bytes"].to_pylist()) == held[-1]


def _leaking():
    """Microbatches that allocate and free, an optimizer that stays, and a line that forgets to free."""
    made = [_allocation(500 * MIB, 1, None, "step /home/me/optimizer.py:7")]
    for begin in range(10 * S, 70 * S, 10 * S):
        made += [_allocation(1 * MIB, begin, begin + 9 * S), _allocation(3 * MIB, begin + 5, begin + 6 * S)]
        made.append(_allocation(2 * MIB, begin + 7, begin + 8 * S))
        for at in range(begin, begin + 4 * S, S):
            made += [_allocation((8 + each) * MIB, at + each, at + S // 2, _LAYER) for each in range(2)]
            made.append(_allocation(1 * MIB, at + 9, None, "keep /home/me/train.py:77"))
    return made


def test_iterations_that_nothing_marks_are_inferred_from_what_recurs(tmp_path):
    found = _recorded(tmp_path, allocations=_leaking())
    assert values(found.memory, "iterations", "growth_bytes_per_iteration") == [(5, 4 * MIB)]
    assert [caveat.code for caveat in found.caveats] == ["memory_iterations_inferred"]


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (f"malloc CUDACachingAllocator.cpp:0\n{_TORCH}\n{_LAYER}\n{_TRAIN}", _LAYER),
        ("__call__ /usr/lib/python3.11/contextlib.py:81\nbuild /me/model.py:3", "build /me/model.py:3"),
        ("at::_ops::mul::call(x) ??:0\ntorch::autograd::generated::MulBackward0::apply(y) ??:0", "autograd MulBackward0"),
        ("at::_ops::mm::redispatch(x) ??:0\n__clone ??:0", "operator mm"),
        (f"malloc a.cpp:1\n{_TORCH}", _TORCH),
        (None, UNRECORDED),
    ],
)
def test_the_site_is_the_innermost_line_of_the_programs_own(stack, expected):
    assert site(stack) == expected


def test_a_timeline_is_thinned_without_losing_its_peak(tmp_path):
    chance = random.Random(2)
    made = [
        _allocation(chance.randrange(1, 1000), begin, begin + chance.randrange(1, 400), f"f /me/a.py:{begin % 20}")
        for begin in range(1, 1000)
    ]
    full, thin = (_recorded(tmp_path / str(points), points=points, allocations=made) for points in (100_000, 200))
    peak = max(full.memory_timeline["allocated_bytes"].to_pylist())
    assert (max(thin.memory_timeline["allocated_bytes"].to_pylist()), thin.memory_timeline.num_rows <= 200) == (peak, True)
    # The sites of a device, the smallest of them together, add up to its amount.
    assert max(full.memory_over_time.group_by("time_ns").aggregate([("bytes", "sum")])["bytes_sum"].to_pylist()) == peak


def test_a_traces_memory_events_have_totals_and_no_sites(tmp_path):
    events = [
        {"time_ns": time, "device_type": kind, "device": 0, "total_allocated_bytes": amount, "total_reserved_bytes": reserved}
        for time, amount, reserved in ((1, 10, 64), (2, 50, 64), (3, 20, 128), (4, 30, 128))
        for kind in ("cuda", "cpu")
    ]
    marks = [{"iteration": number, "start_ns": 2 * number + 1, "end_ns": 2 * number + 2} for number in range(2)]
    found = _recorded(tmp_path, source="kineto", memory_events=events, iterations=marks)
    names = ("peak_bytes", "peak_ns", "end_bytes", "peak_reserved_bytes", "fragmentation")
    assert values(found.memory, *names, "growth_bytes_per_iteration") == [(50, 2, 30, 128, None, -20)]
    assert [caveat.code for caveat in found.caveats] == ["memory_without_snapshot"]


def test_the_difference_of_two_names_what_grew_what_went_and_what_came(tmp_path):
    bytes_of = {1: 100, 2: 50, 3: 20}
    first, second = (
        _recorded(tmp_path / name, allocations=[_allocation(bytes_of[at], 1, None, f"f /me/x.py:{at}") for at in lines])
        for name, lines in (("before", (1, 2)), ("after", (1, 1, 1, 1, 3)))
    )
    names = ("site", "change_bytes_at_peak", "change_end_bytes", "before_allocations", "after_allocations")
    assert values(difference(first.memory_sites, second.memory_sites), *names) == [
        ("f /me/x.py:1", 300, 300, 1, 4),
        ("f /me/x.py:2", -50, -50, 1, 0),
        ("f /me/x.py:3", 20, 20, 0, 1),
    ]


def test_requests_that_failed_come_by_rank_and_time_with_the_line_that_made_them(tmp_path, run_of):
    t0_us = 1_795_178_470_000_000
    torch = {"name": "linear", "filename": "/venv/site-packages/torch/nn/functional.py", "line": 2319}
    frames = [torch, {"name": "forward_step", "filename": "/home/me/train.py", "line": 40}]
    refused = {"rank-1": [(7, 2, []), (8, 3, [])], "oom-rank-0-1": [(1 << 30, 5, frames)], "rank-2": []}
    for name, requests in refused.items():
        history = [{"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": t0_us, "frames": frames}]
        refusal = {"action": "oom", "device_free": 5000, "stream": 0}
        history += [refusal | {"size": size, "time_us": t0_us + at, "frames": stack} for size, at, stack in requests]
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [history]}))
    found = run_of().facts.out_of_memory
    assert values(found, "rank", "device", "time_ns", "requested_bytes", "free_bytes", "site") == [
        (0, 0, (t0_us + 5) * 1000, 1 << 30, 5000, _TRAIN),
        (1, 0, (t0_us + 2) * 1000, 7, 5000, UNRECORDED),
        (1, 0, (t0_us + 3) * 1000, 8, 5000, UNRECORDED),
    ]
