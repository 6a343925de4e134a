"""The verdict in words: where the time goes, what to do first, what limits the answer; on devices and on CPUs alone."""

import json
import re

import pytest

from bridge_profiling.report.verdict import verdict
from tests.report.known import MS, Known, finding, manifest, row
from tests.traces.kineto_files import complete


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


STEP, LOADER = 100_000, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def _rank(loading_us, computing_us, arrive_us, loading):
    """Iterations of 100 ms: data (or saving), operators, then a all-reduce that ends when the last rank has arrived."""
    events = []
    ready = loading_us + computing_us
    for step in range(4):
        at = step * STEP
        events += [
            complete("user_annotation", f"ProfilerStep#{step}", at, STEP),
            complete("user_annotation", loading, at, loading_us),
            complete("user_annotation", "forward", at + loading_us, computing_us),
            complete("cpu_op", "aten::mm", at + loading_us, computing_us),
            complete("cpu_op", "c10d::allreduce_", at + ready, 100),
            complete("user_annotation", "gloo:all_reduce", at + ready + 50, arrive_us - ready + 4950, tid=9),
            complete("cpu_op", "aten::add_", at + arrive_us + 5000, STEP - arrive_us - 6000),
        ]
    return events


@pytest.mark.parametrize(
    ("times_us", "finding", "headline"),
    [
        (((1_000, 10_000), (70_000, 10_000)), ("data_loading", [1]), "Data loading stalls rank 1 for 70 ms"),
        (((1_000, 70_000), (1_000, 10_000)), ("straggler_host", [0]), "Rank 0 takes 60 ms longer per iteration than the other"),
        (((1_000, 10_000), (70_000, 10_000)), ("checkpoint_stall", [1]), "Saving a checkpoint stalls rank 1 for 70 ms"),
        (((1_000, 10_000), (1_000, 10_000)), None, "Nothing to change was found."),
    ],
)
def test_the_late_rank_and_its_cause_are_named(tmp_path, write_trace, run_of, times_us, finding, headline):
    """Of two ranks, by how long each loads data, or saves, and computes."""
    for rank, times in enumerate(times_us):
        trace = _rank(*times, max(map(sum, times_us)), "save_checkpoint" if "Saving" in headline else LOADER)
        write_trace(trace, f"run/rank-{rank}.json.gz", distributedInfo={"rank": rank})
    opened = run_of(tmp_path / "run")
    conclusion = opened.conclusion
    assert verdict(opened.facts, conclusion).headline.startswith(headline)
    assert [(each.id, each.ranks) for each in conclusion.findings] == ([finding] if finding else [])
    waited = 1000 * abs(sum(times_us[0]) - sum(times_us[1]))
    rows = opened.facts.host_iterations.to_pylist()
    assert sorted({row["waiting_ns"] for row in rows}) == sorted({0, waited})
    parts = ("data_loading_ns", "checkpoint_ns", "communication_ns", "waiting_ns", "operators_ns", "other_ns")
    assert all(sum(row[part] for part in parts) == row["duration_ns"] for row in rows)
    page = opened.report(tmp_path / "report.html").read_text()
    shown = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL) + json.dumps(json.loads(opened.to_json())["caveats"])
    assert re.findall(r"[^.<>]*(?:GPU|NUMA|CUDA|pin_memory|[Dd]evice(?!-width))[^.<>]*", shown) == []
    assert all(each in shown for each in (headline, "waiting for other ranks", "Phases and ranges"))
