"""The releases of megatron-core called tested are those that the package asks for, and that `make test-versions` runs."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from bridge_profiling import megatron_versions

ROOT = Path(__file__).resolve().parents[1]


def test_the_package_asks_for_the_tested_releases():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = [one for one in map(Requirement, extras["megatron"]) if one.name == "megatron-core"]
    assert all(asked.specifier.contains(version) for version in megatron_versions.TESTED)
    assert asked == Requirement(megatron_versions.tested_requirement().strip("'"))
    assert megatron_versions.untested("0.20.0")
    assert not asked.specifier.contains("0.20.0")
