"""Numbers in words: a unit always, and no more digits than matter."""

from bridge_profiling.report import words


def test_memory_counts_in_powers_of_two_and_messages_in_powers_of_ten():
    assert (words.memory(5 * 2**30), words.size(1_068_089_344)) == ("5.00 GiB", "1.07 GB")


def test_evidence_is_written_with_the_unit_in_its_name():
    assert (words.label("waiting_us"), words.value("waiting_us", 1_500.0)) == ("waits for others", "1.5 ms")
    assert words.value("waiting_us", {0: 1_500.0, "3": 25_000.0}) == "rank 0: 1.5 ms, rank 3: 25 ms"
    assert words.label("idle_us") == "idle"
    assert words.value("idle_us", {"host_sync": {1: 2_000.0}}) == "host sync: rank 1: 2.0 ms"
