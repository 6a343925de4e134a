"""Trainings on CPUs: which rank is late and why, without a word about devices that they do not have."""

import json
import re

import pytest

from bridge_profiling.report.verdict import verdict
from tests.traces.kineto_files import complete

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
