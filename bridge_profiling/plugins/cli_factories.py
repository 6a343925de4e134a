"""Names for the plugins on the NeMo-Run command line: `run.plugins=nsys run.plugins.profile_step_start=10`.

`nemorun` loads this module through the entry point group `nemo_run.cli`; a script of your own that calls `run.cli.main`
must import it. The plugins have no default steps; here they are Megatron Bridge's 10 and 12.
"""

# No `from __future__ import annotations`: NeMo-Run reads the return annotations of factories.

import nemo_run as run

from bridge_profiling.plugins import FaultTolerancePlugin, NsysPlugin, PyTorchProfilerPlugin
from bridge_profiling.settings.profiling import ProfilingConfig

_START, _END = ProfilingConfig().profile_step_start, ProfilingConfig().profile_step_end


@run.cli.factory(target=run.Plugin)
def nsys(profile_step_start: int = _START, profile_step_end: int = _END) -> run.Config[NsysPlugin]:
    """Profile a window with Nsight Systems."""
    return run.Config(NsysPlugin, profile_step_start=profile_step_start, profile_step_end=profile_step_end)


@run.cli.factory(target=run.Plugin)
def pytorch_profiler(profile_step_start: int = _START, profile_step_end: int = _END) -> run.Config[PyTorchProfilerPlugin]:
    """Profile a window with torch.profiler."""
    return run.Config(PyTorchProfilerPlugin, profile_step_start=profile_step_start, profile_step_end=profile_step_end)


@run.cli.factory(target=run.Plugin)
def memory(profile_step_start: int = _START, profile_step_end: int = _END) -> run.Config[PyTorchProfilerPlugin]:
    """Profile a window with torch.profiler and record the memory history."""
    plugin = pytorch_profiler(profile_step_start, profile_step_end)
    plugin.record_memory_history = True
    return plugin


@run.cli.factory(target=run.Plugin)
def fault_tolerance() -> run.Config[FaultTolerancePlugin]:
    """Run under NVIDIA's fault-tolerance launcher."""
    return run.Config(FaultTolerancePlugin)
