"""Numbers, ranks and labels in words: a value with its unit, and no more digits than matter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from bridge_profiling.facts.words import UNKNOWN, fill, written
from bridge_profiling.traces.types import texts

#: Items of evidence that are listed.
_MOST_ITEMS = 12

#: Nanoseconds as "8.4 ms" or as "8.40" for columns in milliseconds, a share as "31%", bytes of memory as "812.5 MiB".
ms, bare_ms, percent, memory = (partial(written, name) for name in ("ms", "bare_ms", "percent", "memory"))


def resource(name: str) -> Any:
    """The content of a TOML file of this package: texts, tables, the theme of figures."""
    return texts(__package__, f"{name}.toml")


def text(kind: str, name: str) -> Any:
    """What `text.toml` has of a kind under a name; None if there is nothing."""
    return resource("text")[kind].get(name)


def say(name: str, /, *values: Any, **named: Any) -> str:
    """An entry of `sentences.toml` with values filled in, "{0:percent}" in the format of that name."""
    return fill(resource("sentences")[name], *values, **named)


def saving(
    estimate_ns: float | None, at_most_ns: float | None = None, *, share: Callable[[float], float | None], per: str = ""
) -> str:
    """An estimated saving and its upper bound: "about 7.0 ms (12%), at most 23 ms (38%)"; "" if both are unknown.

    Args:
        estimate_ns: None if unknown.
        at_most_ns: None if unknown.
        share: the share of an iteration that a time is; None if unknown.
        per: what the times refer to, as " per iteration".
    """
    found: list[str] = []
    for limit, time_ns in (("about", estimate_ns), ("at most", at_most_ns)):
        if time_ns is not None:
            of = "" if (part := share(time_ns)) is None else f" ({percent(part)})"
            found.append(f"{limit} {ms(time_ns)}{'' if found else per}{of}")
    return ", ".join(found)


def counted(count: int, noun: str) -> str:
    """ "1 rank", "1,024 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def device(rank: int, device: int) -> str:
    """A device of a rank; its number is left out if a rank's only device has it."""
    return f"rank {rank}" if device in (0, rank) else f"rank {rank}, device {device}"


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")


def first_sentence(text: str) -> str:
    """The first sentence of a text, in full."""
    return sentence(re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.strip())[0])


#: Units in names of evidence, and the formats of values with each.
UNITS = {"ns": "ms", "bytes": "memory", "share": "percent", "fraction": "percent", "gbs": "GB/s"}


def label(name: str) -> str:
    """A name of evidence in words: `bus_bandwidth_gbs` is "bus bandwidth"."""
    return text("labels", name) or " ".join(word for word in name.split("_") if word not in ("ns", "bytes", "gbs"))


def value(name: str, amount: Any) -> str:
    """A value of evidence with the unit that its name holds; `amount` is a number, a text, or a list or dict of them."""
    if amount is None:
        return UNKNOWN
    if isinstance(amount, bool):
        return "yes" if amount else "no"
    if isinstance(amount, str):
        return amount
    if isinstance(amount, (dict, list, tuple)):
        items = [("", each) for each in amount] if isinstance(amount, (list, tuple)) else list(amount.items())
        # Keys are ranks, parts with values by rank, or names of values; the unit is in a key's name, else in the dictionary's.
        by_rank = all(str(key).isdigit() for key, _ in items)
        parts = []
        for key, each in items[:_MOST_ITEMS]:
            of = f"rank {key}: " if by_rank else f"{label(str(key))}: " if key else ""
            parts.append(of + value(key if any(word in UNITS for word in str(key).split("_")) else name, each))
        more = f" and {len(items) - len(parts):,} more" if len(items) > len(parts) else ""
        return ("; " if any(isinstance(each, dict) for _, each in items) else ", ").join(parts) + more
    if isinstance(amount, (int, float)):
        unit = next((word for word in name.split("_") if word in UNITS), None)
        return written("number" if unit is None else UNITS[unit], amount)
    return json.dumps(amount, default=str)
