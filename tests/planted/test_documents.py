"""The JSON documents about captures with known causes fit the published schemas, and their numbers add up."""

from __future__ import annotations

import json

import pytest

from bridge_profiling.analysis.attribution.parts import BY_CAUSE
from bridge_profiling.report import memory_view
from bridge_profiling.report.json import dumps
from tests.planted.cases import CASES
from tests.planted.conftest import RunOf
from tests.report.published import problems

pytestmark = pytest.mark.integration  # reads 25 captures


@pytest.mark.parametrize("name", CASES)
def test_each_fits_the_schema_and_its_budget_adds_up(run_of: RunOf, name: str) -> None:
    document = json.loads(dumps(run_of(name)))
    assert problems("analyze", document) == []
    budget, verdict = document["budget"], document["verdict"]
    assert [rank["rank"] for rank in budget["ranks"]] == CASES[name].captured
    for each in (budget, *budget["ranks"]):
        assert [f"{part['cause']}_us" for part in each["parts"]] == list(BY_CAUSE)
        assert sum(part["time_us"] for part in each["parts"]) == pytest.approx(each["iteration_us"])
        assert sum(part["share"] for part in each["parts"]) == pytest.approx(1)
    assert verdict["iteration_us"] == budget["iteration_us"]
    assert verdict["finding"] == next((finding["id"] for finding in document["findings"]), None)
    assert (verdict["outcome"] == "finding") == bool(document["findings"])


@pytest.mark.parametrize("pair", [["memory_leak_2"], ["memory_clean_2", "memory_leak_2"]])
def test_memory_fits_the_schema(run_of: RunOf, pair: list[str]) -> None:
    document = json.loads(memory_view.dumps(memory_view.ask(*map(run_of, pair))))
    assert problems("memory", document) == []
    assert bool(document["difference"]) == (len(pair) == 2)
