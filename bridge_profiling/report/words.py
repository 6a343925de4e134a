"""Numbers, ranks and labels in words: a value with its unit, and no more digits than matter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from string import Formatter
from typing import Any

from bridge_profiling.layout import name_ranks
from bridge_profiling.traces.types import texts

#: Stands for a value that is not known.
UNKNOWN = "–"

#: Items of evidence that are listed.
_MOST_ITEMS = 12

#: A time in microseconds as a share of an iteration; None if unknown.
Share = Callable[[float], float | None]


def resource(name: str) -> Any:
    """The content of a TOML file of this package: texts, tables, the theme of figures."""
    return texts(__package__, f"{name}.toml")


def text(kind: str, name: str) -> Any:
    """What `text.toml` has of a kind under a name; None if there is nothing."""
    return resource("text")[kind].get(name)


def say(name: str, /, *values: Any, **named: Any) -> str:
    """An entry of `sentences.toml` with values filled in, "{0:percent}" as the function of that name writes it."""
    return _SENTENCES.vformat(resource("sentences")[name], values, named)


class _Sentences(Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        """The text of a value: by a function of this module, else as Python does."""
        signed, _, name = format_spec.rpartition(" ")
        if name not in WRITTEN:
            return super().format_field(value, format_spec)
        return WRITTEN[name](value, signed=True) if signed else WRITTEN[name](value)


_SENTENCES = _Sentences()


def milliseconds(time_us: float | None) -> str:
    """A time in microseconds as "121 ms", "8.4 ms" or "0.031 ms"."""
    if time_us is None:
        return UNKNOWN
    time_ms = abs(time_us) / 1e3
    return _minus(f"{time_us / 1e3:,.{0 if time_ms >= 20 or not time_ms else 1 if time_ms >= 0.1 else 3}f} ms")


def saving(estimate_us: float | None, at_most_us: float | None, share: Share | None = None, per: str = "") -> str:
    """An estimated saving and its upper bound: "about 7.0 ms (12%), at most 23 ms (38%)"; "" if both are unknown.

    Args:
        estimate_us: None if unknown.
        at_most_us: None if unknown.
        share: of an iteration, of a time.
        per: what the times refer to, as " per iteration".
    """
    found: list[str] = []
    for limit, time_us in (("about", estimate_us), ("at most", at_most_us)):
        if time_us is not None:
            part = None if share is None else share(time_us)
            unit = "" if found else per
            found.append(f"{limit} {milliseconds(time_us)}{unit}" + ("" if part is None else f" ({percent(part)})"))
    return ", ".join(found)


def ms(time_us: float | None, *, signed: bool = False) -> str:
    """A time in microseconds as "121.23", for columns in milliseconds; with its sign if it is a change."""
    return UNKNOWN if time_us is None else _minus(f"{time_us / 1e3:{'+' if signed else ''},.2f}")


def change(time_us: float | None) -> str:
    """A change of time with its unit: "+18.7 ms"."""
    if time_us is None:
        return UNKNOWN
    return _minus(f"{time_us / 1e3:+.1f} ms" if abs(time_us) >= 50 else f"{time_us / 1e3:+.3f} ms")


def percent(share: float | None, *, signed: bool = False) -> str:
    """A share of 1 as "31%" or "0.4%"; a relative change as "+20.0%"."""
    if share is None:
        return UNKNOWN
    if signed:
        return _minus(f"{share:+.1%}")
    return _minus(f"{share:.0%}" if abs(share) >= 0.095 or not share else f"{share:.1%}")


def speedup(factor: float | None) -> str:
    """How many times as fast: "1.12×"."""
    return UNKNOWN if factor is None else f"{factor:.2f}×"


def date(unix_ns: int | None) -> str:
    """Nanoseconds since 1970 as "2026-03-01 02:15 UTC"."""
    return UNKNOWN if unix_ns is None else datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")


def size(amount: float | None) -> str:
    """Bytes of a message: "8.4 MB", "1.07 GB"; powers of ten, like bandwidths."""
    if amount is None:
        return UNKNOWN
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(amount) >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount:.0f} B"


def memory(amount: float | None, *, signed: bool = False) -> str:
    """Bytes of device memory: "812.5 MiB", "73.2 GiB"; powers of two, like allocators count."""
    if amount is None:
        return UNKNOWN
    sign = "+" if signed and amount > 0 else ""
    return _minus(f"{sign}{amount / 2**30:.2f} GiB" if abs(amount) >= 2**30 else f"{sign}{amount / 2**20:.1f} MiB")


def binary_size(amount: int) -> str:
    """Bytes as they are typed on the command line: "64 KiB", "1.5 MiB", "1000 B"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= factor:
            return f"{amount / factor:.4g} {unit}"
    return f"{amount} B"


