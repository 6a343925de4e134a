"""Opens the runs that a command reads: directories, files or NeMo-Run experiments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_profiling.cli.output import check_output, progress
from bridge_profiling.common.errors import require

if TYPE_CHECKING:
    from bridge_profiling.run import Run


@contextmanager
def open_runs(*paths: Path, output: Path | None = None, fetch: bool = False, **options: Any) -> Iterator[list[Run]]:
    """Open runs with one progress bar; with `fetch`, captures of NeMo-Run experiments are copied from other machines first.

    A path is a directory or file, or an experiment's id or title, followed by `/job` if it has several jobs; `output` is the
    value of `-o`, and `options` are those of `Run`.
    """
    check_output(output)
    located = [_locate(path, fetch) for path in paths]
    # For PyArrow: a single capture is read in this process, and Arrow's own allocator keeps a quarter of the memory.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # Imported here: `--help` and other commands start faster without it.
    from bridge_profiling.facts.engines import without_pandas
    from bridge_profiling.run import Run

    with ExitStack() as stack:
        stack.enter_context(without_pandas())
        on_progress = stack.enter_context(progress("reading", "captures"))
        yield [stack.enter_context(Run(path, on_progress=on_progress, **options)) for path in located]


def _locate(path: Path, fetch: bool) -> Path:
    from bridge_profiling.experiments.captures import captures_of
    from bridge_profiling.experiments.jobs import experiment_of

    experiment = experiment_of(path)
    if experiment is None:
        require(path.exists(), f"{path} does not exist", instead="Type a file, a directory or a NeMo-Run experiment")
        return path
    with progress("fetching", "files") as on_progress:
        return captures_of(*experiment, remote=fetch, on_progress=on_progress)
