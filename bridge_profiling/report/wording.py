"""Numbers and ranks in words, on the page and on the terminal: a value with its unit, and no more digits than matter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from bridge_profiling.analysis.caveats import name_ranks


def milliseconds(time_us: float | None, digits: int | None = None) -> str:
    """A time: "121 ms", "8.4 ms", "0.031 ms"; a dash for what is not known.

    Args:
        time_us: in microseconds.
        digits: after the point; None for as many as matter.
    """
    if time_us is None:
        return "–"
    time_ms = time_us / 1e3
    if digits is None:
        digits = 0 if abs(time_ms) >= 20 else 1 if abs(time_ms) >= 0.1 else 3 if time_ms else 0
    return _minus(f"{time_ms:,.{digits}f} ms")


def percent(share: float | None) -> str:
    """A share of 1: "31%", "0.4%"."""
    if share is None:
        return "–"
    return _minus(f"{share:.0%}" if abs(share) >= 0.095 or not share else f"{share:.1%}")


def size(amount: float | None) -> str:
    """Bytes: "8.4 MB", "1.07 GB"; powers of ten, as bandwidths are."""
    if amount is None:
        return "–"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(amount) >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount:.0f} B"


def mebibytes(amount: float | None) -> str:
    """Device memory: "812.5 MiB", "73.2 GiB"; powers of two, as allocators count."""
    if amount is None:
        return "–"
    return _minus(f"{amount / 2**30:.2f} GiB" if abs(amount) >= 2**30 else f"{amount / 2**20:.1f} MiB")


def number(value: float | None, unit: str = "") -> str:
    """Any other number: "1,088", "277.4 GB/s"."""
    if value is None:
        return "–"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return _minus(f"{text} {unit}".rstrip())


def bandwidth(gigabytes_per_second: float | None) -> str:
    """A bandwidth without its unit: "277", "5.2", "0.0005"."""
    if gigabytes_per_second is None:
        return "–"
    speed = gigabytes_per_second
    return f"{speed:,.0f}" if speed >= 20 else f"{speed:.1f}" if speed >= 0.1 else f"{speed:.1g}"


def ranks(members: Sequence[int], everyone: int | None = None) -> str:
    """Ranks as a sentence names them: "all 4 ranks", "rank 2", "ranks 1, 3".

    Args:
        members: those meant.
        everyone: how many are captured; None where that is not to be said.
    """
    if everyone is not None and len(members) == everyone > 1:
        return f"all {everyone} ranks"
    return name_ranks(sorted(members)) if members else "no rank"


#: Of more numbers than this, the first are listed.
_MOST = 12

#: Words in the names of evidence that are units, and how a value with each is written.
_UNITS: dict[str, Callable[[float], str]] = {
    "us": milliseconds,
    "bytes": mebibytes,
    "share": percent,
    "fraction": percent,
    "gbs": lambda value: number(value, "GB/s"),
}

#: Units that are no part of the words: a share is a share of something.
_UNSAID = ("us", "bytes", "gbs")


def heading(name: str) -> str:
    """A name of a number in words: `bus_bandwidth_gbs` is "bus bandwidth"."""
    return " ".join(word for word in name.split("_") if word not in _UNSAID)


def value(name: str, amount: Any) -> str:
    """A number of evidence with the unit that its name holds; what is no number as it is.

    Args:
        name: as the analysis calls it: `wait_us`, `peak_bytes`, `busy_share`.
        amount: a number, text, a list or a dictionary of them.
    """
    if amount is None:
        return "–"
    if isinstance(amount, bool):
        return "yes" if amount else "no"
    if isinstance(amount, str):
        return amount
    if isinstance(amount, dict):
        # What evidence has several of, it has by rank.
        separator = "; " if any(isinstance(each, dict) for each in amount.values()) else ", "
        return _listed(
            [f"{_rank(key)}: {value(name, each)}" for key, each in list(amount.items())[:_MOST]], len(amount), separator
        )
    if isinstance(amount, (list, tuple)):
        return _listed([value(name, each) for each in amount[:_MOST]], len(amount))
    if isinstance(amount, (int, float)):
        unit = next((word for word in name.split("_") if word in _UNITS), None)
        return number(amount) if unit is None else _UNITS[unit](amount)
    return json.dumps(amount, default=str)


def _listed(words: Sequence[str], count: int, separator: str = ", ") -> str:
    return separator.join(words) + (f" and {count - len(words):,} more" if count > len(words) else "")


def _rank(key: Any) -> str:
    return f"rank {key}" if isinstance(key, int) or str(key).isdigit() else heading(str(key))


def _minus(text: str) -> str:
    """With a minus sign in place of the hyphen, and none before nothing."""
    if not text.startswith("-"):
        return text
    return f"−{text[1:]}" if any(digit in "123456789" for digit in text) else text[1:]
