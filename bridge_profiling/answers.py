"""What is known about a run: its captures, facts, findings, and how it compares with benchmarks and with other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.bench import results
from bridge_profiling.engines import Engine, engine_named
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.facts.captures import Captures, OnProgress
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.store import DEFAULT_OPTIONS, FactOptions
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.types import Caveat, RankInfo

if TYPE_CHECKING:
    from bridge_profiling.compare import Comparison
    from bridge_profiling.compare.bench import AgainstBench
    from bridge_profiling.compare.events import Noise
    from bridge_profiling.compare.steps import ComparedRun
    from bridge_profiling.findings import Evidence, Finding, Thresholds
    from bridge_profiling.findings.unprofiled import Unprofiled

T = TypeVar("T")

#: Facts that findings know by other names.
_ANSWERS = {"kernels": "kernels_by_rank"}

#: The options of `facts.operators` as `RunFacts.operators` has them.
_DEFAULT = {"category": "operator", "shapes": False, "stacks": False, "modules": False}


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
        self._evidence: dict[Thresholds, Evidence] = {}
        self._captures = Captures(self.path, engine, None if parquet is None else Path(parquet), on_progress, cycle)
        self.facts = self._facts_of(DEFAULT_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, close the database, and delete scratch files. Happens also when the object is deleted."""
        self._captures.close()

    # What was captured.

    @property
    def infos(self) -> list[RankInfo]:
        """Facts about each rank's trace besides its events, by rank."""
        return self.facts.every_info

    @property
    def manifests(self) -> list[RankCapture]:
        """Each rank's manifest, by rank. Empty for captures of other origin, and for Parquet alone."""
        return self.facts.manifests

    @property
    def main_source(self) -> str:
        """The profiler that captured the most ranks, `kineto` or `nsys`: answers across ranks are from its traces."""
        return self.facts.source

    def entries(self) -> list[tuple[RankInfo, Path]]:
        """Each rank's trace by the main source, and the folder of its Parquet tables."""
        return self._captures.entries()

    def undisturbed(self, use: Callable[[], T]) -> T:
        """What a function returns that reads `entries()`: see `Captures.undisturbed`.

        Args:
            use: may be called twice.
        """
        return self._captures.undisturbed(use)

    @property
    def errors(self) -> list[str]:
        """A sentence for each capture that could not be read completely; it names the file."""
        return self.facts.errors

    @property
    def unjudged(self) -> list[int]:
        """Ranks that no finding or verdict is about: their trace by the main source lost more than 1% of its device events."""
        return self.facts.unjudged

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

    @property
    def capture_caveats(self) -> list[Caveat]:
        """Caveats about the captures, found when they were searched for and read."""
        return self.facts.capture_caveats

    @property
    def limitations(self) -> list[str]:
        """All caveats as sentences that name the ranks."""
        return self.facts.limitations

    def _facts_of(self, options: FactOptions) -> RunFacts:
        return RunFacts(self._captures, options, self._bench_caveats)

    # Each rank.

    def breakdown(self) -> pa.Table:
        """Device time over the whole capture: busy, compute, communication exposed and overlapped, idle."""
        return self.facts.breakdown

    def iterations(self) -> pa.Table:
        """The same for each iteration, with its duration, and whether it is at the profiler's start or stop (boundary)."""
        return self.facts.iterations

    def typical_iteration(self) -> pa.Table:
        """Medians over each rank's iterations, without boundary ones if at least three were captured."""
        return self.facts.typical_iteration

    def idle_gaps(self) -> pa.Table:
        """Time without compute on each device: launch-starved, blocked, dependency-stalled."""
        return self.facts.idle_gaps

    def idle_causes(self, **range_names: str) -> pa.Table:
        """Time without compute by iteration, cause and name of what shows it; a cause's rows add up to its time.

        Args:
            range_names: regular expressions `data_loading` and `checkpoint` that match names of such ranges; those of
                `attribution.host` by default.
        """
        return self._facts_of(FactOptions(**range_names)).idle_causes

    def launch_statistics(self) -> pa.Table:
        """Kernels of each iteration: number, durations, and the host's time to launch them."""
        return self.facts.launch_statistics

    def attribution(self) -> pa.Table:
        """The parts of each rank's median iteration: compute, and the rest by cause; they add up to its duration."""
        return self.facts.attribution

    def kernels(self, *, by_rank: bool = True) -> pa.Table:
        """Kernel statistics per name: group, count, total, mean, shortest and longest."""
        return self.facts.kernels_by_rank if by_rank else self.facts.kernels

    def kernel_groups(self) -> pa.Table:
        """Kernels and copies by what they do: matrix products, attention, normalization, communication by type, and others.

        `$BRIDGE_PROFILING_KERNEL_GROUPS` names a TOML file with more patterns of names.
        """
        return self.facts.kernel_groups

    def phases(self) -> pa.Table:
        """Ranges by name: phases of the step, the program's own, libraries'; host time, device time launched inside, spread."""
        return self.facts.phases

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

    def matrix_products(self) -> pa.Table:
        """Matrix products, convolutions and attention by operator and input shapes: FLOPs, TFLOP/s, share of the device's peak.

        Needs recorded shapes (`record_shapes`).
        """
        return self.facts.matrix_products

    def flame_graph(self, *, least_share: float = 0.0) -> pa.Table:
        """Stacks of each thread: host time in each, and device time launched from it, outermost frame first.

        Args:
            least_share: leave out stacks with less than this share (0 to 1) of the rank's host time and of its device time.
        """
        return self.facts.larger_stacks(least_share) if least_share else self.facts.flame_graph

    def copies(self) -> pa.Table:
        """Copies and memsets: direction, pinned or pageable, bytes, bandwidth."""
        return self.facts.copies

    def gpu_metrics(self) -> pa.Table:
        """Hardware counters that nsys sampled: activity of SMs and tensor cores, bandwidths; mean, 95th percentile, maximum."""
        return self.facts.gpu_metrics

    def kernel_counters(self) -> pa.Table:
        """Those counters while each kernel ran: activity of SMs and tensor cores, reads and writes of the device's memory."""
        return self.facts.kernel_counters

    def system_calls(self) -> pa.Table:
        """System calls that nsys recorded (`osrt`) on the threads that launch work: calls and time in an iteration."""
        return self.facts.system_calls

    def cuda_memory(self) -> pa.Table:
        """Memory that CUDA allocated, as nsys recorded it (`--cuda-memory-usage=true`): by device and kind of memory."""
        return self.facts.cuda_memory

    def units(self) -> pa.Table:
        """Communication of a sharded model by FSDP unit or ZeRO step: gathers and reductions, host and device time."""
        return self.facts.units

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

    def ranks(self) -> pa.Table:
        """Each rank in each iteration: its own time, its waiting, and whether it was the slowest or the fastest."""
        return self.facts.ranks

    def waits(self) -> pa.Table:
        """Which rank waits for which, and how long, in each iteration."""
        return self.facts.waits

    def stragglers(self) -> pa.Table:
        """One row per rank, the slowest first: whether it is slow always, sometimes or never, and with which confidence."""
        return self.facts.stragglers

    def host_iterations(self) -> pa.Table:
        """Iterations of ranks without device work, as on CPUs: data loading, communication, waiting, operators, the rest."""
        return self.facts.host_iterations

    def clock_offsets(self) -> pa.Table:
        """Offsets that put each rank's times on one clock, from matched collectives, with residuals."""
        return self.facts.clock_offsets

    def start_skew(self) -> pa.Table:
        """How late each rank's capture starts, separate from how late the rank is in its operations."""
        return self.facts.start_skew

    def pipeline(self, *, by_rank: bool = False) -> pa.Table:
        """Pipeline bubbles per stage.

        Args:
            by_rank: one row per rank and iteration instead.
        """
        return self.facts.pipeline_by_rank if by_rank else self.facts.pipeline

    def pipeline_waits(self) -> pa.Table:
        """Which pipeline stage waits for which in sends and receives, and how long in an iteration."""
        return self.facts.pipeline_waits

    @cached_property
    def against_bench(self) -> AgainstBench | None:
        """This run compared with what its links, copies, data loader and step reach alone; None without such results."""
        from bridge_profiling.compare.bench import against_bench

        if self._bench is None:
            return None
        return against_bench(
            self._bench,
            found=self._bench_found,
            infos=self.facts.infos,
            manifests=self.manifests,
            iterations=self.facts.iterations,
            communication=self.facts.communication,
            sizes=self.facts.communication_by_size,
            copies=self.facts.copies_by_size,
        )

    # Memory.

    def memory(self) -> pa.Table:
        """Memory per rank and device: peak, growth per iteration, fragmentation."""
        return self.facts.memory

    def memory_timeline(self) -> pa.Table:
        """Allocated and reserved memory over time."""
        return self.facts.memory_timeline

    def memory_sites(self) -> pa.Table:
        """Memory by the place in the program that allocated it."""
        return self.facts.memory_sites

    def memory_at_peak(self) -> pa.Table:
        """Every allocation that was live at each device's peak, the largest first."""
        return self.facts.memory_at_peak

    def memory_growth(self) -> pa.Table:
        """Memory in use at the end of each iteration."""
        return self.facts.memory_growth

    def out_of_memory(self) -> pa.Table:
        """Each out-of-memory error: requested and free bytes, and the place in the program."""
        return self.facts.out_of_memory

    def memory_difference(self, other: Answers) -> pa.Table:
        """Differences from this run's memory to another's, by the place in the program that allocated it."""
        from bridge_profiling.facts.memory import difference

        return difference(self.memory_sites(), other.memory_sites())

    # Conclusions.

    def scorecard(self) -> pa.Table:
        """The checklist of a fast training: yes, no or unknown for each of eight checks, with the number."""
        from bridge_profiling.findings.scorecard import scorecard

        facts = self.facts
        return scorecard(
            facts.attribution,
            facts.host_iterations,
            facts.iterations,
            facts.device_roles,
            facts.kernels_by_rank,
            facts.launch_statistics,
            facts.memory,
            facts.infos,
        )

    def findings(self, thresholds: Thresholds | None = None) -> list[Finding]:
        """Where time is lost or memory is short, on which ranks, with which confidence, and what to change.

        The largest potential saving comes first. Empty if nothing was found.

        Args:
            thresholds: limits beyond which a number becomes a finding; None for the defaults.
        """
        from bridge_profiling.findings import Thresholds, find_all

        chosen = thresholds or Thresholds()
        if chosen not in self._findings:
            self._findings[chosen] = find_all(self.evidence(chosen), chosen)
        return list(self._findings[chosen])

    def unprofiled(self, thresholds: Thresholds | None = None) -> Unprofiled | None:
        """The mean iteration without the profiler, which shares of savings refer to; None without iterations.

        Args:
            thresholds: as of `findings`.
        """
        from bridge_profiling.findings import iterations
        from bridge_profiling.findings.unprofiled import Unprofiled, usual_cost_us

        evidence = self.evidence(thresholds)
        slow_us = sum(
            finding.recoverable_us_per_iteration or 0.0
            for finding in self.findings(thresholds)
            if finding.id == iterations.slow_iterations.__name__
        )
        if not evidence.numbers or evidence.per == "capture":
            return None
        profiler = evidence.profiler
        measured_us = usual_cost_us(evidence.timed_iterations)
        return Unprofiled(evidence.iteration_us + slow_us, profiler.source, measured_us, profiler.estimated_us)

    def evidence(self, thresholds: Thresholds | None = None) -> Evidence:
        """The answers that findings are made from.

        Args:
            thresholds: which ranges count as data loading and as saving; None for the defaults.
        """
        from bridge_profiling.findings import Evidence, Facts, Thresholds

        chosen = thresholds or Thresholds()
        if chosen in self._evidence:
            return self._evidence[chosen]
        facts, bench = self._facts_of(FactOptions(**chosen.range_names())), self.against_bench
        unjudged = self.unjudged

        def judged(name: str) -> pa.Table:
            table = getattr(facts, _ANSWERS.get(name, name))
            if "source" in table.column_names and not name.startswith("memory"):
                table = table.filter(pc.equal(table["source"], facts.source))
            # Memory is from snapshots, which are captures of their own.
            if unjudged and "rank" in table.column_names and not name.startswith(("memory", "out_of")):
                table = table.filter(pc.invert(pc.is_in(table["rank"], pa.array(unjudged, pa.int32()))))
            return table

        evidence = Facts(
            infos=[info for info in facts.infos if info.judged],
            every_info=[info for info in self.infos if info.judged],
            manifests=[each for each in self.manifests if each.rank not in unjudged],
            unjudged=tuple(unjudged),
            alone=None if bench is None else bench.communication,
            # The other fields are facts.
            **{field.name: judged(field.name) for field in fields(Facts) if field.type == "pa.Table"},
        )
        self._evidence[chosen] = Evidence(evidence)
        return self._evidence[chosen]

    def compare(self, other: Answers, *, noise: Noise | None = None) -> Comparison:
        """Changes from this run to another; `compare.compare` takes several runs per side.

        Args:
            other: the run to compare with this one.
            noise: limits above which a difference of an event is a change; None for the defaults.
        """
        from bridge_profiling.compare import compare

        return compare(self, other, noise=noise)

    def compared(self) -> ComparedRun:
        """Everything that a comparison needs."""
        from bridge_profiling.compare.steps import ComparedRun

        return ComparedRun(
            name=str(self.path),
            main_source=self.main_source,
            infos=self.infos,
            manifests=self.manifests,
            iterations=self.iterations(),
            idle_causes=self.idle_causes(),
            ranks=self.ranks(),
            operators=self.operators(shapes=True),
            memory=self.memory(),
            memory_sites=self.memory_sites(),
            findings=self.findings(),
            limitations=self.limitations,
            cells=self.facts.event_cells,
        )


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
        return None, False, (Caveat("bench_unreadable", f"nothing is compared with a benchmark: {error}", file=str(found)),)
