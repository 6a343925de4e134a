"""Numbers with their units, as the documents' types name them. A schema has the unit of a number as `x-unit`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Microseconds = Annotated[float, Meta(extra_json_schema={"x-unit": "us"})]
Nanoseconds = Annotated[int, Meta(extra_json_schema={"x-unit": "ns"})]
Bytes = Annotated[int, Meta(extra_json_schema={"x-unit": "bytes"})]
#: Of means, and of changes.
MeanBytes = Annotated[float, Meta(extra_json_schema={"x-unit": "bytes"})]
#: 10⁹ bytes per second.
Bandwidth = Annotated[float, Meta(extra_json_schema={"x-unit": "1e9 bytes/s"})]
#: 10¹² floating-point operations per second.
Teraflops = Annotated[float, Meta(extra_json_schema={"x-unit": "1e12 FLOP/s"})]
#: 1 is the whole.
Share = Annotated[float, Meta(extra_json_schema={"x-unit": "share"})]
Count = Annotated[int, Meta(ge=0)]
#: A global rank.
Rank = Annotated[int, Meta(ge=0)]
#: A global rank as a key.
RankKey = Annotated[str, Meta(pattern="^[0-9]+$")]


def doc(text: str) -> Meta:
    """The description of a key."""
    return Meta(description=text)
