"""The facts that findings read, findings, the thresholds above which a number becomes one, and the wording that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.idle import OFTEN
from bridge_profiling.facts.names import CHECKPOINT, DATA_LOADING
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.words import fill, named_ranks, written
from bridge_profiling.traces.types import texts

#: A value for each iteration that counts (rows) and each rank (columns); NaN where a rank did not capture an iteration.
Grid = NDArray[np.float64]


class JudgedFacts:
    """The facts of a run as findings read them: of the main source alone, without ranks that no finding is about.

    Args:
        facts: of the run.
        alone: its communication compared with benchmarks.
    """

    def __init__(self, facts: RunFacts, alone: pa.Table | None) -> None:
        self._facts, self.alone = facts, alone
        #: Ranks that lost too much of their device work.
        self.unjudged = facts.unjudged
        self.infos = [info for info in facts.infos if info.judged]
        self.every_info = [info for info in facts.every_info if info.judged]
        self.manifests = [manifest for manifest in facts.manifests if manifest.rank not in self.unjudged]
        unprofiled = (manifest.durations_ns(profiled=False) for manifest in self.manifests)
        self.unprofiled_ns = [np.array(durations) for durations in unprofiled if durations]

    def __getattr__(self, name: str) -> pa.Table:
        # Tables alone are not found as attributes, and only once.
        table = getattr(self._facts, name)
        # Memory is from snapshots, which are captures of their own.
        if not name.startswith(("memory", "out_of")):
            if "source" in table.column_names:
                table = table.filter(pc.equal(table["source"], self._facts.source))
            if self.unjudged and "rank" in table.column_names:
                table = table.filter(pc.invert(pc.is_in(table["rank"], pa.array(self.unjudged, pa.int32()))))
        setattr(self, name, table)
        return table


class Confidence(StrEnum):
    """How certain a finding is."""

    high = "high"
    medium = "medium"
    low = "low"

    @property
    def lowered(self) -> Confidence:
        """The next lower one."""
        return Confidence.medium if self is Confidence.high else Confidence.low


@dataclass(frozen=True)
class Event:
    """A place in a capture that shows a finding.

    Args:
        rank: the rank whose capture contains it.
        name: a kernel, an operator, a range or an allocation site.
        iteration: None for events outside of iterations, and for several iterations together.
        start_ns: on the rank's clock; of the longest one when the event stands for several; None when unknown.
        duration_ns: total of all that it stands for.
        count: how many it stands for.
    """

    rank: int
    name: str
    iteration: int | None = None
    start_ns: int | None = None
    duration_ns: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Occurrence:
    """The captured iterations that a cause strikes, where these are not most of them.

    Args:
        iterations: ascending.
        of: how many iterations they are compared with, and themselves.
        each_ns: mean time that one of them loses, on the rank that loses most.
    """

    iterations: tuple[int, ...]
    of: int
    each_ns: float


@dataclass(frozen=True, repr=False)
class Finding:
    """A cause of lost time or of memory trouble.

    Args:
        id: one of `findings.ORDER`, or of a rule from outside.
        title: one sentence with the most important number.
        ranks: the responsible ranks, ascending; not the ranks that wait for them.
        evidence: numbers by name, with units in the names.
        events: the places that show it best, most telling first.
        recoverable_ns_per_iteration: estimate of how much shorter an iteration of the job could be. Only critical-path time
            counts, and no time counts for two findings. None when the finding costs no time or its cost is unknown.
        at_most_ns_per_iteration: upper bound of the same, whatever else is found. None when the saving is unknown or the
            finding costs no time.
        confidence: how certain the finding is.
        confidence_reason: why confidence is not high, as the end of a sentence; "" when it is.
        action: what to change, in imperative sentences, the first step first.
        severe: past the threshold for trouble, not only for attention.
        occurrence: which iterations it strikes; None when it is about all of them.
    """

    id: str
    title: str
    ranks: list[int]
    evidence: Mapping[str, Any]
    confidence: Confidence
    action: str
    recoverable_ns_per_iteration: float | None = None
    at_most_ns_per_iteration: float | None = None
    confidence_reason: str = ""
    events: list[Event] = field(default_factory=list)
    severe: bool = False
    occurrence: Occurrence | None = None

    def __repr__(self) -> str:
        saving_ns, at_most_ns = self.recoverable_ns_per_iteration, self.at_most_ns_per_iteration
        saves = "" if saving_ns is None else f"saves {written('ms', saving_ns)} per iteration"
        most = "" if at_most_ns is None else f"at most {written('ms', at_most_ns)}"
        bound = f" ({most})" if saves and most else most
        on = f" on {named_ranks(self.ranks)}" if self.ranks else ""
        return f"{self.id}{on}: {', '.join(filter(None, (saves + bound, f'{self.confidence} confidence')))}: {self.title}"


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a number becomes a finding. Shares are of a typical iteration's duration unless stated otherwise.

    Args:
        device_busy: a device that is busy for a smaller share is a finding.
        device_busy_severe: a device that is busy for a smaller share is a severe finding.
        data_loading: share of an iteration spent waiting for data.
        communication: share of an iteration in exposed communication, without waiting for other ranks.
        dominant_kernel: share of a rank's compute in one kernel.
        memory_headroom: share of the device's memory that is free at the peak.
        memory_growth_bytes: growth of allocated memory per iteration.
        memory_fragmentation: share of the reserved memory that was reserved while as much was free in holes too small to use.
        cause: share of an iteration that any other cause must cost.
        device_work: share of an iteration that other kernels for the same work must save: such times differ by a few percent
            between runs.
        free_for_activations: share of the device's memory that must be free at the peak before activations could be kept
            instead of recomputed.
        collectives: so many collectives of data parallelism in an iteration are many: more than one per block of a model of 24
            blocks.
        small_collectives: share of them that must be small.
        synchronizations: from this many waits of a host for its device per iteration, it never gets ahead, and what it launches
            late is of its waits.
        slow_iteration: an iteration that takes this many medians is slow.
        profiler: share of an unprofiled iteration that the profiler adds.
        data_loading_ranges: regular expression for names of ranges (annotations, NVTX ranges, Python frames) in which the
            program waits for data.
        checkpoint_ranges: regular expression for names of ranges in which the program saves a checkpoint.
    """

    device_busy: float = 0.80
    device_busy_severe: float = 0.50
    data_loading: float = 0.10
    communication: float = 0.20
    dominant_kernel: float = 0.30
    memory_headroom: float = 0.10
    memory_growth_bytes: int = 1_000_000
    memory_fragmentation: float = 0.20
    cause: float = 0.03
    device_work: float = 0.05
    free_for_activations: float = 0.30
    collectives: int = 30
    small_collectives: float = 1 / 3
    synchronizations: int = OFTEN
    slow_iteration: float = 1.5
    profiler: float = 0.10
    data_loading_ranges: str = DATA_LOADING
    checkpoint_ranges: str = CHECKPOINT


def by_rank(values: Mapping[int, float], digits: int = 0) -> dict[str, float]:
    """Rounded values by rank, as evidence holds them."""
    return {str(rank): round(value, digits) for rank, value in values.items()}


def text(
    finding: str,
    *entries: str,
    own: Mapping[str, Mapping[str, str]] | None = None,
    iteration_ns: float = math.inf,
    **values: object,
) -> str:
    """Entries of text.toml about a finding with values filled in, one after the other; empty names are left out.

    Args:
        entries: one that starts with a comma or a colon follows without a space. Those of others are called `other.entry`.
        own: entries of findings that text.toml does not have.
        iteration_ns: that shares of times refer to.
    """
    places = [entry.rpartition(".") for entry in entries if entry]
    known = {**texts(__package__, "text.toml"), **(own or {})}
    whole = " ".join(known[other or finding][entry].strip() for other, _, entry in places)
    return fill(whole.replace(" ,", ",").replace(" :", ":"), share_of=iteration_ns, **values)
