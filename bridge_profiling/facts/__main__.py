"""Writes the facts about captures, so that no other command has to read these: `python -m bridge_profiling.facts RUN...`.

Arguments, or lines on standard input, are runs' directories or single traces. The facts about a trace in a run of ours go to
`facts/iter-10-12/rank-0.torch.facts` there, those of others to the cache. Each line of the output is a file of facts. Memory
snapshots have none: facts about them need the iterations of their rank's trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from bridge_profiling.common.errors import TraceError, shortage
from bridge_profiling.facts.rank import rank_facts
from bridge_profiling.facts.store import DEFAULT_OPTIONS, fact_files, find_facts, keep_facts
from bridge_profiling.traces import cache
from bridge_profiling.traces.discover import Capture, find_run


def write_facts(capture: Capture) -> Path:
    """Compute the facts about a trace and write them, unless a file has them. Returns the file.

    Raises:
        TraceError: the trace cannot be read.
        OSError: the trace is gone, or the facts cannot be written.
    """
    files = fact_files(capture, cache.places(capture))
    for path in files:
        if find_facts(capture, [path]) is not None:
            return path
    tables = cache.load(capture, cached=False)
    facts, refused = rank_facts(tables, DEFAULT_OPTIONS), OSError("no place for facts")
    for path in files:
        try:
            keep_facts(capture, tables.info, facts, path)
        except UnicodeEncodeError:
            raise TraceError(f"the manifest of {capture.path} is not UTF-8") from None
        except OSError as error:
            refused = error
        else:
            return path
    raise refused


def main(paths: Iterable[str]) -> int:
    """Write the facts of each; 1 if some could not be."""
    failed = False
    for path in map(Path, paths):
        # With the run's manifests, as a command on the run finds the trace.
        root = path.absolute().parents[2] if path.is_file() and len(path.absolute().parents) > 2 else path
        run = root if (root / "manifest").is_dir() else path
        try:
            found = [each for each in find_run(run).captures if each.source != "memory" and each.path.is_relative_to(path)]
        except TraceError as error:
            print(f"error: {error}", file=sys.stderr)
            failed, found = True, []
        for capture in found:
            try:
                print(write_facts(capture), flush=True)
            except (TraceError, OSError) as error:
                failed = True
                reason = shortage(error) or (error.strerror if isinstance(error, OSError) else None) or error
                print(f"error: no facts about {capture.path}: {reason}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or (line.rstrip("\n") for line in sys.stdin)))
