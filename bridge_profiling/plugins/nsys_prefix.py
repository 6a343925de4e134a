"""Makes NeMo-Run's own `nsys profile …` prefix work, for tasks that do not start nsys themselves.

As NeMo-Run 0.11.1 writes it, the prefix ends with an argument too many, carries options that some versions of nsys refuse,
samples GPU metrics only where a variable is set that nothing sets, hides the head node's address from torchrun while it does
so, and reports to the temporary directory where the report's folder is missing. A shell script between NeMo-Run and nsys
mends all of that where the job runs, where alone the version of nsys is known.

It is put on the one executor object that a plugin is given, through methods that NeMo-Run itself calls on it while
packaging; NeMo-Run's classes stay as they are.
"""

from __future__ import annotations

import shlex
import types
from typing import Any

import nemo_run as run

from bridge_profiling.nsys.command import prefix_command
from bridge_profiling.plugins.launchers import current_launcher, starts_every_rank

#: On Slurm, one report a task: the job, the node, the task, and torch's rank, which is the task's where srun starts all ranks.
SLURM_FILENAME = "profile_%p_%q{SLURM_JOB_ID}_node%q{SLURM_NODEID}_rank%q{SLURM_PROCID}"

#: Under torchrun one report holds a node's ranks, and the task's number is the rank of none of them.
SLURM_NODE_FILENAME = "profile_%p_%q{SLURM_JOB_ID}_node%q{SLURM_NODEID}"


def mend_nsys_prefix(executor: Any) -> None:
    """Have this executor start nsys through the script, where it starts processes or a batch script of ours to see."""
    if isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)):
        executor.get_launcher_prefix = types.MethodType(_prefix, executor)
        executor.get_nsys_entrypoint = types.MethodType(lambda _: ("bash", ""), executor)


def slurm_filename(executor: run.SlurmExecutor) -> str:
    """A name that no two reports of a job share, and that says what the report holds."""
    return SLURM_NODE_FILENAME if starts_every_rank(current_launcher(executor)) else SLURM_FILENAME


def _prefix(executor: Any) -> list[str] | None:
    launcher = current_launcher(executor)
    nsys = type(executor).get_launcher_prefix(executor) if launcher.nsys_profile else None
    if nsys is None:
        return None
    words = prefix_command(nsys, gpu_metrics=_gpus(executor, launcher))
    return [shlex.quote(word) for word in words] if isinstance(executor, run.SlurmExecutor) else words


def _gpus(executor: Any, launcher: Any) -> str:
    """The GPUs whose metrics one nsys samples: its rank's, or the machine's where it runs around all of its ranks."""
    if not launcher.nsys_gpu_metrics:
        return ""
    one_rank = isinstance(executor, run.SlurmExecutor) and not starts_every_rank(launcher)
    return "local" if one_rank else "all"
