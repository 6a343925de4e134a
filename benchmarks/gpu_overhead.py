"""What profiling costs a training: outside the window, inside it, after it, and when a trace is written.

    python benchmarks/gpu_overhead.py --json overhead.json                     every case, on every GPU of the machine at once
    python benchmarks/gpu_overhead.py --cases idle inside-torch --seconds 120  some of them, by name or by a beginning of names
    python benchmarks/gpu_overhead.py --list

A training step on one GPU, small and bound by the host (gpu_training.py), so that profiling's cost to the host is fully
visible. The sides of a ratio take turns inside one process, in a new random order each time; ratios are medians
of paired ratios with a bootstrapped 95% interval (paired.py). One case runs on one GPU with its own share of the cores. A case
that fails is reported and the others continue; results are printed and written as they arrive. Without a GPU, `gpt_tiny` on the
CPU shows that the script works; its figures are meaningless.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Started by its path, Python looks for modules in benchmarks/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.gpu_cases import OVERHEAD_CASES
from benchmarks.gpu_edges import EDGE_CASES
from benchmarks.gpu_schedule import main
from benchmarks.trace_cost import COST_CASES

if __name__ == "__main__":
    main((*OVERHEAD_CASES, *EDGE_CASES, *COST_CASES), __doc__)
