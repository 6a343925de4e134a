"""Questions across ranks: which operations are one, how clocks are apart, what communication costs, who waits, who is slow."""

import functools
import random
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.facts.clocks import clock_offsets
from bridge_profiling.facts.communication import with_dimensions
from bridge_profiling.facts.matching import match
from bridge_profiling.facts.ranks import verdict
from bridge_profiling.facts.types import connect
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.traces.types import RankInfo
from tests.facts.ranks_in_hand import values
from tests.facts.simulated_runs import MS, US, SimulatedRun, one_forward_one_backward


def _pairs(ranks, clocks, *, iterations=3, seed=0):
    """Tensor parallelism in pairs, data parallelism over everybody; no two iterations last equally long."""
    run, chance = SimulatedRun(ranks, offsets_ns=clocks), random.Random(seed)

    def step(_):
        for layer in range(4):
            for rank in range(ranks):
                run.compute(rank, chance.randrange(2 * MS, 6 * MS))
            for first in range(0, ranks, 2):
                run.meet([first, first + 1], size=1 << (18 + layer % 2))
        run.meet(range(ranks), "reduce_scatter", 1 << 28, "DP")
        run.meet(range(ranks), "all_gather", 1 << 27, "DP")

    return run.iterate(iterations, step)


@functools.cache
def _database():
    return connect()


def _matched(run, skip={}, **how):  # noqa: B006
    """How many matches there are by their number of ranks, all of one operation each, and the codes of the caveats."""
    connection = _database()
    codes = [caveat.code for caveat in match(connection, run.operations_of(skip=skip, **how))]
    truths = run.truths(skip)
    rows = connection.execute("select match, rank, collective from matched").fetchall()
    sizes = Counter(number for number, *_ in rows)
    assert len({(number, truths[rank][place]) for number, rank, place in rows}) == len(sizes)
    return dict(Counter(sizes.values())), codes


def test_operations_match_without_a_rank_and_where_captures_overlap():
    assert _matched(_pairs(4, {}), ranks=[0, 1, 3]) == ({2: 12, 3: 6}, ["groups_partly_captured"])
    found = _matched(_pairs(4, {1: 40 * MS, 2: -7 * MS}), {1: 3, 3: 8})
    assert found == ({2: 9 + 6, 3: 2, 4: 4}, ["operations_unmatched", "captures_aligned"])


# Not random from run to run: iterations can last equally long by chance.
@settings(max_examples=12, derandomize=True)
@given(st.tuples(*[st.integers(0, 11)] * 4), st.tuples(*[st.integers(-(10**10), 10**10)] * 4), st.integers(), st.booleans())
def test_all_that_overlaps_is_matched_whatever_the_clocks(skips, clocks, seed, marked):
    run, skip = _pairs(4, dict(enumerate(clocks)), iterations=4, seed=seed), dict(enumerate(skips))
    held = Counter(truth for truths in run.truths(skip).values() for truth in truths)
    shared = Counter(count for count in held.values() if count > 1)
    assert _matched(run, skip, marked=marked)[0] == shared


@pytest.mark.parametrize(
    ("operations", "recorded", "expected"),
    [
        (("all_gather", "all_reduce"), {}, ({}, ["operations_unmatched"])),
        (("all_reduce", "all_gather"), {"message_bytes": 7}, ({}, ["operations_unmatched"])),
        (("all_to_all", "all_to_all"), {"message_bytes": 7}, ({2: 4}, [])),
        (("all_reduce", "all_gather"), {"group_name": None, "group_ranks": None}, ({2: 4}, ["group_inferred"])),
        (("all_reduce", "send_recv"), {"group_name": None, "group_ranks": None}, ({}, ["operations_without_group"])),
    ],
)
def test_only_operations_of_one_kind_size_place_and_group_match(operations, recorded, expected):
    run = SimulatedRun(2)
    kinds = operations if "all_to_all" in operations else ("all_reduce", "all_gather")
    run.iterate(2, lambda _: [run.meet([0, 1], kind) for kind in kinds])
    run.change_operations([0, 1] if "group_name" in recorded else [1], **recorded)
    for row, operation in zip(run.operations[1], operations * 2, strict=True):
        row["operation"] = operation
    assert _matched(run) == expected


def test_sends_and_kernels_that_send_and_receive_match_those_of_their_peers():
    run = SimulatedRun(4)

    def step(_):
        for source, target in ((0, 1), (1, 2), (0, 1), (2, 3), (1, 2), (3, 2), (2, 1)):
            run.compute(source, 1 * MS)
            run.send(source, target, range(4))
        for _ in range(3):
            run.compute(0, 2 * MS)
            run.exchange(0, 1)

    # An exchange is two transfers, one in each direction.
    assert _matched(run.iterate(3, step)) == ({2: 3 * (7 + 2 * 3)}, [])


