"""The releases of megatron-core that the recipes and the Megatron Bridge callback are tested with. Needs no torch."""

from __future__ import annotations

import re

#: The newest patch release of each series, oldest first. `make test-versions` runs all of them.
TESTED = ("0.18.2", "0.19.2")


def series_of(version: str) -> tuple[int, int] | None:
    """The first two numbers of a package's version; None where it does not begin with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def untested(version: str) -> str | None:
    """One line on a release of megatron-core that no test has run with; None for a release of a tested series."""
    if series_of(version) in {series_of(one) for one in TESTED}:
        return None
    return f"megatron-core {version} is not tested with this project; {TESTED[0]} to {TESTED[-1]} are"


def tested_requirement() -> str:
    """Argument for `pip install` that selects a tested release."""
    major, minor, _ = TESTED[-1].split(".")
    return f"'megatron-core>={TESTED[0]},<{major}.{int(minor) + 1}'"
