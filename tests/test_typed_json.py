"""Reading decoded JSON as annotated types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from bridge_profiling.typed_json import read_typed


@dataclass
class Inner:
    number: int


@dataclass
class Outer:
    name: str
    inner: Inner | None
    mode: Literal["fast", "exact"] = "fast"
    either: list[int] | str = "all"
    ratio: float = 0.0
    parts: dict[str, Inner] = field(default_factory=dict)
    anything: Any = None


def test_nested_types_are_built_and_unknown_keys_ignored():
    content = {"name": "a", "inner": {"number": 1}, "either": [1, 2], "ratio": 2, "parts": {"x": {"number": 3}}, "more": 1}
    assert read_typed(content, Outer, "it") == Outer("a", Inner(1), either=[1, 2], ratio=2, parts={"x": Inner(3)})
    assert read_typed({"name": "a", "inner": None, "either": "pp", "anything": [None]}, Outer, "it").either == "pp"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": None}, "it.name is 'None', not of type str"),
        ({"inner": {"number": True}}, "it.inner.number is 'True', not of type int"),
        ({"inner": {}}, "it.inner has no 'number'"),
        ({"inner": []}, "it.inner is .*not an object"),
        ({"mode": "slow"}, "it.mode is 'slow', not one of fast, exact"),
        ({"mode": []}, "it.mode is .*not one of fast, exact"),
        ({"either": [1, "2"]}, "it.either is .*not of type str"),
        ({"ratio": "1"}, "it.ratio is '1', not of type float"),
        ({"parts": {"x": 1}}, "it.parts.x is '1', not an object"),
    ],
)
def test_other_types_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        read_typed({"name": "a", "inner": None} | changed, Outer, "it")
