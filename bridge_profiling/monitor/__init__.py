"""Monitoring of a training and its machine: GPUs, processes and iterations, for JSON lines and Prometheus.

Sampling happens in a background thread, in a rank or in a process of its own. Nothing here imports torch; torch's memory
statistics come from the torch that the process has already loaded. A metric that cannot be read is reported as unavailable,
with the reason, never as zero.
"""

# ruff: noqa: F401  # the public names

from bridge_profiling.monitor.alerts import Alert, LeakAlert, SlowIterationAlert
from bridge_profiling.monitor.gpu_monitor import GPUMonitor
from bridge_profiling.monitor.metrics import Readings, Sample
from bridge_profiling.monitor.outputs import JsonLines, Prometheus
from bridge_profiling.monitor.sampler import Monitor
from bridge_profiling.monitor.training import Throughput, TrainingMonitor
