"""The verdict in words: where the time goes, what to do first, and what limits the answer; and that nothing was found."""

import pytest

from bridge_profiling.report.verdict import verdict
from tests.report.known import MS, Known, finding, manifest, row


def test_it_is_a_headline_three_sentences_and_what_to_do_first():
    first, other = finding(ranks=[1]), finding(id="host_sync", recoverable_ns_per_iteration=10 * MS)
    unknown = finding(id="memory_growth", recoverable_ns_per_iteration=None)
    loading = [row(rank, data_loading_ns=30 * MS) for rank in range(4)]
    run = Known(loading, [first, other, unknown, other, unknown])
    found = verdict(run, run.conclusion)
    assert found.headline == f"{first.title}."
    assert found.sentences == [
        "An iteration takes 100 ms (median of 10 on 4 ranks).",
        "Its parts: 70% compute, 30% data loading.",
        "Potential saving: about 30 ms per iteration (30%), at most 40 ms (40%); all 5 findings together about 50 ms per"
        " iteration (50%).",
    ]
    assert (len(found.first), found.first[0]) == (3, "Rank 1: Raise dataset.num_workers.")


_TWO = [row(0), row(1)]
_NO_SAVING = {"recoverable_ns_per_iteration": None, "at_most_ns_per_iteration": None}
_MANIFESTS = [manifest(0, [150, 152], [100, 100, 102]), manifest(1, [151, 151], [100, 101, 101])]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            Known([row(0, waiting_ns=40 * MS), row(1, duration_ns=120 * MS, waiting_ns=0.0)]),
            ["100 ms to 120 ms by rank", "80% compute (60% to 100%", "20% waiting for other ranks (0% to 40% by rank)"],
        ),
        (
            Known(_TWO, [finding(**_NO_SAVING | {"at_most_ns_per_iteration": 40 * MS})]),
            ["saving: at most 40 ms per iteration (40%)."],
        ),
        (
            Known([row(0, iterations=2), row(1, iterations=2)], world_size=1024, errors=["rank-3.json.gz is cut"]),
            [
                "Only 2 iterations captured",
                "2 of the job's 1,024 ranks",
                "1 capture could not be read",
                "overhead is unknown (no",
            ],
        ),
        (Known(_TWO, manifests=_MANIFESTS), ["Profiling made an iteration 50.5 ms longer"]),
        (Known(_TWO, manifests=[manifest(0, [150, 152], [2, 151, 2])]), ["Profiler overhead is unclear"]),
        (
            Known(
                [row(0)],
                without_device=[0],
                operators=[{"rank": 0, "source": "kineto", "name": "aten::mm", "self_ns": 30 * MS}],
            ),
            [
                "These captures hold no device work to judge.",
                "On the host an iteration takes 100 ms (median, profiled);",
                "aten::mm 3 ms",
            ],
        ),
        (Known([]), ["These captures hold too little to judge."]),
        (Known([], manifests=_MANIFESTS), ["Nothing was captured. Ranks 0-1: the reason is unknown."]),
        (Known([], [finding()]), ["Potential saving: about 30 ms per capture, at most 40 ms."]),
        (Known(_TWO), ["Nothing to change was found."]),
    ],
)
def test_what_is_known_and_what_limits_it_is_said(run, said):
    found = run.conclusion
    answer = verdict(run, found)
    text = " ".join((answer.headline, *answer.sentences, *answer.first, *answer.caveats))
    assert [sentence for sentence in said if sentence not in text] == []
    # No saving is promised without a finding that has one, and nothing about thresholds without a device.
    assert not found.findings or found.findings[0].at_most_ns_per_iteration or "at most" not in text
    assert found.on_devices or not found.without_device or "threshold" not in text
    # A finding about all ranks names none.
    assert answer.first == ["Raise dataset.num_workers."] * len(found.findings)


@pytest.mark.parametrize("others", [[], [finding(id="low_device_busy")]])
def test_the_profilers_own_cost_is_never_the_first_advice(others):
    overhead = finding(id="profiler_overhead", title="Profiling makes an iteration 72 ms longer", **_NO_SAVING)
    for rows in (_TWO, []):
        run = Known(rows, [*others, overhead])
        found = verdict(run, run.conclusion)
        assert ("Profiling" in found.headline, len(found.first)) == (False, len(others))
