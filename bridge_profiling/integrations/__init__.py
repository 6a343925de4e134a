"""Profiling inside training loops that are not ours: one module a framework, each an adapter around the hook.

Runs in the job. Imports no nemo_run, and the framework itself only where it is unavoidable.
"""
