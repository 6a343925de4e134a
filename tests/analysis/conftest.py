"""Runs, and the engines that read them."""

from tests.facts.conftest import _cached_elsewhere, captures, real, run_of, write_trace

__all__ = ["_cached_elsewhere", "captures", "real", "run_of", "write_trace"]
