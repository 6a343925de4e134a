"""Every target of `make fuzz` runs: a few examples of each, always the same ones; with FUZZ_EXAMPLES, so many new ones."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.hostile.fuzz_targets import TARGETS

#: Examples that failed are repeated first.
KEPT = Path(__file__).parents[2] / ".cache" / "fuzz"

FEW = settings(max_examples=5, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MANY = settings(
    FEW,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", 1)),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(KEPT),
    print_blob=True,
)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.timeout(86400 if "FUZZ_EXAMPLES" in os.environ else 600)
def test_each_target_holds(tmp_path, name):
    target, strategy = TARGETS[name]
    (MANY if "FUZZ_EXAMPLES" in os.environ else FEW)(given(strategy)(lambda drawn: target(tmp_path, drawn)))()
