"""The repository agrees with itself: imports without cycles, releases, and pages that tools write."""

import re
import runpy
import tomllib
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest
from packaging.requirements import Requirement

from bridge_profiling.common import megatron_versions
from tools.budget import excesses
from tools.feature_table import PAGE, ROOT, features, page


def test_no_import_cycle():
    """Imports inside functions and under TYPE_CHECKING count: a cycle means that something is in the wrong module."""
    graph = grimp.build_graph("bridge_profiling", "recipes", "launch", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100, "the packages were not found"
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_package_asks_for_the_tested_releases():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = [one for one in map(Requirement, extras["megatron"]) if one.name == "megatron-core"]
    assert all(asked.specifier.contains(version) for version in megatron_versions.TESTED)
    assert asked == Requirement(megatron_versions.tested_requirement().strip("'"))
    assert megatron_versions.untested("0.20.0")
    assert not asked.specifier.contains("0.20.0")


def test_the_table_of_what_is_supported_is_current_and_its_files_exist():
    script = runpy.run_path(str(ROOT / "tools" / "support_table.py"))
    assert script["missing"]() == []
    assert script["PAGE"].read_text() == script["page"](), "type: python tools/support_table.py"


def test_every_feature_has_a_test_or_a_page_and_the_table_is_current():
    assert [row.evidence for row in features() if not row.holds] == []
    assert PAGE.read_text(encoding="utf-8") == page(), "type: python tools/feature_table.py"


def test_no_page_has_the_marks_of_an_unfinished_merge():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [str(each) for each in pages if re.search(r"^(<{7}|>{7}) ", each.read_text(encoding="utf-8"), re.MULTILINE)] == []


@pytest.mark.integration
def test_no_part_is_larger_than_its_budget():
    assert excesses() == [], "delete something first: python tools/budget.py"
