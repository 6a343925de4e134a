"""Caveats as sentences for the user. Each is said once and names its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bridge_profiling.layout import name_ranks
from bridge_profiling.traces.types import Caveat, filled


def caveat(code: str, ranks: Iterable[int] = (), file: str | None = None, **values: object) -> Caveat:
    """An entry of caveats.toml with values filled in."""
    text = filled(__package__, "caveats.toml", code, **values)
    return Caveat(code, text, tuple(sorted(ranks)), file)


def merged(caveats: Iterable[Caveat]) -> list[Caveat]:
    """Caveats in order of first appearance; those that differ only in their ranks become one."""
    found: dict[tuple[str, str, str | None], Caveat] = {}
    for caveat in caveats:
        key = caveat.code, caveat.text, caveat.file
        first = found.get(key)
        ranks = caveat.ranks if first is None else tuple(sorted({*first.ranks, *caveat.ranks}))
        found[key] = replace(caveat, ranks=ranks)
    return list(found.values())


def sentences(caveats: Iterable[Caveat]) -> list[str]:
    """Each caveat as text that starts with its ranks, if it applies to some ranks only."""
    return [f"{name_ranks(caveat.ranks)}: {caveat.text}" if caveat.ranks else caveat.text for caveat in merged(caveats)]
