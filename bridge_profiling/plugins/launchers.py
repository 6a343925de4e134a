"""Looks at an executor's launcher without disturbing it, and gets one whose fields can be set.

`executor.get_launcher()` is avoided on real executors: it turns None into a Launcher for good, after which
`executor.launcher = "torchrun"` fails an assertion, and on Slurm it rewrites `ntasks_per_node` at once.
"""

from __future__ import annotations

from typing import Any

import nemo_run as run
from nemo_run.core.execution.launcher import LAUNCHER_MAP, Launcher

from bridge_profiling.errors import ProfilingConfigError


def current_launcher(executor: Any) -> Any:
    """The executor's launcher as it stands: a Launcher, a name, or None. Changes nothing."""
    launcher = executor.launcher
    if launcher is None or isinstance(launcher, (str, Launcher)):
        return launcher
    return executor.get_launcher()  # an executor of another make, or a mock in a test


def check_launcher(executor: Any) -> None:
    """Refuse a launcher that NeMo-Run does not know.

    Raises:
        ProfilingConfigError: a name missing from NeMo-Run's list.
    """
    launcher = current_launcher(executor)
    if isinstance(launcher, str) and launcher not in LAUNCHER_MAP:
        raise ProfilingConfigError(
            f"the executor's launcher {launcher!r} is not known",
            why=f"NeMo-Run has {', '.join(sorted(LAUNCHER_MAP))}",
            instead='Type launcher="torchrun", or leave it out',
        )


def settable_launcher(executor: Any) -> Any:
    """The executor's launcher as an object: None becomes a plain one, a name the launcher it stands for."""
    launcher = current_launcher(executor)
    if launcher is None:
        executor.launcher = Launcher()
    elif isinstance(launcher, str):
        executor.launcher = LAUNCHER_MAP[launcher]()
    return current_launcher(executor)


def replace_launcher(executor: Any, launcher: Launcher) -> None:
    """Give the executor another launcher, one that its own set-up will still see."""
    executor.launcher = launcher
    if isinstance(executor, run.Executor):
        # After a get_launcher() elsewhere, Slurm would skip the set-up that gives this launcher its files and tasks.
        executor._launcher_setup = False


def is_fault_tolerance(launcher: object) -> bool:
    """Whether this launcher is NVIDIA's fault-tolerance launcher; by its type, since mocks are truthy."""
    return isinstance(launcher, run.FaultTolerance) or launcher == "ft"


def starts_every_rank(launcher: object) -> bool:
    """Whether the launcher, not the script, decides how many ranks there are."""
    return isinstance(launcher, (run.Torchrun, run.FaultTolerance)) or launcher in ("torchrun", "ft")
