"""docs/how-to/make-it-faster.md: every finding has its row, and every setting that it names exists."""

import re
from pathlib import Path

import pytest

from bridge_profiling.findings import ORDER

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "make-it-faster.md").read_text(encoding="utf-8")


def test_every_finding_has_one_row():
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == sorted(ORDER)


@pytest.mark.needs("megatron")
def test_every_setting_that_it_names_is_one_of_the_recipes():
    from recipes.config import ConfigContainer

    named = set(re.findall(r"`(model|ddp|optimizer|dataset|train|checkpoint|logger|profiling)\.(\w+)", PAGE))
    assert len(named) > 40
    config = ConfigContainer()
    assert [each for each in sorted(named) if not hasattr(getattr(config, each[0]), each[1])] == []
