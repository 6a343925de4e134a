"""Operations of different ranks are matched when they are one and the same, and only then."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_profiling.analysis.ranks.matching import match
from tests.analysis.simulated_runs import MS, US, SimulatedRun


def _training(ranks, clocks, *, iterations=3, seed=0):
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


def _matched(run, folder, skip={}, **how):  # noqa: B006
    """How many matches there are by their number of ranks, all of one operation each, and the codes of the caveats."""
    connection = run.connected(folder, skip=skip, **how)
    codes = [caveat.code for caveat in match(connection)]
    truths = run.truths(skip)
    rows = connection.execute("select match, rank, collective from matched").fetchall()
    assert len({(number, truths[rank][place]) for number, rank, place in rows}) == len({number for number, *_ in rows})
    return dict(Counter(Counter(number for number, *_ in rows).values())), codes


@pytest.mark.parametrize(
    ("run", "how", "matches", "codes"),
    [
        # By their place in the iteration.
        (_training(4, {}), {}, {2: 24, 4: 6}, []),
        # Without the rank not captured.
        (_training(4, {}), {"ranks": [0, 1, 3]}, {2: 12, 3: 6}, ["groups_partly_captured"]),
        # Where captures that begin within an iteration overlap.
        (
            _training(4, {1: 40 * MS, 2: -7 * MS}),
            {"skip": {1: 3, 3: 8}},
            {2: 9 + 6, 3: 2, 4: 4},
            ["operations_unmatched", "captures_aligned"],
        ),
        # The same operations recur in each iteration: only the moments at which they end show which is which.
        # By their ends, in a capture that begins an iteration later, with none marked.
        (
            _training(2, {1: 3_000 * MS}, iterations=5),
            {"skip": {1: 6}, "marked": False, "clock": "unknown"},
            {2: 4 * 6},
            ["operations_unmatched", "captures_aligned"],
        ),
    ],
)
def test_operations_match(tmp_path, run, how, matches, codes):
    assert _matched(run, tmp_path, **how) == (matches, codes)


def test_iterations_of_nearly_one_length_are_distinguished_by_the_ends_of_their_operations(tmp_path):
    """Steps that differ by 0.1 ms, ends that scatter by 5 us, clocks 40 s apart, nothing marked."""
    run, chance = SimulatedRun(2, offsets_ns={1: 40_000 * MS}), random.Random(4)

    def step(_):
        for _ in range(6):
            for rank in range(2):
                run.compute(rank, chance.randrange(4_000 * US, 4_020 * US))
            run.meet([0, 1])

    run.iterate(6, step)
    for row in [*run.operations[0], *run.operations[1]]:
        row["end_ns"] += chance.randrange(-5 * US, 5 * US)
    assert _matched(run, tmp_path, {1: 12}, marked=False)[0] == {2: 24}


def test_a_handful_of_operations_that_fit_anywhere_is_left_unmatched(tmp_path):
    """Clocks of which nothing is known, two operations an iteration that look like those of the next one."""
    run, chance = SimulatedRun(2, offsets_ns={1: 9_000 * MS}), random.Random(6)

    def step(_):
        run.compute(0, chance.randrange(90 * MS, 99 * MS))
        run.meet([0, 1], "reduce_scatter")
        run.meet([0, 1], "all_gather")

    assert _matched(run.iterate(2, step), tmp_path, {1: 2}, marked=False) == ({}, ["operations_unmatched"])


# Not random from run to run: iterations can last equally long by chance.
@settings(max_examples=12, derandomize=True)
@given(
    skips=st.tuples(*[st.integers(0, 11)] * 4),
    clocks=st.tuples(*[st.integers(-(10**10), 10**10)] * 4),
    seed=st.integers(0, 1000),
    marked=st.booleans(),
)
def test_whatever_the_clocks_and_wherever_captures_begin_all_that_overlaps_is_matched(
    tmp_path_factory, skips, clocks, seed, marked
):
    run, skip = _training(4, dict(enumerate(clocks)), iterations=4, seed=seed), dict(enumerate(skips))
    held = Counter(truth for truths in run.truths(skip).values() for truth in truths)
    shared = Counter(count for count in held.values() if count > 1)
    assert _matched(run, tmp_path_factory.mktemp("run"), skip, marked=marked)[0] == shared


_UNMATCHED = ({}, ["operations_unmatched"])


@pytest.mark.parametrize(
    ("operations", "recorded", "expected"),
    [
        (("broadcast", "broadcast"), {}, _UNMATCHED),
        (("all_gather", "all_reduce"), {}, _UNMATCHED),
        (("all_reduce", "all_gather"), {"message_bytes": 7}, _UNMATCHED),
        (("all_reduce", "all_gather"), {"group_name": None, "group_ranks": None}, ({}, ["operations_without_group"])),
    ],
)
def test_only_operations_of_one_kind_size_place_and_group_match(tmp_path, operations, recorded, expected):
    run = SimulatedRun(2)
    run.iterate(2, lambda _: [run.meet([0, 1], "all_reduce"), run.meet([0, 1], "all_gather")])
    run.change_operations([0, 1] if "group_name" in recorded else [1], **recorded)
    for row, operation in zip(run.operations[1], operations * 2, strict=True):
        row["operation"] = operation
    assert _matched(run, tmp_path) == expected


def test_an_uneven_all_to_all_matches_though_its_messages_differ(tmp_path):
    run = SimulatedRun(2)
    run.iterate(2, lambda _: run.meet([0, 1], "all_to_all"))
    run.change_operations([1], message_bytes=7)
    assert _matched(run, tmp_path) == ({2: 2}, [])


def test_sends_and_kernels_that_send_and_receive_match_those_of_their_peers(tmp_path):
    run = SimulatedRun(4)

    def step(_):
        for source, target in ((0, 1), (1, 2), (0, 1), (2, 3), (1, 2), (3, 2), (2, 1)):
            run.compute(source, 1 * MS)
            run.send(source, target, range(4))
        for _ in range(3):
            run.compute(0, 2 * MS)
            run.exchange(0, 1)

    # An exchange is two transfers, one in each direction.
    assert _matched(run.iterate(3, step), tmp_path) == ({2: 3 * (7 + 2 * 3)}, [])
