"""Bus bandwidth from algorithm bandwidth, by nccl-tests' formulas. Imports no torch.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations


def bus_factor(operation: str, ranks: int) -> float:
    """What an operation's algorithm bandwidth is multiplied with to be that of the busiest link.

    2(n-1)/n for all_reduce, whose every byte goes out and comes back reduced; (n-1)/n for operations that leave one part in n
    where it is; 1 for what goes from one rank to another.

    Args:
        operation: of `requests.OPERATIONS`.
        ranks: n, at least 1.
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in ("all_gather", "reduce_scatter", "all_to_all") else 1.0
