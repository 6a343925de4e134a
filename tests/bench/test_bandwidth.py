"""nccl-tests' factors, by hand."""

from __future__ import annotations

import pytest

from bridge_profiling.bench.bandwidth import bus_factor


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 4, 0.75),
        ("send", 2, 1.0),
        ("send_recv", 8, 1.0),
    ],
)
def test_factors(operation, ranks, factor):
    assert bus_factor(operation, ranks) == factor
