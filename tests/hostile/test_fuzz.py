"""Every target of `make fuzz` runs: a few examples of each, always the same ones."""

import pytest
from hypothesis import HealthCheck, given, settings

from tools.fuzz_targets import TARGETS

FEW = settings(max_examples=5, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", TARGETS)
def test_each_target_holds_for_a_few_examples(tmp_path, name):
    target, strategy = TARGETS[name]
    FEW(given(strategy)(lambda drawn: target(tmp_path, drawn)))()
