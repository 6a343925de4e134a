"""What is known about a run: its captures, facts, findings, and how it compares with benchmarks and with other runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from bridge_profiling.bench import results
from bridge_profiling.engines import Engine, engine_named
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.facts.captures import Captures, OnProgress
from bridge_profiling.facts.memory import difference
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.store import DEFAULT_OPTIONS, FactOptions
from bridge_profiling.facts.types import caveat
from bridge_profiling.findings import Finding, Grids, JudgedFacts, Thresholds, diagnose
from bridge_profiling.findings.scorecard import scorecard
from bridge_profiling.findings.unprofiled import Unprofiled, usual_cost_us
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.types import Caveat, RankInfo

if TYPE_CHECKING:
    from bridge_profiling.compare import Comparison, Noise
    from bridge_profiling.compare.bench import AgainstBench


#: The options of `facts.operators` as `RunFacts.operators` has them.
_DEFAULT = {"category": "operator", "shapes": False, "stacks": False, "modules": False}


def _fact(name: str) -> Callable[[Answers], pa.Table]:
    """The method that returns a fact, with its description."""

    def method(self: Answers) -> pa.Table:
        return getattr(self.facts, name)

    method.__name__, method.__doc__ = name, vars(RunFacts)[name].__doc__
    return method


def _attribute(name: str) -> Any:
    """The property that is an attribute of the facts, with its description."""
    return property(lambda self: getattr(self.facts, name), doc=vars(RunFacts)[name].__doc__)


class Answers:
    """The captures of a run, of any profiler.

    Nothing is read before the first question. Then workers read each capture once and keep it as Parquet; this process holds
    facts, never a rank's tables. Each method returns a pyarrow Table (`.to_pandas()`) with units in its column names. The
    order of questions changes no answer.

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
    ) -> None:
        self.path = Path(path)
        self._bench, self._bench_found, self._bench_caveats = _results(self.path, bench)
        if isinstance(engine, str):
            engine = engine_named(engine, workers, ray_address)
        self._findings: dict[Thresholds, list[Finding]] = {}
        self._grids: dict[Thresholds, Grids] = {}
        self._captures = Captures(self.path, engine, None if parquet is None else Path(parquet), on_progress, cycle)
        self.facts = self._facts_of(DEFAULT_OPTIONS)
        #: What a function returns that reads `entries()`: see `Captures.undisturbed`.
        self.undisturbed = self._captures.undisturbed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, close the database, and delete scratch files. Happens also when the object is deleted."""
        self._captures.close()

    # What was captured.

    infos: list[RankInfo] = _attribute("every_info")
    manifests: list[RankCapture] = _attribute("manifests")
    main_source: str = _attribute("source")
    errors: list[str] = _attribute("errors")
    capture_caveats: list[Caveat] = _attribute("capture_caveats")
    limitations: list[str] = _attribute("limitations")

    def entries(self) -> list[tuple[RankInfo, Path]]:
        """Each rank's trace by the main source, and the folder of its Parquet tables."""
        return self._captures.entries()

    @property
    def readable(self) -> bool:
        """Whether anything could be read. A page of nothing would replace a good one."""
        return bool(self.infos or self.facts.memory.num_rows or not self.errors)

    def caveats(self, *names: str) -> list[Caveat]:
        """What the captures cannot show, or what was read differently than written.

        Args:
            names: attributes of `facts`: caveats of these only. None for those of the captures and of the run as a whole.
        """
        return self.facts.caveats(*names)

    def _facts_of(self, options: FactOptions) -> RunFacts:
        return RunFacts(self._captures, options, self._bench_caveats)

    # Each rank: methods that return the fact of the same name.

    breakdown = _fact("breakdown")
    iterations = _fact("iterations")
    typical_iteration = _fact("typical_iteration")
    idle_gaps = _fact("idle_gaps")

    def idle_causes(self, **range_names: str) -> pa.Table:
        """Time without compute by iteration, cause and name of what shows it; a cause's rows add up to its time.

        Args:
            range_names: regular expressions `data_loading` and `checkpoint` that match names of such ranges; those of
                `attribution.host` by default.
        """
        return self._facts_of(FactOptions(**range_names)).idle_causes

    launch_statistics = _fact("launch_statistics")
    attribution = _fact("attribution")

    def kernels(self, *, by_rank: bool = True) -> pa.Table:
        """Kernel statistics per name: group, count, total, mean, shortest and longest."""
        return self.facts.kernels_by_rank if by_rank else self.facts.kernels

    kernel_groups = _fact("kernel_groups")
    phases = _fact("phases")

    def operators(
        self, *, category: str = "operator", shapes: bool = False, stacks: bool = False, modules: bool = False
    ) -> pa.Table:
        """Host operators: own and total time, the device time that they launched, memory, and the module that called them.

        Args:
            category: of host ranges: operator, annotation, runtime or python.
            shapes: one row per input shapes.
            stacks: one row per call stack.
            modules: one row per `nn.Module` that called them.
        """
        by = {"category": category, "shapes": shapes, "stacks": stacks, "modules": modules}
        return self.facts.operators if by == _DEFAULT else self.facts.operators_by(**by)

    matrix_products = _fact("matrix_products")

    def flame_graph(self, *, least_share: float = 0.0) -> pa.Table:
        """Stacks of each thread: host time in each, and device time launched from it, outermost frame first.

        Args:
            least_share: leave out stacks with less than this share (0 to 1) of the rank's host time and of its device time.
        """
        return self.facts.larger_stacks(least_share) if least_share else self.facts.flame_graph

    copies = _fact("copies")
    gpu_metrics = _fact("gpu_metrics")
    kernel_counters = _fact("kernel_counters")
    system_calls = _fact("system_calls")
    cuda_memory = _fact("cuda_memory")
    units = _fact("units")

    # All ranks.

    def communication(self, *, by_rank: bool = False, by_size: bool = False) -> pa.Table:
        """Communication per operation and group: bytes, transfer and waiting, algorithm and bus bandwidth.

        Args:
            by_rank: one row per rank as well, with its waiting, and its exposed and overlapped time.
            by_size: one row per size of message instead, with exposed and overlapped time, and with the bandwidth of the same
                messages alone if benchmarks are known; `by_rank` is ignored.
        """
        if by_size:
            from bridge_profiling.compare.bench import with_alone

            return with_alone(self.facts.communication_by_size, self._bench, self.facts.infos)
        return self.facts.communication_by_rank if by_rank else self.facts.communication

    ranks = _fact("ranks")
    waits = _fact("waits")
    stragglers = _fact("stragglers")
    host_iterations = _fact("host_iterations")
    clock_offsets = _fact("clock_offsets")
    start_skew = _fact("start_skew")

    def pipeline(self, *, by_rank: bool = False) -> pa.Table:
        """Pipeline bubbles per stage.

        Args:
            by_rank: one row per rank and iteration instead.
        """
        return self.facts.pipeline_by_rank if by_rank else self.facts.pipeline

    pipeline_waits = _fact("pipeline_waits")

    @cached_property
    def against_bench(self) -> AgainstBench | None:
        """This run compared with what its links, copies, data loader and step reach alone; None without such results."""
        if self._bench is None:
            return None
        from bridge_profiling.compare.bench import against_bench

        return against_bench(self._bench, self.facts, found=self._bench_found)

    # Memory.

    memory = _fact("memory")
    memory_timeline = _fact("memory_timeline")
    memory_sites = _fact("memory_sites")
    memory_at_peak = _fact("memory_at_peak")
    memory_growth = _fact("memory_growth")
    out_of_memory = _fact("out_of_memory")

    def memory_difference(self, other: Answers) -> pa.Table:
        """Differences from this run's memory to another's, by the place in the program that allocated it."""
        return difference(self.memory_sites(), other.memory_sites())

    # Conclusions.

    def scorecard(self) -> pa.Table:
        """The checklist of a fast training: yes, no or unknown for each of eight checks, with the number."""
        return scorecard(self.facts)

    def findings(self, thresholds: Thresholds | None = None) -> list[Finding]:
        """Where time is lost or memory is short, on which ranks, with which confidence, and what to change.

        The largest potential saving comes first. Empty if nothing was found.

        Args:
            thresholds: limits beyond which a number becomes a finding; None for the defaults.
        """
        chosen = thresholds or Thresholds()
        if chosen not in self._findings:
            self._findings[chosen] = diagnose(self.grids(chosen), chosen)
        return list(self._findings[chosen])

    def unprofiled(self, thresholds: Thresholds | None = None) -> Unprofiled | None:
        """The mean iteration without the profiler, which shares of savings refer to; None without iterations.

        Args:
            thresholds: as of `findings`.
        """
        grids = self.grids(thresholds)
        slow_us = sum(
            finding.recoverable_us_per_iteration or 0.0
            for finding in self.findings(thresholds)
            if finding.id == "slow_iterations"
        )
        if not grids.numbers or grids.per == "capture":
            return None
        profiler = grids.profiler
        measured_us = usual_cost_us(grids.timed_iterations)
        return Unprofiled(grids.iteration_us + slow_us, profiler.source, measured_us, profiler.estimated_us)

    def grids(self, thresholds: Thresholds | None = None) -> Grids:
        """The facts that findings are made from, as arrays of iterations by ranks.

        Args:
            thresholds: which ranges count as data loading and as saving; None for the defaults.
        """
        chosen = thresholds or Thresholds()
        if chosen not in self._grids:
            alone = None if self.against_bench is None else self.against_bench.communication
            self._grids[chosen] = Grids(JudgedFacts(self._facts_of(FactOptions(**chosen.range_names())), alone))
        return self._grids[chosen]

    def compare(self, other: Answers, *, noise: Noise | None = None) -> Comparison:
        """Changes from this run to another; `compare.compare` takes several runs per side.

        Args:
            other: the run to compare with this one.
            noise: limits above which a difference of an event is a change; None for the defaults.
        """
        from bridge_profiling.compare import compare

        return compare(self, other, noise=noise)


def _results(path: Path, bench: str | Path | None) -> tuple[results.BenchDocument | None, bool, tuple[Caveat, ...]]:
    """Results to compare with, whether they were found next to the captures, and a caveat if those cannot be read."""
    if bench is not None:
        return results.read(Path(bench)), False, ()
    found = path / results.NAME
    if not found.is_file():
        return None, False, ()
    try:
        return results.read(found), True, ()
    except ProfilingConfigError as error:
        return None, False, (caveat("bench_unreadable", file=str(found), error=error),)
