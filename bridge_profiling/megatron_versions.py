"""The releases of megatron-core that the recipes and the Megatron Bridge callback are tested with. Needs no torch."""

from __future__ import annotations

import re

#: The newest patch release of each series, oldest first. `make test-versions` runs all of them.
TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")

_OLDEST, _NEWEST = ([int(part) for part in version.split(".")[:2]] for version in (TESTED[0], TESTED[-1]))


def untested(version: str) -> str | None:
    """One line on a release of megatron-core that no test has run with.

    Args:
        version: for example `0.20.0` or `0.18.0rc2`.

    Returns:
        None for a release of a tested series.
    """
    series = re.match(r"(\d+)\.(\d+)", version)
    if series is not None and _OLDEST <= [int(part) for part in series.groups()] <= _NEWEST:
        return None
    return f"megatron-core {version} is not tested with this project; {TESTED[0]} to {TESTED[-1]} are"


def tested_requirement() -> str:
    """Argument for `pip install` that selects a tested release."""
    return f"'megatron-core>={TESTED[0]},<{_NEWEST[0]}.{_NEWEST[1] + 1}'"
