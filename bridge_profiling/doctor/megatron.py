"""Whether the megatron-core installed here is a release that this project is tested with."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_profiling.doctor.machine import Machine, Unavailable
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Verdict, checked, ok, warning
from bridge_profiling.megatron_versions import tested_requirement, untested


@checked("megatron-core")
def check_megatron_core(request: Request, machine: Machine) -> Iterator[Verdict]:
    """The installed release; nothing where there is none, since a job may train with another framework."""
    try:
        version = machine.package_version("megatron-core")
    except Unavailable:
        return
    problem = untested(version)
    if problem is None:
        yield ok(f"megatron-core {version} belongs to a tested series")
    else:
        yield warning(problem, f"If the job fails, type pip install {tested_requirement()}")
