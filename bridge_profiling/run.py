"""The public `Run`: tables about a run, its findings, and the page, figures, merged trace and JSON made from them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.common.errors import ProfilingConfigError, TraceError, did_you_mean
from bridge_profiling.facts import kernels as of_kernels
from bridge_profiling.facts.captures import Captures, OnProgress
from bridge_profiling.facts.clocks import renumbered
from bridge_profiling.facts.engines import Engine, engine_named
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.store import FactOptions
from bridge_profiling.findings import RULES, Finding, Grids, JudgedFacts, Rule, Thresholds, diagnose, without_profiler
from bridge_profiling.findings.scorecard import scorecard
from bridge_profiling.layout import number_ranges
from bridge_profiling.report.words import counted
from bridge_profiling.traces.cache import open_entry
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.tables import SCHEMAS
from bridge_profiling.traces.types import Caveat

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from bridge_profiling.compare import Comparison
    from bridge_profiling.compare.bench import AgainstBench
    from bridge_profiling.report.verdict import Conclusion
    from bridge_profiling.report.views import Verdict

#: Ranks or iterations: one, some, or all.
Some = int | Collection[int] | None

#: What `by` and `kind` choose: whether kernels are those of each rank, options of `RunFacts.operators_by`, tables, and facts.
_KERNELS = {"name": False, "rank": True, "group": True}
_OPERATORS = {"name": "", "shapes": "shapes", "stack": "stacks", "module": "modules"}
_EVENTS = {name.removesuffix("_events"): name for name in SCHEMAS}
_COMMUNICATION = {"group": "communication", "rank": "communication_by_rank", "size": "communication_by_size"}
_PIPELINE = {"stage": "pipeline", "rank": "pipeline_by_rank", "wait": "pipeline_waits"}
_COUNTERS = {"metric": "gpu_metrics", "kernel": "kernel_counters"}
_MEMORY = {
    **{"devices": "memory", "sites": "memory_sites", "timeline": "memory_timeline", "peak": "memory_at_peak"},
    **{"growth": "memory_growth", "out_of_memory": "out_of_memory"},
}


class Run:
    """The captures of a run, of any profiler.

    from bridge_profiling.run import Run
    run = Run("profiles")
    run.verdict, run.findings
    run.kernels(ranks=[0]).to_pandas()
    run.report("report.html")

    Nothing is read before the first question. Then workers read each capture once and keep it as Parquet; this process holds
    facts, never a rank's tables. Tables are Arrow: `.to_pandas()` and `polars.from_arrow()` convert them. Columns have units
    in their names, and `source` says which profiler a row is from. `ranks` and `iterations` take a number or several; None is
    all of them. `facts` has the other tables.

    Args:
        path: a directory of captures of any origin (ours, `torch.profiler`'s, nsys exports, memory snapshots), one such file,
            or a directory that `parquet` named.
        engine: `process`: processes of this machine; `ray`: a Ray cluster; or an object with `map`, as in `engines`.
        workers: captures to read at a time; None for the number of CPUs.
        ray_address: of the cluster; None takes `$RAY_ADDRESS`, else starts one here.
        parquet: directory for the ranks' tables, to keep them or, with Ray, to share them; None for a hidden folder next to
            each capture in the directory, or the user's cache if that cannot be written.
        on_progress: called with the number of captures that are done, and their total number.
        bench: results of `bridge-profiling bench` to compare with; None takes `bench.json` in that directory, if it exists.
        cycle: of a profiler's schedule that repeats, from 1 for the oldest; None for the newest.
        thresholds: limits beyond which a number becomes a finding, and names of ranges that load data or save checkpoints;
            None for the defaults.
        rules: that detect findings, in the order in which they attribute time.

    Raises:
        TraceError: the path does not exist or holds no capture.
        ProfilingConfigError: the engine is unknown, or `bench` cannot be read.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        engine: str | Engine = "process",
        workers: int | None = None,
        ray_address: str | None = None,
        parquet: str | Path | None = None,
        on_progress: OnProgress | None = None,
        bench: str | Path | None = None,
        cycle: int | None = None,
        thresholds: Thresholds | None = None,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._thresholds, self._rules = thresholds or Thresholds(), rules
        if isinstance(engine, str):
            engine = engine_named(engine, workers, ray_address)
        tables, results = (None if each is None else Path(each) for each in (parquet, bench))
        options = FactOptions(self._thresholds.data_loading_ranges, self._thresholds.checkpoint_ranges)
        #: Every table about the run as an attribute.
        self.facts = RunFacts(Captures(Path(path), engine, tables, on_progress, cycle, results, options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, close the database, and delete scratch files. Happens also when the object is deleted."""
        self.facts.captures.close()

    def __repr__(self) -> str:
        # What was found: nothing is read for this.
        captures = [source for source in self.facts.captures.sources if isinstance(source, Capture)]
        found = f"Parquet of {counted(len(self.facts.captures.sources), 'capture')}"
        if captures:
            profilers = sorted({capture.source for capture in captures})
            found = f"{counted(len({capture.rank for capture in captures}), 'rank')}, {' and '.join(profilers)}"
        return f"Run({str(self.facts.path)!r}, {found})"

    # Conclusions.

    @property
    def ranks(self) -> list[int]:
        """The captured ranks, ascending."""
        return sorted({result.info.rank for result in self.facts.captures.results})

    @property
    def caveats(self) -> list[Caveat]:
        """What the captures cannot show, or what was read differently than written; `facts.limitations` has the sentences."""
        return self.facts.caveats()

    @cached_property
    def findings(self) -> list[Finding]:
        """Where time is lost or memory is short, on which ranks, with which confidence, and what to change.

        The largest potential saving comes first. Empty if nothing was found.
        """
        return diagnose(self.grids, self._thresholds, self._rules)

    @property
    def verdict(self) -> Verdict:
        """The answer in words: a headline, where an iteration's time goes, what to do first, and what limits that answer."""
        from bridge_profiling.report.verdict import verdict

        return verdict(self.facts, self.conclusion)

    @cached_property
    def scorecard(self) -> pa.Table:
        """The checklist of a fast training: yes, no or unknown for each of nine checks, with the number."""
        return scorecard(self.facts)

    @cached_property
    def bench(self) -> AgainstBench | None:
        """The run compared with what its links, copies, data loader and step reach alone; None without such results."""
        from bridge_profiling.compare.bench import against_bench

        return against_bench(self.facts)

    @cached_property
    def grids(self) -> Grids:
        """The facts that findings are made from, as arrays of iterations by ranks."""
        return Grids(JudgedFacts(self.facts, None if self.bench is None else self.bench.communication))

    @cached_property
    def conclusion(self) -> Conclusion:
        """The numbers of the verdict, and the ranks that it is about."""
        from bridge_profiling.report.verdict import conclude

        return conclude(self.facts, self.findings, without_profiler(self.grids, self.findings), self.bench)

    # Tables.

    def iterations(self, ranks: Some = None, steady: bool = True) -> pa.Table:
        """Device time of each iteration by what it is spent on, with its duration.

        Args:
            ranks: of these alone.
            steady: without iterations in which the profiler starts or stops, unless there are no others.
        """
        found = self._of(self.facts.iterations, ranks)
        inside = found.filter(pc.invert(found["boundary"]))
        return inside if steady and inside.num_rows else found

    def kernels(self, ranks: Some = None, iterations: Some = None, by: str = "name") -> pa.Table:
        """Kernels, most time first: count, total, mean, shortest and longest.

        Args:
            ranks: of these alone.
            iterations: launched in these alone.
            by: `name`; `rank`: name and rank; `group`: rank and what kernels do, such as attention, copies included.
        """
        by_rank, database = _chosen("by", by, _KERNELS), self.facts.captures.database
        sums = self._of(self.facts.device_sums, ranks, iterations)
        found = of_kernels.kernels(database, sums, by_rank=by_rank)
        return of_kernels.kernel_groups(found, of_kernels.copies(database, sums)) if by == "group" else found

    def operators(self, ranks: Some = None, by: str = "name") -> pa.Table:
        """Operators of the hosts: own and total time, the device time that they launched, and memory.

        Args:
            ranks: of these alone.
            by: `name`, or also `shapes` of the inputs, the call `stack`, or the `module` (`nn.Module`) that called them.
        """
        option = _chosen("by", by, _OPERATORS)
        return self._of(self.facts.operators_by(**{option: True}) if option else self.facts.operators, ranks)

    def products(self, ranks: Some = None) -> pa.Table:
        """Matrix products, convolutions and attention by input shapes: TFLOP/s, and the share of the device's peak."""
        return self._of(self.facts.matrix_products, ranks)

    def phases(self, ranks: Some = None) -> pa.Table:
        """Ranges of the step, the program and libraries by name: host time, and device time launched inside."""
        return self._of(self.facts.phases, ranks)

    def counters(self, ranks: Some = None, by: str = "metric") -> pa.Table:
        """Hardware counters that nsys sampled, by `metric` in iterations, or while each `kernel` ran."""
        return self._of(getattr(self.facts, _chosen("by", by, _COUNTERS)), ranks)

    def memory(self, kind: str = "devices", ranks: Some = None) -> pa.Table:
        """Memory that was recorded.

        Args:
            kind: `devices`: the peak of each, its growth and fragmentation; `sites`: places in the program that allocate it;
                `timeline`: over time; `peak`: in use at the peak; `growth`: at each iteration's end; `out_of_memory`: errors.
            ranks: of these alone.
        """
        return self._of(getattr(self.facts, _chosen("kind", kind, _MEMORY)), ranks)

    def communication(self, by: str = "group") -> pa.Table:
        """Operations: count, bytes, transfer and waiting, algorithm and bus bandwidth.

        Args:
            by: operation and `group`; also `rank`, with exposed and overlapped time; or also `size` of the message, with the
                bandwidth of the same messages alone if benchmarks are known.
        """
        if _chosen("by", by, _COMMUNICATION) == "communication_by_size":
            from bridge_profiling.compare.bench import with_alone

            return with_alone(self.facts)
        return getattr(self.facts, _COMMUNICATION[by])

    def waits(self, ranks: Some = None) -> pa.Table:
        """Which rank waits for which in each iteration, and how long."""
        return self._of(self.facts.waits, ranks)

    def pipeline(self, by: str = "stage") -> pa.Table:
        """Pipeline bubbles by `stage`, or `rank` and iteration; or which stage waits for which (`wait`)."""
        return getattr(self.facts, _chosen("by", by, _PIPELINE))

    def flame_graph(self, rank: int) -> pa.Table:
        """Stacks of each thread of a rank: host time in each, and device time launched from it, outermost frame first."""
        _captured("rank", rank, self.ranks)
        return self.facts.flame_graph_of(rank, 0.0)

    def events(self, rank: int, kind: str = "device", iterations: Some = None) -> pa.Table:
        """The events of a rank as its capture has them.

        Args:
            rank: by the profiler that captured the most ranks.
            kind: `device`, `host`, `collectives`, `synchronizations`, `memory`, `gpu_metrics` or another table of captures.
            iterations: of these alone: launched in them, or else begun in them on the host.
        """
        return self.facts.captures.undisturbed(partial(self._events, rank, kind, iterations))

    def _events(self, rank: int, kind: str, iterations: Some) -> pa.Table:
        entries = {info.rank: entry for info, entry in self.facts.captures.entries()}
        _captured("rank", rank, entries)
        tables = open_entry(entries[rank])
        if tables is None:
            raise TraceError(f"the tables of rank {rank} were removed")
        table = _chosen("kind", kind.removesuffix("_events"), _EVENTS)
        marks = _rows(self.facts.marks, "rank", [rank])
        marks = marks.filter(pc.equal(marks["source"], self.facts.source))
        # Inferred iterations have the run's numbers.
        first = [each["iteration"][0].as_py() for each in (marks, tables["iterations"]) if each.num_rows] or [0, 0]
        found = renumbered(tables[table], first[0] - first[1])
        if iterations is None:
            return found
        wanted = self._iterations(iterations)
        if "iteration" in found.column_names:
            return _rows(found, "iteration", wanted)
        marks = _rows(marks, "iteration", wanted)
        begin = found[next(name for name in ("start_ns", "time_ns", "allocated_ns") if name in found.column_names)].to_numpy()
        inside = np.zeros(len(begin), bool)
        for start, end in zip(*(marks[name].to_pylist() for name in ("start_ns", "end_ns")), strict=True):
            inside |= (start <= begin) & (begin < end)
        return found.filter(pa.array(inside))

    def _of(self, table: pa.Table, ranks: Some, iterations: Some = None) -> pa.Table:
        """The rows of some ranks and iterations."""
        if ranks is not None:
            table = _rows(table, "rank", _captured("rank", ranks, self.ranks))
        return table if iterations is None else _rows(table, "iteration", self._iterations(iterations))

    def _iterations(self, wanted: int | Collection[int]) -> list[int]:
        return _captured("iteration", wanted, self.facts.marks["iteration"].to_pylist())

    # What is made of them.

    def figure(self, name: str, **options: Any) -> Figure:
        """An answer as a Plotly figure.

        Args:
            name: `attribution` (view: `cause` or `activity`), `iterations` (measure: `own_ns`, `duration_ns`, `compute_ns` or
                `waiting_ns`), `waits`, `communication`, `roofline`, `counters`, `memory` (rank, device),
                `timeline` (iteration, ranks), `flame_graph` (rank, weight: `host` or `device`).
            options: of that figure.

        Raises:
            ProfilingConfigError: the figure is unknown.
        """
        from bridge_profiling.report.notebook import figure

        return figure(self.facts, name, **options)

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

    def to_json(self) -> str:
        """Every answer, as the document that `bridge-profiling analyze --json` prints."""
        from bridge_profiling.report.documents import dumps

        return dumps(self.facts, self.conclusion)

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
        found, facts = self.findings if findings else [], self.facts
        if not facts.captures.entries():
            raise TraceError("; ".join([*facts.errors, f"{facts.path} holds no trace to merge"]))
        write = partial(write_merged_trace, facts, Path(output), host=host, findings=found, on_progress=on_progress)
        return facts.captures.undisturbed(write)

    def compare(self, other: Run) -> Comparison:
        """Changes from this run to another; `compare.compare` takes several runs per side."""
        from bridge_profiling.compare import compare

        return compare(self, other)


T = TypeVar("T")


def _chosen(name: str, given: str, known: Mapping[str, T]) -> T:
    """What an argument stands for."""
    if given not in known:
        raise ProfilingConfigError(f"{name}={given!r} is unknown", instead=did_you_mean(given, known))
    return known[given]


def _captured(name: str, wanted: int | Collection[int], known: Iterable[int]) -> list[int]:
    """The ranks or iterations of an argument, which were captured."""
    found, captured = list(wanted) if isinstance(wanted, Collection) else [wanted], set(known)
    if missing := set(found) - captured:
        were = f"{name} {missing.pop()} was" if len(missing) == 1 else f"{name}s {number_ranges(missing)} were"
        instead = f"Type {name}s from {number_ranges(captured)}" if captured else f"Leave the {name}s out: there are none"
        raise ProfilingConfigError(f"{were} not captured", instead=instead)
    return found


def _rows(table: pa.Table, column: str, values: Collection[int]) -> pa.Table:
    return table.filter(pc.is_in(table[column], pa.array(values, table[column].type)))


if "IPython" in sys.modules:  # in a notebook, pyarrow's tables are shown as HTML tables
    from bridge_profiling.report.notebook import show_tables

    show_tables()