def number(value: float | None, unit: str = "") -> str:
    """Any other number: "1,088", "277.4 GB/s"."""
    if value is None:
        return UNKNOWN
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return _minus(f"{text} {unit}".rstrip())


def bandwidth(gigabytes_per_second: float | None) -> str:
    """A bandwidth without its unit: "277", "5.2", "0.0005"."""
    if gigabytes_per_second is None:
        return UNKNOWN
    speed = gigabytes_per_second
    return f"{speed:,.0f}" if speed >= 20 else f"{speed:.1f}" if speed >= 0.1 else f"{speed:.1g}"


def counted(count: int, noun: str) -> str:
    """ "1 rank", "1,024 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranks(members: Sequence[int], everyone: int | None = None) -> str:
    """Ranks as a sentence names them: "rank 2", "ranks 0-5, 7"; "both ranks" or "all 4 ranks" if as many as `everyone`."""
    if everyone is not None and len(members) == everyone > 1:
        return "both ranks" if everyone == 2 else f"all {everyone} ranks"
    return name_ranks(members) if members else "no rank"


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


#: Functions that templates and declarations of tables name.
WRITTEN: Mapping[str, Callable[..., str]] = {
    each.__name__: each
    for each in (milliseconds, ms, change, percent, speedup, date, size, memory, binary_size, number, bandwidth, ranks)
}

#: Units in names of evidence, and how a value with each is written.
UNITS: Mapping[str, Callable[..., str]] = {
    "us": milliseconds,
    "bytes": memory,
    "share": percent,
    "fraction": percent,
    "gbs": lambda value: number(value, "GB/s"),
}


def label(name: str) -> str:
    """A name of evidence in words: `bus_bandwidth_gbs` is "bus bandwidth"."""
    return text("labels", name) or " ".join(word for word in name.split("_") if word not in ("us", "bytes", "gbs"))


def value(name: str, amount: Any) -> str:
    """A value of evidence with the unit that its name holds; `amount` is a number, a text, or a list or dict of them."""
    if amount is None:
        return UNKNOWN
    if isinstance(amount, bool):
        return "yes" if amount else "no"
    if isinstance(amount, str):
        return amount
    if isinstance(amount, dict):
        inner = list(amount.items())[:_MOST_ITEMS]
        by_rank = all(isinstance(key, int) or str(key).isdigit() for key in amount)
        # Keys are ranks, parts with values by rank, or names of values.
        parts = [
            f"rank {key}: {value(name, each)}" if by_rank else f"{label(str(key))}: {value(_unit_name(name, key), each)}"
            for key, each in inner
        ]
        return _listed(parts, len(amount), "; " if any(isinstance(each, dict) for each in amount.values()) else ", ")
    if isinstance(amount, (list, tuple)):
        nested = "; " if any(isinstance(each, dict) for each in amount) else ", "
        return _listed([value(name, each) for each in amount[:_MOST_ITEMS]], len(amount), nested)
    if isinstance(amount, (int, float)):
        unit = next((word for word in name.split("_") if word in UNITS), None)
        return number(amount) if unit is None else UNITS[unit](amount)
    return json.dumps(amount, default=str)


def _unit_name(name: str, key: str) -> str:
    """The name that holds the unit of a value in a dictionary: its key's, else the dictionary's."""
    return key if any(word in UNITS for word in key.split("_")) else name


def _listed(items: Sequence[str], count: int, separator: str = ", ") -> str:
    return separator.join(items) + (f" and {count - len(items):,} more" if count > len(items) else "")


def _minus(text: str) -> str:
    """With a minus sign instead of the hyphen, and no sign for zero."""
    if text[:1] not in "+-":
        return text
    if not any(digit in "123456789" for digit in text):
        return text[1:]
    return f"−{text[1:]}" if text[0] == "-" else text


def short(name: str | None, most_letters: int = 600) -> str:
    """A name without its middle if it is long: the same in a table and in the timeline, which lead to each other."""
    name = name or "?"
    return name if len(name) <= most_letters else f"{name[: most_letters // 2]} … {name[-most_letters // 2 :]}"
