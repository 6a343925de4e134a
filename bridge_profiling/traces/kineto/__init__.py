"""Reads a torch profiler (Kineto) trace into the tables: any version since torch 1.8, CUDA or ROCm, in bounded memory."""

from bridge_profiling.traces.kineto.tables import read

__all__ = ["read"]
