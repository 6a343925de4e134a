"""Facts about a run: tables of all ranks together, and those across ranks. Each is computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.facts import (
    clocks,
    communication,
    kernels,
    matching,
    memory,
    parts,
    pipeline,
    products,
    ranks,
    sampled,
)
from bridge_profiling.facts.captures import Captures
from bridge_profiling.facts.intervals import totals
from bridge_profiling.facts.rank import OF_TRACE, counters_over_time, operators_by, stacks_of
from bridge_profiling.facts.types import Answer, Connection, declared, merged, sentences
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.types import Caveat, RankInfo

T = TypeVar("T")

#: Facts whose caveats are those of a run as a whole.
_WITH_CAVEATS = ("breakdown", "idle_gaps", "typical_iteration", "communication", "stragglers", "pipeline", "memory")

#: Caveats about devices, which a training on CPUs does not have.
_ABOUT_DEVICES = ("no_device_work", "ranks_without_work", "ranks_not_comparable", "clocks_unrelated")


class Fact:
    """A table of `RunFacts`, declared by the function that computes it, and the names of the attributes that this takes.

    Without names, the function takes the facts. `without`: the columns of a table that is empty where no rank communicates. SQL
    would take 0.1 s to find that out.
    """

    def __init__(
        self,
        compute: Callable[..., Answer | pa.Table],
        *inputs: str,
        without: pa.Schema | None = None,
        doc: str | None = None,
    ) -> None:
        self._compute, self._inputs, self._without, self.__doc__ = compute, inputs, without, doc or compute.__doc__

    def compute(self, facts: RunFacts) -> Answer | pa.Table:
        """The table of some captures, with its caveats."""
        if self._without is not None and not facts._communicates:
            _ = facts.clock_offsets  # for its caveats
            return self._without.empty_table()
        return self._compute(*(getattr(facts, name) for name in self._inputs) if self._inputs else (facts,))

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, facts: RunFacts, owner: type | None = None) -> pa.Table:
        return facts.answer(self.name, self.compute).table


class RankFact(Fact):
    """A table of each capture's rows, with its rank and source as the first columns, that `facts.rank` computes."""

    def __init__(self, doc: str) -> None:
        super().__init__(lambda facts: facts.captures.facts()[self.name], doc=doc)


class MemoryFact(Fact):
    """A table of `facts.memory.SCHEMAS`, of each rank's snapshot or trace."""

    def __init__(self, doc: str) -> None:
        super().__init__(lambda facts: facts._memory(self.name), doc=doc)