def _chain(clocks, ranks):
    """Groups of neighbours only: the first and the last rank share none."""
    run, chance = SimulatedRun(ranks, offsets_ns=clocks), random.Random(1)

    def step(_):
        for rank in range(ranks):
            run.compute(rank, chance.randrange(1 * MS, 5 * MS))
        for rank in range(ranks - 1):
            run.meet([rank, rank + 1], group="CP")

    return run.iterate(8, step)


@settings(max_examples=8)
@given(st.lists(st.integers(-(10**12), 10**12), min_size=2, max_size=7))
def test_offsets_are_found_to_the_nanosecond_along_a_chain_of_groups(clocks):
    match(_database(), _chain(dict(enumerate(clocks)), len(clocks)).operations_of())
    infos = [RankInfo(rank, "trace", "kineto", []) for rank in range(len(clocks))]
    found = clock_offsets(_database(), infos).table
    assert found["offset_ns"].to_pylist() == pytest.approx([clocks[0] - clock for clock in clocks], abs=1)
    assert set(found["component"].to_pylist()) == {0}
    assert max(found["max_residual_ns"].to_pylist()) <= 1


def test_one_operation_that_ends_far_apart_moves_no_clock_and_shows_in_the_residual(tmp_path):
    run = _chain({1: 5 * MS, 2: -300}, 3)
    run.operations[1][4]["end_ns"] += 800 * US
    asked = run.captured(tmp_path, host="node-7")
    found = values(asked.facts.clock_offsets, "offset_ns", "residual_ns", "max_residual_ns")
    assert (found[:2], found[2][0]) == ([(0, 0, 400 * US), (-5 * MS, 0, 400 * US)], 300)
    # Ranks of one host have one clock.
    assert [(each.code, "5000 us" in each.text) for each in asked.facts.caveats("clock_offsets")] == [("one_host_apart", True)]


def test_ranks_that_share_no_operation_keep_their_clocks(tmp_path):
    run = SimulatedRun(5, offsets_ns={1: 1 * MS, 3: 2 * MS, 4: 3 * MS})
    run.iterate(3, lambda _: [run.meet([0, 1]), run.meet([2, 3]), run.compute(4, 1 * MS)])
    asked = run.captured(tmp_path, clock="unknown")
    found = values(asked.facts.clock_offsets, "component", "reference", "offset_ns", "operations", "residual_ns")
    related = [(0, 0, 0, 3, 0), (0, 0, -1 * MS, 3, 0), (1, 2, 0, 3, 0), (1, 2, -2 * MS, 3, 0)]
    assert found == [*related, (2, 4, 0, 0, None)]
    text = "different sets cannot"
    assert [(each.code, text in each.text) for each in asked.facts.caveats("clock_offsets")] == [("clocks_unrelated", True)]


def test_bus_bandwidth_is_that_of_nccl_tests(tmp_path):
    shares = {"all_reduce": 2 * 3 / 4, "broadcast": 1, "reduce": 1}
    shares |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 3 / 4)
    run = SimulatedRun(4, transfer_ns=100 * US)
    run.iterate(3, lambda _: [run.meet(range(4), operation, 20_000_000) for operation in (*shares, "dispatch")])
    found = run.captured(tmp_path).facts.communication
    counts = values(found, "count", "bytes", "group_size", "matched_count", "algorithm_bandwidth_gbs")
    assert set(counts) == {(3, 60_000_000, 4, 3, 200.0)}
    # No such bandwidth is defined for a dispatch.
    expected = {operation: pytest.approx(200 * share) for operation, share in shares.items()} | {"dispatch": None}
    assert dict(values(found, "operation", "bus_bandwidth_gbs")) == expected


def test_sizes_of_messages_have_rows_of_their_own_that_add_up_to_the_groups(tmp_path):
    run = SimulatedRun(2, offsets_ns={1: 500 * MS}, transfer_ns=100 * US)

    def step(_):
        run.compute(0, 1 * MS)
        for size in (1_000_000, 20_000_000, 20_000_000):
            run.meet([0, 1], "all_gather", size)

    asked = run.iterate(3, step).captured(tmp_path)
    rows = asked.communication(by="size")
    names = ("message_bytes", "count", "captured_ranks", "transfer_ns", "algorithm_bandwidth_gbs", "bus_bandwidth_gbs")
    assert sorted(values(rows, *names)) == [
        (1_000_000, 3, 2, 300 * US, 10.0, 5.0),
        (20_000_000, 6, 2, 600 * US, 200.0, 100.0),
    ]
    assert dict(values(rows, "message_bytes", "wait_ns")) == {1_000_000: 3 * MS, 20_000_000: 0}
    by_rank = asked.facts.communication_by_rank
    assert values(by_rank, "rank", "duration_ns", "transfer_ns", "wait_ns") == [
        (0, 900 * US, 900 * US, 0),
        (1, 3900 * US, 900 * US, 3 * MS),
    ]
    for name in ("duration_ns", "exposed_ns", "overlapped_ns"):
        assert sum(rows[name].to_pylist()) == pytest.approx(sum(by_rank[name].to_pylist())), name


