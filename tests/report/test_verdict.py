"""The verdict in words: where the time goes, what to do first, and what limits the answer; and that nothing was found."""

from __future__ import annotations

from bridge_profiling.analysis.findings import Confidence
from bridge_profiling.report.verdict import Summary, verdict
from tests.report.summaries import MS, finding, manifest, row, summary


def _text(found: Summary) -> str:
    answer = verdict(found)
    return " ".join((answer.headline, *answer.sentences, *answer.first, *answer.caveats))


def test_it_is_a_headline_three_sentences_and_what_to_do_first() -> None:
    first = finding(ranks=[1], title="Rank 1 loads data for 30 ms of each iteration")
    more = [
        finding(id="host_sync", recoverable_us_per_iteration=10 * MS),
        finding(id="memory_growth", recoverable_us_per_iteration=None),
    ]
    found = verdict(summary([row(rank, data_loading_us=30 * MS) for rank in range(4)], [first, *more, *more]))
    assert found.headline == "Rank 1 loads data for 30 ms of each iteration."
    assert found.sentences == [
        "An iteration takes 100 ms (median of 10 on 4 ranks).",
        "Its parts: 70% compute, 30% data loading.",
        "Potential saving: up to 30 ms per iteration (30%); all 5 findings together up to 50 ms per iteration (50%).",
    ]
    assert len(found.first) == 3
    assert found.first[0] == "Rank 1: Raise dataset.num_workers."


def test_ranks_that_differ_are_given_as_a_range() -> None:
    text = _text(summary([row(0, waiting_us=40 * MS), row(1, duration_us=120 * MS, waiting_us=0.0)]))
    assert "100 ms to 120 ms by rank" in text
    assert "80% compute (60% to 100% by rank)" in text
    assert "20% waiting for other ranks (0% to 40% by rank)" in text


def test_a_finding_about_all_ranks_names_none() -> None:
    assert verdict(summary([row(0), row(1)], [finding(ranks=[0, 1])])).first == ["Raise dataset.num_workers."]


def test_why_the_confidence_is_low() -> None:
    first = finding(confidence=Confidence.low, confidence_reason="only 2 iterations captured")
    assert verdict(summary([row(0), row(1)], [first])).caveats[0] == "Confidence is low: only 2 iterations captured."


def test_nothing_found_says_so() -> None:
    found = verdict(summary([row(0), row(1)]))
    assert found.headline == "Nothing to change was found."
    assert found.first == []


def test_captures_without_iterations_are_not_judged() -> None:
    assert verdict(summary([])).headline == "These captures hold too little to judge."


def test_a_finding_whose_saving_is_unknown_promises_none() -> None:
    text = _text(summary([row(0)], [finding(ranks=[0], recoverable_us_per_iteration=None)]))
    assert "saving is unknown" in text
    assert "up to" not in text


def test_few_iterations_sampled_ranks_and_unread_captures_are_named() -> None:
    rows = [row(0, iterations=2), row(1, iterations=2)]
    text = _text(summary(rows, world_size=1024, errors=["rank-3.json.gz is cut"]))
    assert "Only 2 iterations captured" in text
    assert "2 of the job's 1,024 ranks were captured" in text
    assert "1 capture could not be read" in text


def test_profiler_overhead_comes_from_the_manifests_or_is_unknown() -> None:
    rows = [row(0), row(1)]
    manifests = [manifest(0, [150, 152], [100, 100, 102]), manifest(1, [151, 151], [100, 101, 101])]
    assert "Profiling made an iteration 50 ms longer" in _text(summary(rows, manifests=manifests))
    assert "Profiler overhead is unknown (no manifest)" in _text(summary(rows))


def test_communication_that_may_be_waiting_is_called_so() -> None:
    rows = [row(0, communication_us=40 * MS) | {"waiting_known": False}]
    assert "40% exposed communication (including waiting for other ranks)" in _text(summary(rows))


def test_without_a_device_nothing_is_judged() -> None:
    found = summary([], without_device=[0, 1])
    assert verdict(found).headline == "These captures hold no device work to judge."
    assert "table of operators" in _text(found)
    assert "threshold" not in _text(found)


def test_ranks_without_a_device_among_others_are_named() -> None:
    found = verdict(summary([row(0)], without_device=[1]))
    assert "The trace of rank 1 has no device work and is not judged." in found.caveats


def test_memory_alone_is_called_memory() -> None:
    found = _text(summary([], snapshots=[0, 2]))
    assert "These captures hold memory only. Memory was recorded on ranks 0, 2." in found
