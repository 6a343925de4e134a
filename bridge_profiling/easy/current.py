"""The hook that is open in this process through this package, for `phase` to name its ranges in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge_profiling.capture.hook import ProfilingHook

_open: list[ProfilingHook] = []


def opened(hook: ProfilingHook) -> None:
    """`hook` is open."""
    _open.append(hook)


def closed(hook: ProfilingHook) -> None:
    """`hook` is open no more."""
    if hook in _open:
        _open.remove(hook)


def current_hook() -> ProfilingHook | None:
    """The hook that was opened last, of those that are open."""
    return _open[-1] if _open else None