@pytest.mark.parametrize(
    ("sizes", "group", "members", "expected"),
    [
        ({"tp": 2, "pp": 2}, "7", [1, 3], ("dp", 450.0)),
        ({"tp": 2, "pp": 2}, "7", [0, 4], ("pp", None)),  # on two hosts
        ({"tp": 2, "pp": 2}, "7", [0, 9], (None, None)),
        ({"cp": 2, "pp": 2}, "7", [0, 1, 2, 3], ("cp-dp", 450.0)),
        ({"ep": 8}, "DATA_PARALLEL_GROUP", list(range(8)), ("dp", None)),
    ],
)
def test_a_group_is_named_by_the_dimension_that_its_ranks_span(sizes, group, members, expected):
    layout = ParallelLayout(world_size=8, **sizes)
    infos = [
        RankInfo(rank, "trace", "kineto", [], coordinates=layout.coordinates(rank), host=host, devices={0: "NVIDIA H200"})
        for rank, host in enumerate(["node-0"] * 4 + ["node-1"] * 4)
    ]
    groups = pa.table({"group": [group], "group_ranks": [str(members)]})
    assert values(with_dimensions(groups, infos), "dimension", "link_gbs") == [expected]


def _pipelines(stages, microbatches, *, last=1.0):
    """Two pipelines of data-parallel replicas; a transfer takes a thousandth of a forward pass."""
    run = SimulatedRun(2 * stages, transfer_ns=1_000, offsets_ns={stages - 1: 300 * MS})
    forward = [1 * MS] * (stages - 1) + [int(last * MS)]

    def step(_):
        for members in (range(stages), range(stages, 2 * stages)):
            one_forward_one_backward(run, list(members), microbatches, forward, [2 * each for each in forward])
        for stage in range(stages):
            run.meet([stage, stages + stage], "reduce_scatter", group="DP")

    return run.iterate(3, step)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 2), (3, 12)])
def test_even_stages_have_the_schedules_bubble_and_no_more(tmp_path, stages, microbatches):
    found = _pipelines(stages, microbatches).captured(tmp_path).facts.pipeline.to_pylist()
    ideal = (stages - 1) / (microbatches + stages - 1)
    assert [(row["stage"], row["microbatches"]) for row in found] == [(stage, microbatches) for stage in range(stages)]
    for row in found:
        assert row["ideal_bubble_fraction"] == pytest.approx(ideal)
        assert row["bubble_fraction"] == pytest.approx(ideal, abs=0.005)
        assert row["warm_up_ns"] + row["steady_ns"] + row["cool_down_ns"] == pytest.approx(row["bubble_ns"])
        assert row["other_idle_ns"] < 0.01 * row["pipeline_ns"]
        assert microbatches < stages or row["steady_ns"] < 0.005 * row["pipeline_ns"]
    assert found[-1]["warm_up_ns"] == pytest.approx((stages - 1) * MS, rel=0.01)


def test_a_stage_with_more_work_is_the_uneven_one_and_the_others_wait_in_the_steady_phase(tmp_path):
    asked = _pipelines(2, 8, last=1.5).captured(tmp_path)
    light, heavy = asked.facts.pipeline.to_pylist()
    assert heavy["excess_compute_ns"] == pytest.approx(6 * MS, rel=0.01)
    assert heavy["steady_ns"] < 100 * US < 6 * MS < light["steady_ns"]
    waits = {(row["stage"], row["waits_for_stage"]): row for row in asked.facts.pipeline_waits.to_pylist()}
    direct = [row for row in asked.facts.waits.to_pylist() if row["rank"] % 2 != row["waits_for"] % 2]
    assert sum(row["wait_ns"] for row in waits.values()) * 2 * 3 == pytest.approx(sum(row["wait_ns"] for row in direct))
    assert (waits[0, 1]["ranks"], waits[0, 1]["wait_ns"] > 6 * MS) == ([0, 2], True)


def test_stages_that_are_not_captured_are_named(tmp_path):
    asked = _pipelines(3, 6).captured(tmp_path, ranks=[0, 3])
    assert values(asked.facts.pipeline, "stage", "stages", "ranks") == [(0, 3, [0, 3])]
    assert any(each.code == "stages_not_captured" and "stages 1, 2" in each.text for each in asked.facts.caveats("pipeline"))


