"""Says at the end of a submission that a script captured nothing, because it ignored the overrides of a plugin."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import nemo_run as run

from bridge_profiling.config import OUTPUT_DIR_VARIABLE

#: NeMo-Run writes this file into an experiment's directory when its jobs are over.
_DONE = "_DONE"

NOTHING_CAPTURED = "captured nothing: the script does not read profiling overrides"


def announce_empty_captures(task: object, executor: Any) -> None:
    """When this process ends, say so if a script of this machine is over and no rank opened a hook."""
    if isinstance(task, run.Script) and isinstance(executor, run.LocalExecutor):
        atexit.register(_announce, executor, os.getpid())


def _announce(executor: Any, process: int) -> None:
    # A process that this one forked exits, too.
    if os.getpid() != process or not executor.job_dir:
        return
    job, captures = Path(executor.job_dir), Path(executor.env_vars.get(OUTPUT_DIR_VARIABLE) or "")
    if (job.parent / _DONE).exists() and not any(captures.glob("manifest/*/rank-*.json")):
        print(
            f"{job.name} {NOTHING_CAPTURED}, unless it failed early, as its log in {job} shows."
            " Have it call apply_overrides of bridge_profiling.overrides and open a ProfilingHook, or type"
            " bridge-profiling run instead of python",
            file=sys.stderr,
        )
