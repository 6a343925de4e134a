"""Sends bridge_profiling along with a job's own code, so that a container needs nothing installed in it.

Submit host only. It packages the copy of bridge_profiling that is imported here, and nothing of what that depends on: a
rank's part of it needs torch alone.
"""

from __future__ import annotations

from pathlib import Path

import nemo_run as run

import bridge_profiling


def with_bridge_profiling(packager: run.Packager | None = None) -> run.Packager:
    """A packager that adds bridge_profiling to what another one packages.

    The job finds it beside its own code, in NeMo-Run's `code` directory: `python script.py` started there needs a
    PYTHONPATH of `/nemo_run/code`, which the executors of this project set.

    Args:
        packager: what packages the job's own code; None archives the git repository of the working directory.

    Returns:
        A packager for any executor that takes one.
    """
    package = Path(bridge_profiling.__file__).resolve().parent
    return run.HybridPackager(
        sub_packagers={
            "code": run.GitArchivePackager() if packager is None else packager,
            "bridge_profiling": run.PatternPackager(include_pattern=str(package), relative_path=str(package.parent)),
        },
        extract_at_root=True,
    )
