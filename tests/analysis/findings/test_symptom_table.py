"""docs/how-to/from-symptom-to-setting.md: every finding has its row, and every setting that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bridge_profiling.analysis.findings import ORDER

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "from-symptom-to-setting.md"

_SETTING = re.compile(r"`(model|ddp|optimizer|dataset|train|checkpoint|logger|profiling)\.(\w+)")


def test_every_finding_has_one_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(ORDER)


@pytest.mark.needs("megatron")
def test_every_setting_that_it_names_is_one_of_the_recipes() -> None:
    from recipes.config import ConfigContainer

    config = ConfigContainer()
    named = set(_SETTING.findall(PAGE.read_text(encoding="utf-8")))
    assert len(named) > 40
    unknown = [f"{section}.{name}" for section, name in named if not hasattr(getattr(config, section), name)]
    assert unknown == []
