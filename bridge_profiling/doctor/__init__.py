"""What would go wrong with a run, before it waits in a queue: one small check a question, each with what to do.

Looks at this machine and at a request; submits nothing, profiles nothing, and imports neither torch nor nemo_run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from bridge_profiling.doctor import conflicts, gpus, megatron, neighbours, nsys, output_dir, window
from bridge_profiling.doctor.experiment import find_experiment, read_experiment
from bridge_profiling.doctor.machine import Machine
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Status, Verdict, unknown

__all__ = ["Machine", "Request", "Status", "Verdict", "diagnose", "find_experiment", "read_experiment"]

_Check = Callable[[Request, Machine], Iterator[Verdict]]

#: What the request itself says; the same on every machine.
_OF_THE_REQUEST: tuple[_Check, ...] = (
    window.check_window_fits,
    window.check_ranks_exist,
)
#: What the machine decides; it counts where the job runs.
_OF_THE_MACHINE: tuple[_Check, ...] = (
    nsys.check_nsys,
    nsys.check_temporary_directory,
    nsys.check_cpu_sampling,
    nsys.check_gpu_metrics_permission,
    gpus.check_gpus,
    gpus.check_nccl_settings,
    neighbours.check_other_profilers,
    megatron.check_megatron_core,
)


def diagnose(request: Request, machine: Machine) -> list[Verdict]:
    """Every check's verdicts, in the order in which one mends them.

    Where the job runs elsewhere, what this machine has proves nothing about it: those verdicts become `unknown`, with what
    was seen here.
    """
    verdicts = list(conflicts.check_profilers(request, machine))
    if request.name and not (request.profiling.enabled or request.wants_nsys):
        return verdicts  # What is not profiled needs nothing more.
    verdicts += [verdict for check in _OF_THE_REQUEST for verdict in check(request, machine)]
    verdicts += output_dir.check_output_dir(request, machine)
    of_machine = [verdict for check in _OF_THE_MACHINE for verdict in check(request, machine)]
    if request.elsewhere:
        command = " ".join((*request.srun, "bridge-profiling doctor", "…"))
        verdicts.append(unknown("machine", request.elsewhere, f"Run the same where the job runs, for example `{command}`"))
        of_machine = [
            replace(
                verdict,
                # A warning stands: most of them come from the environment, which goes with the job.
                status=Status.warning if verdict.status is Status.warning else Status.unknown,
                found=f"on this machine: {verdict.found}",
            )
            for verdict in of_machine
        ]
    return verdicts + of_machine
