"""Micro-benchmarks: what a link, a copy, a data loader and a step give alone, so that a capture can be compared with it.

Runs where the training runs; imports torch when a benchmark begins, and nothing of a desk's.
"""
