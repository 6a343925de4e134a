"""The facade: a run's captures, asked by what one wants to know. Reads like a table of contents; computes nothing itself.

from bridge_profiling.analysis import Run
run = Run("profiles")
run.breakdown().to_pandas()
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from bridge_profiling.analysis import iterations as of_iterations
from bridge_profiling.analysis.engines import Engine, engine_named
from bridge_profiling.analysis.kernels import kernels
from bridge_profiling.analysis.run_answers import AcrossRanks, OnProgress, RunAnswers
from bridge_profiling.analysis.run_limitations import of_ranks
from bridge_profiling.bench import results
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.traces.run_dir import RankCapture
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    from bridge_profiling.analysis.compare import Comparison
    from bridge_profiling.analysis.compare.bench import AgainstBench
    from bridge_profiling.analysis.compare.events import Noise
    from bridge_profiling.analysis.findings import Finding, Thresholds


#: What `Run.operators` asks by default.
_OPERATORS = {"category": "operator", "shapes": False, "stacks": False}


class Run:
    """What every rank of a run captured, whoever captured it.

    Nothing is read before the first question. Then each capture is read once, in workers, and kept as Parquet; this process
    holds answers, and never a rank's tables. Each method gives a pyarrow Table (`.to_pandas()`) with units in its column names.

    Args:
        path: a directory of captures of any origin (ours, `torch.profiler`'s, nsys exports, memory snapshots), one such file,
            or a directory that `parquet` was.
        engine: `process`: processes of this machine; `ray`: a Ray cluster; or an object with `map`, as in `analysis.engines`.
        workers: captures read at a time; None for as many as there are CPUs.
        ray_address: of the cluster; None takes `$RAY_ADDRESS`, else starts one here.
        parquet: directory for the ranks' tables, to be kept or, with Ray, to be shared; None for a hidden folder beside each
            capture, or the user's cache where that cannot be written.
        on_progress: called with how many captures are done, and how many there are.
        bench: results of `bridge-profiling bench` to compare with; None takes `bench.json` in that directory, if it is there.

    Raises:
        TraceError: the path does not exist or holds no capture.
        ProfilingConfigError: there is no such engine, or `bench` is no such file.
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
    ) -> None:
        self.path = Path(path)
        self._bench, self._bench_found, self._bench_limitations = _results(self.path, bench)
        if isinstance(engine, str):
            engine = engine_named(engine, workers, ray_address)
        self._answers = RunAnswers(self.path, engine, None if parquet is None else Path(parquet), on_progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the database and of scratch files; also done when the object goes."""
        self._answers.close()

    # What was captured.

    @property
    def infos(self) -> list[RankInfo]:
        """What is known about each rank's trace besides its events, by rank."""
        return [result.info for result in self._answers.traces]

    @property
    def manifests(self) -> list[RankCapture]:
        """What each rank wrote down about its capture, by rank; none for captures of other origin, and for Parquet alone."""
        return self._answers.manifests

    @property
    def main_source(self) -> str:
        """The profiler that captured the most ranks, `kineto` or `nsys`: answers across ranks are from its traces."""
        return self._answers.main_source

    @property
    def errors(self) -> list[str]:
        """A sentence for each capture that could not be read, or not to its end; it names the file."""
        return self._answers.errors

    @property
    def limitations(self) -> list[str]:
        """What these captures cannot tell, and what was read otherwise than written, as far as was asked until now."""
        of_snapshots = [result.info for result in self._answers.results if result.info.source == "memory"]
        of_captures = of_ranks(self._answers.ask("limitations"), self.iterations(), of_snapshots)
        return list(dict.fromkeys([*self._bench_limitations, *self._answers.limitations, *of_captures]))

    # Questions about each rank.

    def breakdown(self) -> pa.Table:
        """Where each rank's device time went, over the whole capture: busy, compute, communication exposed and hidden, idle."""
        return self._answers.ask("breakdown")

    def iterations(self) -> pa.Table:
        """The same for each iteration, with its duration, and whether it is at the profiler's boundary."""
        return self._answers.ask("iterations")

    def typical_iteration(self) -> pa.Table:
        """Medians over each rank's iterations, boundary ones left out where at least three were captured."""
        return of_iterations.typical_of_each(self.iterations())

    def idle_gaps(self) -> pa.Table:
        """Why each device did not compute when it did not: launch-starved, blocked, dependency-stalled."""
        return self._answers.ask("idle_gaps")

    def idle_causes(self, **range_names: str) -> pa.Table:
        """What compute-absent time is owed to, by iteration, cause and what shows it; a cause's rows add up to its time.

        Args:
            range_names: regular expressions `data_loading` and `checkpoint`, which names of such ranges match; those of
                `analysis.host_evidence` where not given.
        """
        return self._answers.ask("idle_causes", **range_names)

    def launch_statistics(self) -> pa.Table:
        """Kernels of each iteration: how many, how long, and what launching them costs the host."""
        return self._answers.ask("launch_statistics")

    def attribution(self) -> pa.Table:
        """What the median iteration of each rank is made of: compute, and what the rest is owed to; the parts add up to it."""
        from bridge_profiling.analysis.budget import budget

        return budget(self.iterations(), self.idle_causes(), self.ranks())

    def kernels(self, *, by_rank: bool = True) -> pa.Table:
        """Kernel statistics: count, total, mean, shortest and longest, per name."""
        return self._answers.of_each_source(kernels, by_rank=by_rank)

    def operators(self, *, category: str = "operator", shapes: bool = False, stacks: bool = False) -> pa.Table:
        """Host operators: own and total time, and the device time they launched; by input shapes and call stacks if asked.

        Args:
            category: which host ranges: operator, annotation, runtime or python.
            shapes: tell calls with other input shapes apart.
            stacks: tell calls from other places apart.
        """
        return self._answers.ask("operators", category=category, shapes=shapes, stacks=stacks)

    def copies(self) -> pa.Table:
        """Copies: direction, pinned or pageable, bytes, bandwidth."""
        return self._answers.ask("copies")

    def units(self) -> pa.Table:
        """Communication of a sharded model by FSDP unit or ZeRO step: how often gathered and reduced, host and device time."""
        return self._answers.ask("units")

    def answer_together(self) -> None:
        """Answer all of the above in one pass over the captures, for those who will ask for all of it: asking is quick then."""
        self._answers.ask_together({"operators": _OPERATORS})

    # Questions across ranks.

    def communication(self, *, by_rank: bool = False) -> pa.Table:
        """Communication per operation and group: bytes, transfer against wait, algorithm and bus bandwidth.

        Args:
            by_rank: a row per rank as well, with its waiting, and its exposed and overlapped time.
        """
        from bridge_profiling.analysis.ranks import communication

        return self._answers.across(communication.communication_by_rank if by_rank else communication.communication)

    def ranks(self) -> pa.Table:
        """Each rank in each iteration: its own time, its waiting, and whether it was the slowest or the fastest."""
        from bridge_profiling.analysis.ranks import ranks

        return self._answers.across(ranks.ranks)

    def waits(self) -> pa.Table:
        """Who waits for whom, and how long, in each iteration."""
        from bridge_profiling.analysis.ranks import ranks

        return self._answers.across(ranks.waits)

    def stragglers(self) -> pa.Table:
        """A row per rank, the slowest first: whether it is always slow, sometimes or not, and how sure that is."""
        from bridge_profiling.analysis.ranks import ranks

        return self._answers.across(ranks.straggler)

    def clock_offsets(self) -> pa.Table:
        """What to add to each rank's times to have them on one clock, from matched collectives, with the residual."""
        from bridge_profiling.analysis.ranks import clocks

        return self._answers.across(clocks.clock_offsets)

    def start_skew(self) -> pa.Table:
        """How late each rank's capture starts, apart from how late the rank is in its operations."""
        from bridge_profiling.analysis.ranks import ranks

        return self._answers.across(ranks.start_skew)

    def pipeline(self, *, by_rank: bool = False) -> pa.Table:
        """Pipeline bubbles per stage.

        Args:
            by_rank: a row per rank and iteration instead.
        """
        from bridge_profiling.analysis.ranks import pipeline

        return self._answers.across(pipeline.pipeline_by_rank if by_rank else pipeline.pipeline)

    @cached_property
    def against_bench(self) -> AgainstBench | None:
        """This run beside what its links, copies, loader and step give alone; None without such results."""
        from bridge_profiling.analysis.compare.bench import against_bench

        return None if self._bench is None else against_bench(self, self._bench, found=self._bench_found)

    def across(self, question: AcrossRanks) -> pa.Table:
        """A question of one's own to the database of all ranks, as `analysis.communication.communication` is one."""
        return self._answers.across(question)

    # Memory.

    def memory(self) -> pa.Table:
        """Memory per rank and device: peak, growth per iteration, fragmentation."""
        from bridge_profiling.analysis.memory import tables as memory

        return self._answers.across(memory.memory, with_memory=True)

    def memory_timeline(self) -> pa.Table:
        """Allocated and reserved memory over time."""
        from bridge_profiling.analysis.memory import tables as memory

        return self._answers.across(memory.timeline, with_memory=True)

    def memory_sites(self) -> pa.Table:
        """Memory by the place in the program that allocated it."""
        from bridge_profiling.analysis.memory import tables as memory

        return self._answers.across(memory.sites, with_memory=True)

    def memory_at_peak(self) -> pa.Table:
        """Every allocation that was live at each device's peak, the largest first."""
        from bridge_profiling.analysis.memory import tables as memory

        return self._answers.across(memory.live_at_peak, with_memory=True)

    def memory_growth(self) -> pa.Table:
        """Memory in use at the end of each iteration."""
        from bridge_profiling.analysis.memory import tables as memory

        return self._answers.across(memory.growth, with_memory=True)

    def out_of_memory(self) -> pa.Table:
        """Each out-of-memory error: what was asked for, what was free, and the place in the program that asked."""
        from bridge_profiling.analysis.memory import out_of_memory

        return self._answers.across(out_of_memory.out_of_memory, with_memory=True)

    def memory_difference(self, other: Run) -> pa.Table:
        """What changed from this run's memory to another's, by the place in the program that allocated it.

        Args:
            other: the run to compare with.
        """
        from bridge_profiling.analysis.memory import tables as memory

        return memory.difference(self.memory_sites(), other.memory_sites())

    # What to make of it.

    def findings(self, thresholds: Thresholds | None = None) -> list[Finding]:
        """Where time was lost or memory is short, who is to blame, how sure that is and what to change.

        The most time to get back comes first. An empty list says that nothing was found.

        Args:
            thresholds: above or below what a number becomes a finding; None for the defaults.
        """
        from bridge_profiling.analysis.findings import find_all

        return find_all(self, thresholds)

    def compare(self, other: Run, *, noise: Noise | None = None) -> Comparison:
        """What changed from this run to another; of several runs a side, `analysis.compare.compare`.

        Args:
            other: the run to compare with this one.
            noise: above what a difference of an event is a change; None for the defaults.
        """
        from bridge_profiling.analysis.compare import compare

        return compare(self, other, noise=noise)

    # All of it.

    def entries(self) -> list[tuple[RankInfo, Path]]:
        """Each rank's trace, by the profiler that captured the most ranks, and the folder of its Parquet tables."""
        traces = self._answers.traces
        mine = [result for result in traces if result.info.source == self._answers.main_source]
        return [(result.info, result.entry) for result in mine if result.entry is not None]


def _results(path: Path, bench: str | Path | None) -> tuple[results.BenchDocument | None, bool, list[str]]:
    """Results to compare with, whether they lie beside the captures, and what is to be said when they cannot be read."""
    if bench is not None:
        return results.read(Path(bench)), False, []
    beside = path / results.NAME
    if not beside.is_file():
        return None, False, []
    try:
        return results.read(beside), True, []
    except ProfilingConfigError as error:
        return None, False, [f"nothing is compared with a benchmark: {error}"]
