"""Comparisons of written runs and of captures with known causes."""

from tests.facts.conftest import _cached_elsewhere, run_of, write_trace

__all__ = ["_cached_elsewhere", "run_of", "write_trace"]
