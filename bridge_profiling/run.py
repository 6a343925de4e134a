"""The public `Run`: every answer about a run, and the page, merged trace, figures and JSON made from the answers."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from bridge_profiling.answers import Answers
from bridge_profiling.errors import TraceError
from bridge_profiling.report.words import counted
from bridge_profiling.traces.discover import Capture

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from bridge_profiling.facts.captures import OnProgress
    from bridge_profiling.report.verdict import Conclusion


class Run(Answers):
    """The captures of a run.

    from bridge_profiling.run import Run
    run = Run("profiles")
    run.breakdown().to_pandas()
    run.report("report.html")
    """

    def __repr__(self) -> str:
        # What was found: nothing is read for this.
        captures = [source for source in self._captures.sources if isinstance(source, Capture)]
        if not captures:
            return f"Run({str(self.path)!r}, Parquet of {counted(len(self._captures.sources), 'capture')})"
        ranks, profilers = {capture.rank for capture in captures}, sorted({capture.source for capture in captures})
        return f"Run({str(self.path)!r}, {counted(len(ranks), 'rank')}, {' and '.join(profilers)})"

    @cached_property
    def conclusion(self) -> Conclusion:
        """What a report about the run concludes."""
        from bridge_profiling.report.verdict import conclude

        return conclude(self.facts, self.findings, self.unprofiled, self.against_bench)

    def report(self, output: str | Path = "report.html") -> Path:
        """Write the page that `bridge-profiling report` writes, as one HTML file that works offline.

        Args:
            output: the file, written atomically.

        Raises:
            TraceError: no capture could be read.
            ProfilingConfigError: the file cannot be written.
        """
        if not self.facts.readable:
            raise TraceError("; ".join(self.facts.errors))
        from bridge_profiling.report.page import write_page
        from bridge_profiling.report.run_view import page_view

        view = partial(page_view, self.facts, self.conclusion, Path(output))
        write_page(self.facts.captures.undisturbed(view), Path(output))
        return Path(output)

    def merge(
        self,
        output: str | Path = "all_ranks.json.gz",
        *,
        host: bool = True,
        findings: bool = True,
        on_progress: OnProgress | None = None,
    ) -> int:
        """Write one trace of all ranks on one clock, for https://ui.perfetto.dev.

        Args:
            output: the file, compressed if its name ends with .gz.
            host: include the hosts' ranges in addition to the devices' work.
            findings: annotate the findings.
            on_progress: called with the number of ranks that are done, and their total number.

        Returns:
            The number of device and host events.

        Raises:
            TraceError: no trace could be read.
            ProfilingConfigError: the file cannot be written.
        """
        from bridge_profiling.report.merged_trace import write_merged_trace

        # Findings first: one pass over the captures then reads everything.
        found = self.findings if findings else []
        if not self.entries():
            raise TraceError("; ".join([*self.errors, f"{self.path} holds no trace to merge"]))
        offsets = self.clock_offsets() if len(self.entries()) > 1 else None
        return self._captures.undisturbed(
            lambda: write_merged_trace(
                self.entries(), Path(output), clock_offsets=offsets, host=host, findings=found, on_progress=on_progress
            )
        )

    def write_flame_graph(
        self,
        output: str | Path = "flamegraph.speedscope.json",
        *,
        weight: str = "host",
        ranks: Collection[int] | None = None,
        folded: bool = False,
    ) -> int:
        """Write `flame_graph` as a file for https://www.speedscope.app, with a profile for each rank and thread.

        Args:
            output: the file, written atomically.
            weight: `host`: time of the host in each stack; `device`: time of the device in the work that it launched.
            ranks: ranks to write; None for all.
            folded: write folded text instead, a line `rank R;thread T;frame;…;frame nanoseconds` for each stack.

        Returns:
            The number of stacks.

        Raises:
            ProfilingConfigError: a rank was not captured, no stack has such time, or the file is another kind of file or cannot
                be written.
        """
        from bridge_profiling.report.flame_graph import write_flame_graph

        table = self.flame_graph()
        table = table.filter(pc.equal(table["source"], self.main_source))
        name = self.path.absolute().name
        return write_flame_graph(table, Path(output), name=name, weight=weight, ranks=ranks, folded=folded)

    def figure(self, name: str, **options: Any) -> Figure:
        """An answer as a Plotly figure.

        Args:
            name: `attribution` (view: `cause` or `activity`), `iterations` (measure: `own_us`, `duration_us`, `compute_us` or
                `waiting_us`), `waits`, `communication`, `roofline`, `counters`, `memory` (rank, device),
                `timeline` (iteration, ranks), `flame_graph` (rank, weight: `host` or `device`).
            options: of that figure.

        Raises:
            ProfilingConfigError: the figure is unknown.
        """
        from bridge_profiling.report.notebook import figure

        return figure(self.facts, name, **options)

    def to_json(self) -> str:
        """Every answer, as the document that `bridge-profiling analyze --json` prints."""
        from bridge_profiling.report.json import dumps

        return dumps(self.facts, self.conclusion)


if "IPython" in sys.modules:  # in a notebook, pyarrow's tables are shown as HTML tables
    from bridge_profiling.report.notebook import show_tables

    show_tables()
