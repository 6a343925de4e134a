"""Profiling in the training loops of other frameworks: one adapter per framework, around one driver of the hook.

Runs in the job. Imports no nemo_run; only an adapter imports its framework.
"""
