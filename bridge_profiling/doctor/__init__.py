"""Checks for a run before it waits in a queue: each says whether something will go wrong, and what to do about it.

Reads this machine and a request. Submits nothing, profiles nothing, and imports neither torch nor nemo_run.
"""

from __future__ import annotations

from dataclasses import replace

from bridge_profiling.doctor import environment, gpus, nsys, profiling
from bridge_profiling.doctor.checks import Check, Machine, Status, Verdict
from bridge_profiling.doctor.request import Request, read_experiment
from bridge_profiling.experiments.jobs import find_experiment

__all__ = ["Machine", "Request", "Status", "Verdict", "diagnose", "find_experiment", "read_experiment"]

_REQUEST_CHECKS: tuple[Check, ...] = (profiling.check_window_fits, profiling.check_ranks_exist, profiling.check_output_dir)
#: Checks whose result counts on the machine that runs the job.
_MACHINE_CHECKS: tuple[Check, ...] = (
    nsys.check_nsys,
    nsys.check_temporary_directory,
    nsys.check_gpu_metrics_permission,
    gpus.check_gpus,
    environment.check_nccl_settings,
    environment.check_other_profilers,
    environment.check_megatron_core,
)


def diagnose(request: Request, machine: Machine) -> list[Verdict]:
    """The verdicts of all checks, in the order in which to act on them.

    Where the job runs elsewhere, this machine proves nothing about it: verdicts on the machine become `unknown`, with what
    was found here.
    """
    verdicts = list(profiling.check_profilers(request, machine))
    if request.name and not (request.profiling.enabled or request.wants_nsys):
        return verdicts
    verdicts += [verdict for check in _REQUEST_CHECKS for verdict in check(request, machine)]
    on_machine = [verdict for check in _MACHINE_CHECKS for verdict in check(request, machine)]
    if not request.elsewhere:
        return verdicts + on_machine
    instead = "Run doctor where the job runs, for example `srun bridge-profiling doctor …`"
    verdicts.append(Verdict("machine", "unknown", request.elsewhere, instead))
    for verdict in on_machine:
        # Warnings stay: most of them are about the environment, which is passed on to the job.
        status: Status = "warning" if verdict.status == "warning" else "unknown"
        verdicts.append(replace(verdict, status=status, found=f"on this machine: {verdict.found}"))
    return verdicts
