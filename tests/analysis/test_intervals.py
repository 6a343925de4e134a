"""Interval arithmetic agrees with a naive implementation that counts nanoseconds one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bridge_profiling.analysis.intervals import parents, union

_BOUND = 40
_RANGES = st.lists(st.tuples(st.integers(-_BOUND, _BOUND), st.integers(-_BOUND, _BOUND)), max_size=12)
#: The same near the largest times there are: nanoseconds since 1970 fill 61 bits.
_OFFSETS = st.sampled_from([0, 1_795_177_822_134_345_236])


def _arrays(ranges, offset=0):
    pairs = np.array(ranges, np.int64).reshape(-1, 2) + offset
    return pairs[:, 0], pairs[:, 1]


def _points(ranges):
    return {point for start, end in ranges for point in range(start, end)}


def _members(intervals, offset=0):
    return _points(list(zip((intervals.start_ns - offset).tolist(), (intervals.end_ns - offset).tolist(), strict=True)))


@given(_RANGES, _RANGES, _OFFSETS)
def test_sets_of_intervals_are_sets_of_their_points(mine, theirs, offset):
    a, b = union(*_arrays(mine, offset)), union(*_arrays(theirs, offset))
    assert _members(a, offset) == _points(mine)
    assert a.total_ns == len(_points(mine))
    # In order, without empty ones, and those that touch are one.
    assert (a.end_ns > a.start_ns).all()
    assert (a.start_ns[1:] > a.end_ns[:-1]).all()
    assert _members(a & b, offset) == _points(mine) & _points(theirs)
    assert _members(a - b, offset) == _points(mine) - _points(theirs)
    assert _members(a | b, offset) == _points(mine) | _points(theirs)
    assert a.within_ns(*_arrays(theirs, offset)).tolist() == [len(_points(mine) & _points([each])) for each in theirs]


def _naive_parents(threads, ranges):
    """Walk each thread with a stack of open ranges."""
    order = sorted(range(len(ranges)), key=lambda row: (threads[row], ranges[row][0], -ranges[row][1], row))
    found, stack = [-1] * len(ranges), []
    for row in order:
        while stack and (threads[stack[-1]] != threads[row] or ranges[stack[-1]][1] <= ranges[row][0]):
            stack.pop()
        found[row] = stack[-1] if stack else -1
        stack.append(row)
    return found


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, _BOUND), st.integers(0, 20)), max_size=30))
def test_parents_of_any_ranges_are_the_innermost_open_ones(rows):
    threads, ranges = [row[0] for row in rows], [(row[1], row[1] + row[2]) for row in rows]
    assert parents(np.array(threads, np.int64), *_arrays(ranges)).tolist() == _naive_parents(threads, ranges)
