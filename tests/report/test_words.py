"""Numbers in words: a unit always, and no more digits than matter."""

import pytest

from bridge_profiling.report import words


@pytest.mark.parametrize(
    ("write", "value", "said"),
    [
        # Memory counts in powers of two, and messages in powers of ten.
        (words.memory, 5 * 2**30, "5.00 GiB"),
        (words.size, 1_068_089_344, "1.07 GB"),
    ],
)
def test_numbers(write, value, said):
    assert write(value) == said


@pytest.mark.parametrize(
    ("name", "amount", "heading", "said"),
    [
        ("waiting_us", 1_500.0, "waits for others", "1.5 ms"),
        ("waiting_us", {0: 1_500.0, "3": 25_000.0}, "waits for others", "rank 0: 1.5 ms, rank 3: 25 ms"),
        ("idle_us", {"host_sync": {1: 2_000.0}}, "idle", "host sync: rank 1: 2.0 ms"),
    ],
)
def test_evidence_is_written_with_the_unit_in_its_name(name, amount, heading, said):
    assert (words.label(name), words.value(name, amount)) == (heading, said)