class RunFacts:
    """Facts about a run as tables with units in their column names. The order in which they are read changes none of them.

    A fact that is named like its module, such as `ranks`, comes after those that use the module.

    Args:
        captures: of the run.
    """

    def __init__(self, captures: Captures) -> None:
        self.captures = captures
        #: Caveats of the facts that each fact reads which is now being computed.
        self._read: list[list[Caveat]] = []

    # What was captured.

    @property
    def path(self) -> Path:
        """The directory or file of the captures."""
        return self.captures.path

    @property
    def readable(self) -> bool:
        """Whether anything could be read. A page of nothing would replace a good one."""
        return bool(self.every_info or self.memory.num_rows or not self.errors)

    @property
    def infos(self) -> list[RankInfo]:
        """Each rank's trace by the main source, by rank."""
        return [info for info in self.every_info if info.source == self.source]

    @property
    def every_info(self) -> list[RankInfo]:
        """Each rank's traces, by rank."""
        return [result.info for result in self.captures.traces]

    @property
    def source(self) -> str:
        """The profiler that captured the most ranks, `kineto` or `nsys`: facts across ranks are from its traces."""
        return self.captures.main_source

    @property
    def manifests(self) -> list[RankCapture]:
        """Each rank's manifest, by rank. Empty for captures of other origin, and for Parquet alone."""
        return self.captures.manifests

    @property
    def errors(self) -> list[str]:
        """A sentence for each capture that could not be read completely; it names the file."""
        return self.captures.errors

    @property
    def unjudged(self) -> list[int]:
        """Ranks that no finding or verdict is about: their trace lost more than 1% of its device events."""
        return [info.rank for info in self.infos if not info.judged]

    # Each rank.

    breakdown = RankFact("Device time over the whole capture: busy, compute, communication exposed and overlapped, idle.")
    iterations = RankFact("The same for each iteration, with its duration, and whether it is at the profiler's start or stop.")
    idle_gaps = RankFact("Time without compute on each device: launch-starved, blocked, dependency-stalled.")
    idle_causes = RankFact("Time without compute by iteration, cause and name of what shows it.")
    launch_statistics = RankFact("Kernels of each iteration: number, durations, and the host's time to launch them.")
    kernel_times = RankFact("Device times of kernels, for facts across ranks.")
    exposure = RankFact("Exposed and overlapped time of communication.")
    profiler_cost = RankFact("What recording cost the host in each iteration.")
    device_roles = RankFact("Device time by the role of kernels: optimizer, attention and others.")
    loop_counts = RankFact("How often a loop's own ranges and calls occur in an iteration.")
    device_sums = RankFact("Time of the device's events by iteration and kind of event, for facts across ranks.")
    operations = RankFact("Communication operations.")
    activity = RankFact("When the device worked, as far as other ranks' facts depend on it.")
    first_event = RankFact("When the device's first event starts.")
    marks = RankFact("Iterations as the host marked them.")
    gpu_metrics = RankFact("Hardware counters that nsys sampled in iterations: mean, 95th percentile, maximum.")
    host_steps = RankFact("Iterations of a host whose trace has no device work.")
    phases = RankFact("Ranges by name: those of the step, the program and libraries; time on the host and the device, spread.")
    operators = RankFact("Host operators: own and total time, the device time that they launched, memory, and module.")
    longest_calls = RankFact("The longest call of each operator.")
    matrix_products = Fact(products.matrix_products, "products", "infos")
    products = RankFact("Matrix products, convolutions and attention by operator and input shapes.")
    counters_by_kernel = RankFact("Hardware counters while each kernel ran.")
    system_calls = RankFact("System calls that nsys recorded on the threads that launch work.")
    cuda_memory = RankFact("Memory that CUDA allocated by device and kind, as nsys records it with `--cuda-memory-usage=true`.")
    units = RankFact("Communication of a sharded model by FSDP unit or ZeRO step.")

    def operators_by(self, **by: Any) -> pa.Table:
        """`operators` by the options of `facts.operators.operators`."""
        return self._of_ranks(operators_by, "operators", **by)

    @Fact
    def flame_graph(self) -> Answer:
        """Stacks of each thread: host time in each, and device time launched from it, outermost frame first."""
        return self.captures.of_ranks(stacks_of)["flame_graph"]

    def flame_graph_of(self, rank: int, least_share: float) -> pa.Table:
        """The same of one rank, without stacks that have less than this share of its time on host and device.

        The other captures are not read.
        """
        compute = partial(stacks_of, least_share=least_share)
        return self.captures.of_source(self.source, compute, rank)["flame_graph"].table

    # All ranks.

    typical_iteration = Fact(parts.typical_iteration, "iterations")
    attribution = Fact(parts.attribution, "iterations", "idle_causes", "ranks")
    host_iterations = Fact(parts.host_iterations, "_database", "host_steps")
    kernels_by_rank = Fact(kernels.kernels, "_database", "device_sums")
    copies = Fact(kernels.copies, "_database", "device_sums")
    kernel_groups = Fact(kernels.kernel_groups, "kernels_by_rank", "copies")
    kernel_counters = Fact(sampled.kernel_counters, "counters_by_kernel", "infos")
    kernels = Fact(
        partial(kernels.kernels, by_rank=False), "_database", "device_sums", doc="Kernel statistics per name, of all ranks."
    )

    def gpu_metrics_over_time(self, intervals: int = 300) -> pa.Table:
        """Those counters over time."""
        return self._of_ranks(counters_over_time, "gpu_metrics_over_time", intervals=intervals)

    # Communication.

    @Fact
    def clock_offsets(self) -> Answer:
        """Offsets that put each rank's times on one clock, from matched collectives, with residuals."""
        return clocks.clock_offsets(self._matched if self._communicates else None, self.infos)

    @Fact
    def collective_sizes(self) -> pa.Table:
        """Number of communication operations of each rank and iteration by operation, group and size of message."""
        keys = ("rank", "source", "iteration", "operation", "group", "group_name", "group_ranks", "message_bytes")
        return totals(self.operations, keys, count=([], "count_all"))

    communication_by_rank = Fact(communication.communication_by_rank, "_exposed", without=communication.BY_RANK)
    communication_by_size = Fact(communication.communication_by_size, "_exposed", "infos", without=communication.BY_SIZE)
    communication = Fact(communication.communication, "_exposed", "infos", without=communication.BY_GROUP)
    waits = Fact(ranks.waits, "_waiting", without=ranks.WAITS)
    stragglers = Fact(ranks.stragglers, "ranks", "infos")

    @Fact
    def ranks(self) -> Answer:
        """Each rank in each iteration: its own time, its waiting, and whether it was the slowest or the fastest."""
        tables = map(self._of_source, (self.iterations, self.kernel_times, self.activity))
        return ranks.ranks(self._waiting, self.infos, *tables)

    @Fact
    def start_skew(self) -> pa.Table:
        """How late each rank's capture starts, separate from how late the rank is in its operations."""
        return ranks.start_skew(self._waiting, self.clock_offsets, self._of_source(self.first_event))

    @Fact
    def pipeline_by_rank(self) -> Answer:
        """Pipeline bubbles per rank and iteration."""
        tables = map(self._of_source, (self.kernel_times, self.activity, self.marks))
        return pipeline.pipeline_by_rank(self._waiting, self.infos, self.clock_offsets, *tables)

    pipeline_waits = Fact(pipeline.pipeline_waits, "pipeline_by_rank", "_waiting", without=declared("StageWait").schema())
    pipeline = Fact(pipeline.pipeline, "pipeline_by_rank")

    def event_cells(self, **options: Any) -> pa.Table:
        """Events of all ranks, for comparisons: the options are those of `facts.kernels.event_cells`."""
        name = f"event_cells {sorted(options.items())}"

        def compute(facts: RunFacts) -> pa.Table:
            return kernels.event_cells(facts._waiting, facts.device_sums, source=facts.source, **options)

        return self.answer(name, compute).table

    # Memory.

    memory = MemoryFact("Memory per rank and device: peak, growth per iteration, fragmentation.")
    memory_timeline = MemoryFact("Allocated and reserved memory over time.")
    memory_sites = MemoryFact("Memory by the place in the program that allocated it.")
    memory_at_peak = MemoryFact("Every allocation that was live at each device's peak, the largest first.")
    memory_growth = MemoryFact("Memory in use at the end of each iteration.")
    memory_over_time = MemoryFact("Memory of each device's largest sites over time.")
    out_of_memory = MemoryFact("Each out-of-memory error: requested and free bytes, and the place in the program.")

    # Caveats.

    def caveats(self, *names: str) -> list[Caveat]:
        """What the captures cannot show, or what was read differently than written.

        Args:
            names: of facts, for their caveats only. None for those of the captures and of the run as a whole.
        """
        general = () if names else self.capture_caveats
        answers = [self.answer(name) for name in names or _WITH_CAVEATS]
        found = merged([*general, *(caveat for answer in answers for caveat in answer.caveats)])
        if names or any(info.devices or info.has_unread_events for info in self.every_info):
            return found
        # A training on CPUs: no rank has device work, and each has iterations.
        on_cpus = {info.rank for info in self.every_info} <= set(self.host_iterations["rank"].to_pylist())
        return [caveat for caveat in found if not (on_cpus and caveat.code in _ABOUT_DEVICES)]

    @property
    def capture_caveats(self) -> list[Caveat]:
        """Caveats about the captures, found when they were searched for and read."""
        return self.captures.caveats

    @property
    def limitations(self) -> list[str]:
        """All caveats as sentences that name the ranks."""
        return sentences(self.caveats())

    # How facts are computed.

    def answer(self, name: str, compute: Callable[[RunFacts], Answer | pa.Table] | None = None) -> Answer:
        """A fact with its caveats, which are also those of the facts that it reads.

        Args:
            name: an attribute, unless `compute` is given.
            compute: computes the fact; it is kept by its name.
        """
        if compute is None:
            compute = type(self).__dict__[name].compute
        known = self.captures.known()
        if name not in known:
            with self._tracking() as read:
                made = compute(self)
            own = made if isinstance(made, Answer) else Answer(made)
            known[name] = Answer(own.table, (*read, *own.caveats))
        if self._read:
            self._read[-1].extend(known[name].caveats)
        return known[name]

    def _of_ranks(self, compute: Callable[..., dict[str, Answer]], fact: str, **options: Any) -> pa.Table:
        """A fact that a function computes from each rank's tables, with some options."""
        name, mine = f"{fact} {sorted(options.items())}", partial(compute, **options)
        return self.answer(name, lambda facts: facts.captures.of_ranks(mine)[fact]).table

    @property
    def _database(self) -> Connection:
        """The database."""
        return self.captures.database

    @property
    def _matched(self) -> Connection:
        """The database with tables of matched operations."""
        operations = self._of_source(self.operations)
        return self._with_tables("matched", lambda: matching.match(self.captures.database, operations))

    @property
    def _waiting(self) -> Connection:
        """The database with a table of waiting."""
        return self._with_tables("waiting", self._measure_waiting)

    def _measure_waiting(self) -> None:
        if self._communicates:
            communication.measure_waiting(self._matched, self.clock_offsets)
        else:
            _ = self.clock_offsets  # for its caveats
            self._database.register("operations", self._of_source(self.operations))
            self._database.register("waiting", communication.WAITING.empty_table())

    @property
    def _communicates(self) -> bool:
        return self._of_source(self.operations).num_rows > 0

    @property
    def _exposed(self) -> Connection:
        """The database with tables of waiting and of exposed communication."""
        return self._with_tables(
            "exposed", lambda: communication.measure_exposure(self._waiting, self._of_source(self.exposure))
        )

    def _with_tables(self, name: str, create: Callable[[], Iterable[Caveat] | None]) -> Connection:
        """The database with tables that are created once."""

        def created() -> list[Caveat]:
            with self._tracking() as read:
                own = create()
            return [*read, *(own or ())]

        caveats = self.captures.once(name, created)
        if self._read:
            self._read[-1].extend(caveats)
        return self.captures.database

    @contextmanager
    def _tracking(self) -> Iterator[list[Caveat]]:
        """The caveats of the facts that are read meanwhile."""
        self._read.append([])
        try:
            yield self._read[-1]
        finally:
            self._read.pop()

    def _of_source(self, table: pa.Table) -> pa.Table:
        return table.filter(pc.equal(table["source"], self.source))

    def _memory(self, name: str) -> Answer:
        marks = self._of_source(self.marks)
        snapshots = self.captures.once(
            "snapshots", lambda: self.captures.of_source("memory", partial(memory.of_snapshot, marks=marks))
        )
        facts = self.captures.facts()
        traces = {each: facts[f"{OF_TRACE}{each}"] for each in memory.SCHEMAS}
        return memory.of_run(name, snapshots, traces, self.source)
