"""The verdict in words: where the time goes, who is to blame first, how sure, what to change; and that nothing was found."""

from __future__ import annotations

from bridge_profiling.analysis.findings import Confidence
from bridge_profiling.report.verdict import shortened, verdict
from tests.report.summaries import MS, finding, manifest, row, summary


def test_it_says_what_an_iteration_takes_and_where_it_goes() -> None:
    found = verdict(summary([row(0, data_loading_us=30 * MS), row(1, data_loading_us=30 * MS)]))
    assert "An iteration takes 100 ms (median of 10 captured on 2 ranks): 70% compute, 30% data loading." in found.paragraph


def test_ranks_that_differ_are_given_as_a_range() -> None:
    found = verdict(summary([row(0, waiting_us=40 * MS), row(1, duration_us=120 * MS, waiting_us=0.0)]))
    assert "100 ms to 120 ms by rank" in found.budget
    assert "80% compute (60% to 100% by rank)" in found.budget
    assert "20% waiting for other ranks (0% to 40% by rank)" in found.budget


def test_the_first_finding_is_the_headline_with_its_change_its_gain_and_whom_it_blames() -> None:
    first = finding(ranks=[1], title="Rank 1 loads data for 30 ms of each iteration")
    found = verdict(summary([row(rank, data_loading_us=30 * MS) for rank in range(4)], [first]))
    assert found.headline == "Rank 1 loads data for 30 ms of each iteration."
    assert "To blame: rank 1." in found.first
    assert "Change first: Raise dataset.num_workers." in found.first
    assert "give back 30 ms of each iteration at the most, 30%" in found.first
    assert "high confidence" in found.sure


def test_a_finding_about_all_ranks_blames_nobody() -> None:
    found = verdict(summary([row(0), row(1)], [finding(ranks=[0, 1])]))
    assert "To blame" not in found.paragraph


def test_why_it_is_not_surer_and_what_all_findings_could_give_back() -> None:
    first = finding(confidence=Confidence.low, confidence_reason="only 2 iterations captured")
    second = finding(id="host_sync", recoverable_us_per_iteration=10 * MS)
    unknown = finding(id="memory_growth", recoverable_us_per_iteration=None)
    found = verdict(summary([row(0), row(1)], [first, second, unknown]))
    assert found.sure == "Confidence is low: only 2 iterations captured."
    assert found.rest == "2 more findings below; all of them together could give back at most 40 ms (40%)."


def test_nothing_found_says_so() -> None:
    found = verdict(summary([row(0), row(1)]))
    assert found.headline == "Nothing was found to change."
    assert "No number is past its threshold" in found.first
    assert "Change first" not in found.paragraph


def test_captures_without_iterations_are_no_clean_bill() -> None:
    found = verdict(summary([]))
    assert found.headline == "There is too little here to judge."
    assert "No iteration is marked" in found.paragraph


def test_a_finding_whose_time_is_unknown_promises_none() -> None:
    found = verdict(summary([row(0)], [finding(ranks=[0], recoverable_us_per_iteration=None)]))
    assert "cannot be told" in found.first
    assert "give back at most" not in found.paragraph


def test_few_iterations_sampled_ranks_and_unread_captures_are_said() -> None:
    rows = [row(0, iterations=2), row(1, iterations=2)]
    found = verdict(summary(rows, world_size=1024, errors=["rank-3.json.gz is cut"]))
    assert "Only 2 iterations captured" in found.paragraph
    assert "2 of the job's 1,024 ranks were captured" in found.paragraph
    assert "1 capture could not be read" in found.paragraph


def test_what_the_profiler_cost_comes_from_the_manifests_and_is_said_to_be_unknown_without() -> None:
    rows = [row(0), row(1)]
    known = verdict(
        summary(rows, manifests=[manifest(0, [150, 152], [100, 100, 102]), manifest(1, [151, 151], [100, 101, 101])])
    )
    assert "The profiler itself made an iteration 50 ms longer" in known.paragraph
    assert "No manifest says what the profiler itself cost" in verdict(summary(rows)).paragraph


def test_waiting_that_cannot_be_told_from_communication_is_not_called_communication() -> None:
    rows = [row(0, communication_us=40 * MS) | {"waiting_known": False}]
    assert "waiting for other ranks included" in verdict(summary(rows)).budget


def test_a_long_action_is_cut_where_a_reader_can_stop() -> None:
    long = f"Do this ({', '.join(['a.setting=true'] * 8)}), then {'that, ' * 40}and more. Never this."
    cut = shortened(long)
    assert len(cut) <= 225
    assert cut.endswith(" …")
    assert cut.count("(") == cut.count(")")
    assert shortened("Raise dataset.num_workers. Then look at the disks.") == "Raise dataset.num_workers."


def test_without_a_device_nothing_is_said_of_one() -> None:
    found = verdict(summary([], without_device=[0, 1]))
    assert found.headline == "There is no device here whose time could be judged."
    assert "No work on a device was recorded: a training on CPUs leaves such captures" in found.paragraph
    assert "table of operators" in found.paragraph
    assert "no number is past" not in found.paragraph.lower()


def test_ranks_without_a_device_beside_others_are_named() -> None:
    found = verdict(summary([row(0)], without_device=[1]))
    assert "Of rank 1 no work on a device was recorded: that is not judged." in found.caveats
