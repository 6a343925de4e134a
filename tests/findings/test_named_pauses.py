"""A pause of the host is named by the Python function or range that the thread was in, as far as the capture shows it."""

import pytest

from tests.facts.ranks_in_hand import answer, rank, span, work

MS = 1_000_000
LAUNCHES = [span("cudaLaunchKernel", at * MS, at * MS + 1000, "runtime") for at in (1, 12)]
EVENTS = [work("compute", 1 * MS, 2 * MS, 1 * MS + 1000), work("compute", 12 * MS, 13 * MS, 12 * MS + 1000)]
STEP = span("ProfilerStep#3", 0, 14 * MS)


@pytest.mark.parametrize(
    ("ranges", "name"),
    [
        ([], "before"),
        ([span("train.py(80): main", 0, 14 * MS, "python")], "train.py(80): main"),
        ([span("train.py(80): main", 0, 14 * MS, "python"), span("augment", 2 * MS, 11 * MS, "python")], "augment"),
        ([span("augment", 2 * MS, 11 * MS, "python"), span("resize", 3 * MS, 10 * MS, "python")], "augment (resize)"),
        ([span("my metrics", 2 * MS, 11 * MS)], "my metrics"),
        # Too short a part of it, or of another thread.
        ([span("augment", 2 * MS, 5 * MS, "python")], "before"),
        ([span("augment", 2 * MS, 11 * MS, "python", thread=9)], "before"),
    ],
)
def test_what_the_thread_was_in_names_the_pause(ranges, name):
    iterations = [{"iteration": 3, "start_ns": 0, "end_ns": 14 * MS, "boundary": False}]
    tables = rank(device_events=EVENTS, host_events=[STEP, *ranges, *LAUNCHES], iterations=iterations)
    (row,) = [row for row in answer(tables, "idle_causes").to_pylist() if row["cause"] == "host_pause"]
    assert (row["name"] or "before").startswith(name)
    assert row["lost_ns"] == pytest.approx(10 * MS, rel=0.01)
