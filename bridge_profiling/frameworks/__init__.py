"""Profiling in training loops that are not ours: one adapter per framework around one session, and unchanged scripts.

Runs in the job. Imports no nemo_run; only an adapter imports its framework.
"""
