"""Values in words, and texts that they are filled into: a number with its unit, and no more digits than matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from string import Formatter
from typing import Any

from bridge_profiling.layout import name_ranks, number_ranges
from bridge_profiling.traces.types import texts

#: Stands for a value that is not known.
UNKNOWN = "–"


def number(value: float | None) -> str:
    """Any number: "1,088", "277.4"."""
    if value is None:
        return UNKNOWN
    return _minus(f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}")


def named_ranks(members: Sequence[int], everyone: int | None = None) -> str:
    """Ranks as a sentence names them: "rank 2", "ranks 0-5, 7"; "both ranks" or "all 4 ranks" if as many as `everyone`."""
    if everyone is not None and len(members) == everyone > 1:
        return "both ranks" if everyone == 2 else f"all {everyone} ranks"
    return name_ranks(members) if members else "no rank"


def short(name: str | None, most_letters: int = 600) -> str:
    """A name without its middle if it is long: the same in a table and in the timeline, which lead to each other."""
    name = name or "?"
    return name if len(name) <= most_letters else f"{name[: most_letters // 2]} … {name[-most_letters // 2 :]}"


def _date(unix_ns: int | None) -> str:
    """Nanoseconds since 1970 as "2026-03-01 02:15 UTC"."""
    return UNKNOWN if unix_ns is None else datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")


#: Formats that `formats.toml` cannot declare. They get None, too.
_FUNCTIONS: Mapping[str, Callable[[Any], str]] = {
    "plain": lambda value: value if isinstance(value, str) else number(value),
    "number": number,
    "rounded": lambda value: number(value and round(value, 1)),
    "hundredths": lambda value: number(value and round(value, 2)),
    "microseconds": lambda time_ns: UNKNOWN if time_ns is None else f"{time_ns / 1e3:,.1f} µs",
    "identifier": lambda value: UNKNOWN if value is None else str(value),
    "optional": lambda value: "" if value is None else str(value),
    "date": _date,
    "ranks": named_ranks,
    "ranges": number_ranges,
    "short": short,
    "example": lambda name: short(name, 120),
    "hyphens": lambda name: name.replace("_", "-"),
    "yes": lambda value: "yes" if value else "no",
    "checked": lambda value: "yes" if value else "NO",
}


def is_format(name: str) -> bool:
    """Whether a format has this name."""
    return name in _FUNCTIONS or name in texts(__package__, "formats.toml")


def written(format: str, value: Any) -> str:
    """A value in the format of a name. `UNKNOWN` stands for None."""
    if format in _FUNCTIONS:
        return _FUNCTIONS[format](value)
    if value is None:
        return UNKNOWN
    declared = texts(__package__, "formats.toml")[format]
    divisor, template = next(rest for least, *rest in declared if not abs(value) < least)
    return _minus(template.format(value / divisor))


def _minus(text: str) -> str:
    """With a minus sign instead of the hyphen, and no sign for zero."""
    if text[:1] not in "+-":
        return text
    if not any(digit in "123456789" for digit in text):
        return text[1:]
    return f"−{text[1:]}" if text[0] == "-" else text


class _Formatter(Formatter):
    def __init__(self, whole: float) -> None:
        self._whole = whole

    def format_field(self, value: Any, format_spec: str) -> str:
        # Of numbers by rank, the largest one.
        value = max(value.values(), default=0.0) if isinstance(value, Mapping) else value
        if format_spec == "share":
            return written("percent", value / self._whole if self._whole else 0.0)
        return written(format_spec, value) if is_format(format_spec) else str(super().format_field(value, format_spec))


def fill(text: str, /, *values: object, share_of: float = math.inf, **named: object) -> str:
    """A text with values filled in, "{lost_ns:ms}" in the format of that name. Line breaks count as spaces.

    Args:
        share_of: what "{lost_ns:share}" is a share of.
    """
    return _Formatter(share_of).vformat(" ".join(text.split()), values, named)
