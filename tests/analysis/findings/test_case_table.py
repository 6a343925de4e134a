"""Every capture whose cause is known: the right finding on the right ranks, no false alarm, and the docs' table of all of them.

UPDATE_CASE_TABLE=1 writes the table anew; what changed is then for `git diff` and a reader.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling.analysis.findings import Finding
from tests.analysis.findings.case_table import NO_CAUSE, PLANTED, Judged, Known, judge, markdown, replaced, shared_captures

# A minute and a half of reading: test_planted_hosts.py and test_real_captures.py have what every change is held against.
pytestmark = pytest.mark.system

Judge = Callable[[Known], Judged]

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "known-causes.md"

EXAMPLES = PAGE.parents[1] / "how-to" / "worked-examples.md"

#: Of what a planted rank is held for, its device may be spared a part: it has work queued. What is found holds beside it the
#: loader's own work.
_AT_LEAST, _AT_MOST = 0.65, 1.1

#: A bound is what could be given back at the most, and two captures of one configuration differ: no closer than this is it
#: held against what the cause has cost beyond the clean twin.
_FACTOR = 2.0

#: Less than this is how far two captures of the same are apart.
_APART_MS = 5.0

_WITH_CAUSE = [known for known in PLANTED if known.finding]
_WITH_TWIN = [known for known in PLANTED if known.twin]
_BY_NAME = {known.name: known for known in PLANTED}


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """What is found in a capture; each is read once for all tests."""
    kept: dict[str, Judged] = {}

    def of(known: Known) -> Judged:
        if known.name not in kept:
            kept[known.name] = judge(known, tmp_path_factory.mktemp("tables"))
        return kept[known.name]

    return of


@pytest.fixture
def shared(judged: Judge, captures: Path) -> Callable[[str], Judged]:
    """What is found in a real capture, by its name."""
    known = {each.name: each for each in shared_captures(captures)}
    return lambda name: judged(known[name])


def _named(known: Known) -> str:
    return known.name


@pytest.mark.parametrize("known", _WITH_CAUSE, ids=_named)
def test_a_planted_cause_comes_first_on_the_ranks_that_have_it(judged: Judge, known: Known) -> None:
    found = judged(known)
    assert found.planted is not None
    assert (found.place, found.planted.ranks) == (1, known.ranks)
    assert found.planted.events


@pytest.mark.parametrize("known", [known for known in _WITH_CAUSE if known.planted_ms is not None], ids=_named)
def test_it_could_give_back_what_was_planted(judged: Judge, known: Known) -> None:
    found = judged(known).planted
    assert found is not None
    assert _AT_LEAST * known.planted_ms <= found.recoverable_us_per_iteration / 1e3 <= _AT_MOST * known.planted_ms


@pytest.mark.parametrize("known", _WITH_TWIN, ids=_named)
def test_all_bounds_together_fit_what_an_iteration_takes_beyond_the_clean_twins(judged: Judge, known: Known) -> None:
    found, clean = judged(known), judged(_BY_NAME[known.twin])
    cost_ms = found.iteration_ms - clean.iteration_ms
    bound_ms = sum(each.recoverable_us_per_iteration or 0.0 for each in found.findings) / 1e3
    if cost_ms > _APART_MS:
        assert cost_ms / _FACTOR <= bound_ms <= cost_ms * _FACTOR
    else:
        # Memory costs no time, and the checkpoint lies between iterations; two captures by nsys may be further apart than that.
        assert known.finding in ("memory_growth", "memory_fragmentation", "checkpoint_stall") or known.name.endswith("_nsys")


@pytest.mark.parametrize("known", PLANTED, ids=_named)
def test_nothing_that_is_not_there_is_found(judged: Judge, known: Known) -> None:
    assert judged(known).false_alarms == []


@pytest.mark.parametrize("known", _WITH_TWIN, ids=_named)
def test_the_clean_twin_is_free_of_the_cause(judged: Judge, known: Known) -> None:
    assert known.finding not in {each.id for each in judged(_BY_NAME[known.twin]).findings}


@pytest.mark.parametrize("name", sorted({known.twin for known in _WITH_TWIN}))
def test_in_a_clean_twin_nothing_at_all_is_found_but_what_the_profiler_costs(judged: Judge, name: str) -> None:
    assert {each.id for each in judged(_BY_NAME[name]).findings} <= {"profiler_overhead"}


@pytest.mark.parametrize("name", ["straggler_compute_2", "straggler_compute_4", "straggler_host_2"])
def test_a_planted_straggler_is_whom_the_others_wait_for(judged: Judge, name: str) -> None:
    _only_ranks_that_others_wait_for(judged(_BY_NAME[name]))


def test_slow_data_comes_first_with_what_it_costs_on_all_ranks(shared: Callable[[str], Judged]) -> None:
    first = shared("kineto/plant_data").findings[0]
    assert (first.id, first.ranks) == ("data_loading", [0, 1, 2, 3])
    assert first.recoverable_us_per_iteration == pytest.approx(121_000, rel=0.01)


def test_the_rank_with_more_matrix_products_is_found_and_who_waits_is_none(shared: Callable[[str], Judged]) -> None:
    found = shared("kineto/plant_straggler")
    planted = found.planted
    assert planted is not None
    assert planted.ranks == [2]
    assert planted.evidence["of_matrix_products_us"] == pytest.approx(planted.evidence["excess_compute_us"]["2"], rel=0.1)
    (products,) = planted.events
    assert (products.rank, products.count) == (2, 160)
    # Rank 3 waits most, and rank 1 after it.
    assert not {1, 3} & {rank for each in _stragglers(found) for rank in each.ranks}
    _only_ranks_that_others_wait_for(found)


def test_late_hosts_are_found_where_communication_is_long_on_the_others(shared: Callable[[str], Judged]) -> None:
    found = shared("kineto/tp2_dp2")
    by_id = {each.id: each for each in found.findings}
    assert (found.place, by_id["straggler_host"].ranks, by_id["host_launch_bound"].ranks) == (1, [1, 3], [1, 3])
    assert not {"exposed_communication", "low_overlap"} & by_id.keys()


def test_the_stages_of_a_pipeline_are_told_apart_without_blaming_the_longer(shared: Callable[[str], Judged]) -> None:
    judged = shared("kineto/pp2_dp2")
    first, last = judged.stages
    assert (first["ranks"], last["ranks"]) == ([0, 1], [2, 3])
    assert last["compute_us"] > 1.1 * first["compute_us"]
    assert last["bubble_us"] < first["bubble_us"]
    # Four layers each, and the output layer is less than one of them: moving a layer would make it worse.
    assert not {"pipeline_bubble", "straggler_compute", "straggler_host"} & {each.id for each in judged.findings}


def test_a_capture_by_nsys_is_judged_by_its_own_evidence(shared: Callable[[str], Judged]) -> None:
    found = shared("nsys/tp2_dp2")
    assert found.planted is not None
    # In these iterations the hosts of ranks 0 and 2 are late, and not those of 1 and 3 as in the capture by PyTorch's profiler.
    assert (found.place, found.planted.ranks) == (1, [0, 2])
    # It has no messages to match between ranks, but the late ones spend least in communication: they wait for nobody.
    late, waiting = ([found.communication_us[rank] for rank in ranks] for ranks in ((0, 2), (1, 3)))
    assert max(late) < min(waiting)


def test_every_real_capture_shows_what_is_known_of_it_and_no_more(judged: Judge, captures: Path) -> None:
    for known in shared_captures(captures):
        found = judged(known)
        assert found.false_alarms == [], known.name
        if known.finding:
            assert found.planted is not None, known.name
            assert found.planted.ranks == known.ranks, known.name


def test_the_docs_have_the_table_of_planted_causes(judged: Judge) -> None:
    _compare("planted", markdown([judged(known) for known in PLANTED]))


def test_the_docs_have_the_table_of_real_captures(judged: Judge, captures: Path) -> None:
    _compare("real", markdown([judged(known) for known in shared_captures(captures)]))


def test_the_docs_name_what_is_no_cause_of_its_own() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{each}`" in text for each in NO_CAUSE)


@pytest.mark.parametrize("name", ["kineto/plant_data", "kineto/plant_straggler", "kineto/tp2_dp2"])
def test_the_worked_examples_quote_what_is_found(shared: Callable[[str], Judged], name: str) -> None:
    text = " ".join(EXAMPLES.read_text(encoding="utf-8").split())
    missing = [finding.title for finding in shared(name).findings if finding.title not in text]
    assert missing == []


def _stragglers(found: Judged) -> list[Finding]:
    return [each for each in found.findings if each.id.startswith("straggler_")]


def _only_ranks_that_others_wait_for(found: Judged) -> None:
    assert _stragglers(found)
    for finding in _stragglers(found):
        for rank in finding.ranks:
            assert found.waited_for_us[rank] > found.waiting_us[rank], (found.known.name, finding.title)


def _compare(block: str, table: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    expected = replaced(page, block, table)
    if os.environ.get("UPDATE_CASE_TABLE"):
        PAGE.write_text(expected, encoding="utf-8")
        return
    assert page == expected, f"the table in {PAGE.name} is not what is found; UPDATE_CASE_TABLE=1 writes it anew"
