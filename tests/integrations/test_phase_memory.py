"""Memory of phases, from an allocator's counters as CUDA's keeps them."""

from __future__ import annotations

from contextlib import nullcontext

from bridge_profiling.integrations.phases import PhaseMemory


class Allocator:
    """Counts as torch's caching allocator does: what is allocated, and the most since the last reset."""

    def __init__(self):
        self.current = self.peak = 0

    def take(self, amount):
        self.current += amount
        self.peak = max(self.peak, self.current)

    def current_and_peak(self):
        told = (self.current, self.peak)
        self.peak = self.current
        return told


def test_each_phase_has_its_own_peak_and_an_outer_one_the_highest_inside():
    allocator = Allocator()
    memory = PhaseMemory(allocator.current_and_peak)
    allocator.take(100)
    allocator.take(900)
    allocator.take(-900)
    with memory.around(3, "forward", nullcontext()):
        allocator.take(50)
    with memory.around(3, "optimizer", nullcontext()):
        allocator.take(10)
        with memory.around(3, "backward", nullcontext()):
            allocator.take(400)
            allocator.take(-450)
        allocator.take(5)
    assert memory.table == {
        "device": "cuda",
        "iteration": [3, 3, 3],
        "phase": ["forward", "backward", "optimizer"],
        "before_bytes": [100, 160, 150],
        "after_bytes": [150, 110, 115],
        "peak_bytes": [150, 560, 560],
    }


def test_counters_that_cannot_be_read_cost_the_row_and_not_the_training():
    def gone():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    memory = PhaseMemory(gone)
    entered = []
    with memory.around(3, "forward", nullcontext()):
        entered.append(True)
    assert entered == [True]
    assert memory.table["phase"] == []
