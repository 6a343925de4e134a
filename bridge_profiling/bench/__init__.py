"""Micro-benchmarks: the speed of a link, a data loader or a step on its own, for comparison with a capture.

Runs in the environment of the training. `requests` and `results` import no torch, so that the other hosts can use them.
"""
