"""Reads captures of any profiler into the same tables. Needs no torch."""
