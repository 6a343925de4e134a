"""Numbers, ranks and advice as findings word them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from bridge_profiling.analysis.caveats import name_ranks


def ms(time_us: float) -> str:
    """A time with three digits, in milliseconds."""
    return f"{time_us / 1e3:.3g} ms" if time_us < 1e6 else f"{time_us / 1e3:,.0f} ms"


def gigabytes(size: float) -> str:
    """A large number of bytes."""
    return f"{size / 1e9:.1f} GB"


def megabytes(size: float) -> str:
    """A number of bytes per iteration."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else gigabytes(size)


def ranks_in_words(ranks: Sequence[int], everyone: Sequence[int]) -> str:
    """Ranks out of all captured ones: `both ranks`, `all 4 ranks`, `rank 2`, `ranks 1, 3`."""
    if len(ranks) == len(everyone) > 1:
        return "both ranks" if len(ranks) == 2 else f"all {len(ranks)} ranks"
    return name_ranks(ranks)


def by_rank(values: Mapping[int, float], digits: int = 3) -> dict[str, float]:
    """Rounded values by rank, as evidence holds them."""
    return {str(rank): round(value, digits) for rank, value in values.items()}


@cache
def _advice() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(files(__package__).joinpath("advice.toml").read_text(encoding="utf-8"))


def advice(finding: str, case: str = "default", **values: object) -> str:
    """What to change: an entry of advice.toml with values filled in."""
    return " ".join(_advice()[finding][case].split()).format_map(values)
