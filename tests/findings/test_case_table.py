"""Every capture whose cause is known has the findings of tests/planted/KNOWN_CAUSES.md, and no others.

The page's tables are the expectation: what is found, at which place, on which ranks, with which saving and confidence.
"""

import functools
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from bridge_profiling.run import Run
from tests.findings.simulated_jobs import Here
from tests.planted.cases import CASES

# Minutes of reading.
pytestmark = pytest.mark.integration

_COLUMNS = """name injected on injected_ms over_baseline_ms found place ranks
    saving_ms confidence also alarms"""

_LINES = (Path(__file__).parents[1] / "planted" / "KNOWN_CAUSES.md").read_text(encoding="utf-8").replace("`", "").splitlines()
_ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in _LINES if line.startswith("| ")]
KNOWN = {row[0]: SimpleNamespace(**dict(zip(_COLUMNS.split(), row, strict=True))) for row in _ROWS if row[-1] == "none"}
REAL = [name for name in KNOWN if "/" in name]


@pytest.fixture(scope="session")
def judge(request, tmp_path_factory):
    """Analyses a capture as a user does; each is read once for all tests."""

    @functools.cache
    def judged(name):
        folder = CASES[name].folder if name in CASES else request.getfixturevalue("captures") / name
        with Run(folder, parquet=tmp_path_factory.mktemp("tables"), engine=Here()) as run:
            durations: dict[int, list[float]] = {}
            for row in run.facts.iterations.to_pylist():
                durations.setdefault(row["rank"], []).append(row["duration_ns"])
            iteration_ms = median(median(each) for each in durations.values()) / 1e6
            return SimpleNamespace(findings=run.findings, iteration_ms=iteration_ms)

    return judged


def test_the_page_has_every_capture():
    assert [name for name in KNOWN if name not in REAL] == list(CASES)
    assert len(REAL) == 6


def _about(shown):
    """A number of a table, which has two digits."""
    return pytest.approx(float(shown), rel=0.05, abs=0.06)


@pytest.mark.parametrize("name", KNOWN)
def test_a_capture_has_the_findings_of_its_row_and_no_others(judge, name):
    row, judged, case = KNOWN[name], judge(name), CASES.get(name)
    cause = judged.findings[int(row.place) - 1] if row.place else None
    assert [each.id for each in judged.findings if each is not cause] == list(filter(None, row.also.split(", ")))
    assert row.found == (cause.id if cause else "nothing")
    if case:
        assert row.found == (case.finding or "nothing")
        assert row.on == ", ".join(str(rank) for rank in case.planted_ranks if rank in case.captured)
    if case and case.twin:
        assert judged.iteration_ms - judge(case.twin).iteration_ms == _about(row.over_baseline_ms)
    if cause:
        assert row.on == row.ranks == ", ".join(map(str, cause.ranks))
        assert row.confidence == str(cause.confidence)
        assert cause.recoverable_ns_per_iteration is None or cause.recoverable_ns_per_iteration / 1e6 == _about(row.saving_ms)
        assert cause.events
