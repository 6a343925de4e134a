"""What a training and its machine do while it runs: GPUs, processes, iterations; as JSON lines, for Prometheus and TensorBoard.

Runs in a rank or beside it, from a thread of its own. Imports no torch: it asks the one that the process has loaded. What
cannot be read is missing together with the reason; it is never a zero.
"""

from bridge_profiling.monitor.alerts import Alert, LeakAlert, SlowIterationAlert
from bridge_profiling.monitor.counters import Counters
from bridge_profiling.monitor.gpu_monitor import GPUMonitor
from bridge_profiling.monitor.jsonl import JsonLines
from bridge_profiling.monitor.monitor import Monitor
from bridge_profiling.monitor.prometheus import Prometheus
from bridge_profiling.monitor.readings import Readings, Sample
from bridge_profiling.monitor.tensorboard import TensorBoard
from bridge_profiling.monitor.training import Throughput, TrainingMonitor

__all__ = [
    "Alert",
    "Counters",
    "GPUMonitor",
    "JsonLines",
    "LeakAlert",
    "Monitor",
    "Prometheus",
    "Readings",
    "Sample",
    "SlowIterationAlert",
    "TensorBoard",
    "Throughput",
    "TrainingMonitor",
]
