"""Runs of the real captures, opened and closed."""

from __future__ import annotations

from tests.analysis.conftest import _cached_elsewhere, captures, run_of, write_trace

__all__ = ["_cached_elsewhere", "captures", "run_of", "write_trace"]
