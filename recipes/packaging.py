"""Packages bridge_profiling with a job's own code, so that nothing needs to be installed in a container.

Submit host only. It packages the copy of bridge_profiling that is imported here, without its dependencies: ranks only need
torch.
"""

from __future__ import annotations

from pathlib import Path

import nemo_run as run

import bridge_profiling


def with_bridge_profiling(packager: run.Packager | None = None) -> run.Packager:
    """A packager that adds bridge_profiling to what another one packages.

    It is unpacked next to the job's code, in NeMo-Run's `code` directory: `python script.py` started there needs a
    PYTHONPATH of `/nemo_run/code`, which the executors of this project set.

    Args:
        packager: packages the job's own code; None archives the git repository of the working directory.

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
