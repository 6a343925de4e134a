"""Causes planted into real trainings on the host's side: each is found where it is, and not in its clean twin."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Finding
from tests.planted.cases import CASES, Case

Find = Callable[[Case], dict[str, Finding]]

#: Findings that are made here.
OURS = ("data_loading", "host_sync", "pageable_copy", "checkpoint_stall", "small_kernels")

#: What no clean case and no case of another cause may be blamed for.
FALSE_ALARMS = {*OURS, "copy_bound", "host_launch_bound"}

#: What the host of a planted rank is held for that costs its device no time: it works meanwhile.
_HIDDEN = 0.2

#: What the ranges hold beside what was planted: the loader's own work.
_ITS_OWN = 0.1


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Findings of a case; each is read once."""

    @functools.cache
    def found(name: str) -> dict[str, Finding]:
        with Run(CASES[name].folder, parquet=tmp_path_factory.mktemp("parquet")) as run:
            return {finding.id: finding for finding in run.findings()}

    return lambda case: found(case.name)


def _captured(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in cases if case.folder.is_dir()]


@pytest.mark.parametrize("case", _captured([case for case in CASES.values() if case.finding in OURS]))
def test_a_planted_cause_comes_first_on_the_ranks_that_have_it(find: Find, case: Case) -> None:
    first = next(iter(find(case).values()))
    assert first.id == case.finding
    assert first.ranks == [rank for rank in case.planted_ranks if rank in case.captured]
    assert FALSE_ALARMS & set(find(case)) == {case.finding}
    if case.planted_host_ms_per_iteration is not None:
        planted_us = 1e3 * case.planted_host_ms_per_iteration
        assert (1 - _HIDDEN) * planted_us <= first.recoverable_us_per_iteration <= (1 + _ITS_OWN) * planted_us
    if case.planted_synchronizations_per_iteration is not None:
        assert max(first.evidence["synchronizations"].values()) >= case.planted_synchronizations_per_iteration
    if case.planted_bytes_per_iteration is not None:
        copied = max(row["bytes"] for row in first.evidence["copies"])
        assert copied == pytest.approx(case.planted_bytes_per_iteration * len(case.iterations), rel=1e-6)


@pytest.mark.parametrize("case", _captured([case for case in CASES.values() if case.finding not in OURS]))
def test_no_host_is_blamed_for_what_was_not_planted(find: Find, case: Case) -> None:
    assert not FALSE_ALARMS & set(find(case))