def _training(slow, *, count=10, ranks=4, **how):
    """Ranks compute 20 ms an iteration within 0.5%, some more than that, in tensor pairs and across all."""
    run, chance = SimulatedRun(ranks, **how), random.Random(3)

    def step(number):
        for rank in range(ranks):
            run.compute(rank, chance.randrange(19_950_000, 20_050_000) + slow(number).get(rank, 0))
        for pair in range(0, ranks, 2):
            run.meet([pair, pair + 1])
        run.meet(range(ranks), "reduce_scatter", group="DP")

    return run.iterate(count, step)


def test_the_matrix_names_the_rank_that_came_last(tmp_path):
    run = SimulatedRun(3, offsets_ns={0: -900 * MS, 2: 44 * MS})
    run.iterate(1, lambda _: [*(run.compute(rank, each * MS) for rank, each in enumerate((1, 5, 2))), run.meet(range(3))])
    found = values(run.captured(tmp_path).facts.waits, "iteration", "rank", "waits_for", "wait_ns", "operations")
    assert found == [(10, 0, 1, 4 * MS, 1), (10, 2, 1, 3 * MS, 1)]


@pytest.mark.parametrize(
    ("slow", "how", "word", "rows"),
    [
        # Rank, its verdict, confidence, times slow; the slowest first.
        # Always one.
        (lambda _: {2: 3 * MS}, {}, "stable", [(2, "stable", "high", 10)]),
        # Each in turn.
        (lambda number: {number % 4: 3 * MS}, {"count": 12}, "rotating", [(rank, "sometimes", "low", 3) for rank in range(4)]),
        # Once.
        (lambda number: {1: 3 * MS} if number == 12 else {}, {}, "occasional", [(1, "sometimes", "low", 1)]),
        # Noise.
        (lambda _: {}, {}, "none", []),
        # In two iterations.
        (lambda _: {1: 3 * MS}, {"count": 2}, "stable", [(1, "stable", "low", 2)]),
    ],
)
def test_a_slow_rank_is_stable_if_it_is_slow_in_most_iterations(tmp_path, slow, how, word, rows):
    asked = _training(slow, **how).captured(tmp_path)
    found = asked.facts.stragglers
    judged = values(found, "rank", "verdict", "confidence", "times_slow")
    assert (verdict(found), sorted(row for row in judged if row[1] != "no")) == (word, rows)
    assert {row[2:] for row in judged if row[1] == "no"} <= {(None, 0)}
    count = how.get("count", 10)
    assert set(found["iterations"].to_pylist()) == {count}
    assert [sum(found[times].to_pylist()) for times in ("times_slowest", "times_fastest")] == [count, count]
    assert ("few_iterations_of_ranks" in [each.code for each in asked.facts.caveats("stragglers")]) == (count < 3)
    if word == "stable":
        (slowest, *excesses), *_ = values(found, "rank", "excess_own_ns", "excess_compute_ns")
        assert (slowest, excesses) == (rows[0][0], pytest.approx([3 * MS, 3 * MS], abs=100 * US))


def test_one_rank_or_ranks_whose_communication_cannot_be_matched_are_not_called_slow(tmp_path):
    run = _training(lambda _: {2: 3 * MS})
    alone = run.captured(tmp_path / "alone", ranks=[2])
    assert verdict(alone.facts.stragglers) == "unknown"
    assert "ranks_not_comparable" in [each.code for each in alone.facts.caveats("stragglers")]
    run.change_operations(group_name=None, group_ranks=None, group=None)
    asked = run.captured(tmp_path / "unmatched")
    assert set(values(asked.facts.ranks, "own_ns", "place")) == {(None, None)}
    assert min(asked.facts.ranks["compute_ns"].to_pylist()) > 19 * MS
    assert verdict(asked.facts.stragglers) == "unknown"
    assert "waiting_of_rank_unknown" in [each.code for each in asked.facts.caveats("ranks")]


def test_a_capture_that_starts_late_is_not_a_late_rank(tmp_path):
    rows = (
        _training(lambda _: {2: 3 * MS}, offsets_ns={1: 77 * MS}).captured(tmp_path, skip={3: 8}).facts.start_skew.to_pylist()
    )
    assert rows[1]["capture_start_ns"] < MS < 80 * MS < rows[3]["capture_start_ns"]
    assert rows[1]["clock_offset_ns"] == pytest.approx(-77 * MS, abs=US)
    assert max(rows, key=lambda row: row["median_late_ns"])["rank"] == 2


def test_waiting_during_compute_is_own_time(tmp_path):
    run = SimulatedRun(2)

    def step(_):
        begin = run.now_ns[0]
        run.compute(1, 10 * MS)
        run.meet([0, 1])
        run.ran(0, "compute", begin, begin + 6 * MS)

    found = values(run.iterate(3, step).captured(tmp_path).facts.ranks, "rank", "waiting_ns", "compute_ns")
    assert set(found) == {(0, 4 * MS, 6 * MS), (1, 0, 10 * MS)}
