"""Says how accurate the findings on everyday trainings are, and what each heuristic contributes.

    python tools/accuracy.py [FOLDER] [--store]             # scores by cause, of tests/everyday or of another set
    python tools/accuracy.py [FOLDER] --without [SUSPECT…]  # and without each heuristic, or without these

`SUSPECTS` has what can be switched off. --store puts the tables into tests/everyday/ACCURACY.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_profiling.report.documents import document  # noqa: E402
from bridge_profiling.run import Run  # noqa: E402
from tests.findings.simulated_jobs import Here  # noqa: E402
from tools.everyday import STORED, Capture, captures, unpack  # noqa: E402

PAGE = STORED / "ACCURACY.md"

#: Findings that name no cause of lost time: the result of others, the work, the cost of profiling, full memory.
NEUTRAL = frozenset({"low_device_busy", "dominant_kernel", "profiler_overhead", "memory_headroom"})

#: Devices that are busy for a smaller share of the unprofiled iteration wait for hosts: findings about all ranks are not false.
BUSY = 0.80

#: What is switched off, and the attributes that do it: of modules of bridge_profiling.
SUSPECTS: Mapping[str, Mapping[str, Any]] = {
    "time of neighbouring iterations": {"findings.ledger._with_neighbours": lambda path_ns, cost_ns, follows: path_ns},
    "causes of iterations that means leave out": {"findings.rule._in_left_out": lambda *_: iter(())},
    "slow iterations that others explain": {"findings._once": lambda grids, found: found},
    "chance: pauses longer than any unprofiled iteration": {"findings.unprofiled.longer_than_any_ns": lambda manifests: {}},
    "the profiler's start": {"findings.unprofiled._ENOUGH_TO_START": 1 << 62},
    "causes that profiling inflates": {"findings.unprofiled._INFLATED": ()},
    "doubt about what the profiler costs": {"findings.grids.DOUBT": 0.0},
    "two waits cost little": {"findings.idle._OF_FEW": 1.0},
    "as many launches": {"findings.idle._launching_as_many": lambda grids, ranks: sorted(ranks)},
    "turns": {"findings.peers.take_turns": lambda *_, **__: {}},
    "turns in each of few iterations": {"findings.peers._EQUAL": 0.0},
    "kernels that another process interrupts": {"findings.peers.contended_ranks": lambda grids: []},
    "idle time of a shared device": {"findings.peers._STALLED": 1e9},
    "compute that communication slows": {"findings.peers.CONTENTION": 0.0},
    "executions beyond the peers'": {"findings.peers._of_more_executions_ns": lambda grids: np.zeros(len(grids.ranks))},
    "hosts that issue small collectives": {"findings.collectives._issuing_ns": lambda grids, many: grids.zero},
    "repeated reductions": {"findings.collectives._repeats": lambda grids: {}},
    "bounds: longer outside the capture": {"findings.bounds._longer_outside_ns": lambda grids: 0.0},
    "bounds: strided kernels": {"findings.bounds._strided_ns": lambda grids: 0.0},
    "bounds: compute that communication slows": {"findings.bounds._slowed_ns": lambda grids: grids.zero},
    "bounds: Student's t": {"findings.bounds._LEVEL": 0.5},
}


@dataclass(frozen=True)
class Named:
    """A finding that names a cause.

    Args:
        id: of the finding.
        ranks: that it names.
        saving_ms: that it estimates; None where it estimates nothing.
        at_most_ms: upper bound of that; None where it costs no time.
        possible: what it gives as one possible cause, with low confidence.
    """

    id: str
    ranks: tuple[int, ...]
    saving_ms: float | None
    at_most_ms: float | None
    possible: str | None = None

    def shows_cause(self, capture: Capture) -> bool:
        """Whether it names the cause of a capture, or all that the capture shows of it, on the cause's ranks."""
        named = self.possible if capture.pause_alone and self.possible else self.id
        return self.ranks == capture.ranks and bool({named, self.id} & {*capture.findings})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is found in a capture.

    Args:
        capture: the capture.
        found: the findings that name a cause, the first one first.
        idle: the finding of a device that idles, which names no cause, but bounds what idling can cost; None without.
        estimated_ms: an iteration without the profiler, from recorded events alone; None where it is not estimated.
        contradictions: see `contradictions`.
    """

    capture: Capture
    found: Sequence[Named]
    idle: Named | None
    estimated_ms: float | None
    contradictions: Sequence[str]

    @property
    def right(self) -> bool:
        """Whether the first finding is the cause, on its ranks; for a healthy run, whether no finding is false."""
        if self.capture.busy_share is not None:
            return not (self.found if self.capture.busy_share >= BUSY else self.alone)
        return bool(self.found) and self.found[0].shows_cause(self.capture)

    @property
    def alone(self) -> list[str]:
        """Findings that name some of the ranks and not all: in a healthy run, none should."""
        return [each.id for each in self.found if len(each.ranks) < self.capture.world_size]

    @property
    def judged(self) -> Named | None:
        """The finding whose saving is compared with the gain: of the cause, else the first one, else of an idle device."""
        of_cause = (each for each in self.found if each.shows_cause(self.capture))
        return next(of_cause, self.found[0] if self.found else self.idle)

    @property
    def bounded(self) -> bool | None:
        """Whether the measured gain is at most the upper bound, up to the noise of the measurement."""
        gain, at_most_ms = self.capture.gain, self.judged.at_most_ms if self.judged else None
        return None if gain is None else gain - self.capture.noise <= (at_most_ms or 0.0)

    @property
    def saving_error(self) -> float | None:
        """The estimate of a right finding over the measured gain, less 1; None where the gain is lost in the noise."""
        over_gain = self._over_gain("saving_ms") if self.right else None
        return None if over_gain is None else over_gain - 1

    @property
    def bound_over_gain(self) -> float | None:
        """The upper bound over the measured gain; None where the gain is lost in the noise, or the cause is not found."""
        return self._over_gain("at_most_ms") if self.judged and self.judged.shows_cause(self.capture) else None

    def _over_gain(self, which: str) -> float | None:
        gain, amount_ms = self.capture.gain, getattr(self.judged, which, None)
        return None if gain is None or amount_ms is None or gain <= self.capture.noise else amount_ms / gain

    @property
    def iteration_error(self) -> float | None:
        """The estimated iteration over the measured one, less 1; None where a window says nothing about the mean."""
        if self.estimated_ms is None or self.capture.window_share != 1.0:
            return None
        return self.estimated_ms / self.capture.unprofiled.median - 1


def answer(capture: Capture, run: Run) -> Answer:
    """Analyze a capture as `bridge-profiling analyze --json` does."""
    said: Any = document(run.facts, run.conclusion)
    captured_us = run.grids.captured_iteration_ns / 1e3  # the mean, as what is measured without a profiler
    profiler_us = said["verdict"].get("estimated_profiler_us")
    idle = [_named(finding) for finding in said["findings"] if finding["id"] == "low_device_busy"]
    return Answer(
        capture=capture,
        found=[_named(finding) for finding in said["findings"] if finding["id"] not in NEUTRAL],
        idle=idle[0] if idle else None,
        estimated_ms=None if profiler_us is None else (captured_us - profiler_us) / 1e3,
        contradictions=contradictions(said),
    )


def _named(finding: dict[str, Any]) -> Named:
    times_us = (finding[f"{name}_us_per_iteration"] for name in ("recoverable", "at_most"))
    collects = finding["confidence"] == "low" and "garbage collection is one possible cause" in finding["action"]
    saving, at_most = (None if time_us is None else time_us / 1e3 for time_us in times_us)
    return Named(finding["id"], tuple(finding["ranks"]), saving, at_most, "garbage_collection" if collects else None)


def contradictions(said: dict[str, Any]) -> list[str]:
    """Findings whose bound is below their estimate or beyond an iteration, and `all` if they save more than it."""
    whole_us, found, total_us = said["verdict"]["unprofiled_us"] or 0.0, [], 0.0
    for finding in said["findings"]:
        about_us, at_most_us = finding["recoverable_us_per_iteration"] or 0.0, finding["at_most_us_per_iteration"] or 0.0
        # Iterations that means leave out can be longer.
        counts = "iterations_captured" not in finding["evidence"] and finding["id"] != "slow_iterations"
        total_us += about_us * counts
        if about_us > at_most_us or (counts and at_most_us > whole_us + 1e-6):
            found.append(finding["id"])
    return [*found, "all"] if total_us > whole_us + 1e-6 else found


@contextmanager
def without(suspect: str) -> Iterator[None]:
    """With a suspect switched off, in every module that has it."""
    undo = []
    for dotted, replacement in SUSPECTS[suspect].items():
        module, name = f"bridge_profiling.{dotted}".rsplit(".", 1)
        original = getattr(importlib.import_module(module), name)
        for each in [each for key, each in sys.modules.items() if key.startswith("bridge_profiling")]:
            if vars(each).get(name) is original:
                undo.append((each, name, original))
                setattr(each, name, replacement)
    try:
        yield
    finally:
        for each, name, original in undo:
            setattr(each, name, original)


def of_group(group: str, folder: Path, suspects: Sequence[str] = ()) -> list[list[Answer]]:
    """The answers about each capture of a group: as it is, and without each suspect."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        unpack(folder, group, Path(scratch))
        for capture in captures(folder).values():
            if capture.group == group:
                tables = Path(scratch, "tables", capture.name)
                tables.mkdir(parents=True)
                with Run(Path(scratch, capture.name), parquet=tables, engine=Here()) as run:
                    found.append([answer(capture, run), *(_without(each, capture, run) for each in suspects)])
    return found


def _without(suspect: str, capture: Capture, run: Run) -> Answer:
    with without(suspect):
        again = copy(run)
        for concluded in ("grids", "findings", "conclusion"):
            vars(again).pop(concluded, None)
        return answer(capture, again)


@dataclass(frozen=True)
class Score:
    """What answers add up to."""

    answers: Sequence[Answer]

    def count(self, of: Callable[[Answer], bool | None], *, healthy: bool = False) -> int:
        """How many answers about captures with a cause, or without, this holds for."""
        return sum(of(one) is True for one in self.answers if bool(one.capture.findings) != healthy)

    def median(self, of: Callable[[Answer], float | None]) -> float:
        """The median of a figure's distance from zero, where there is one."""
        return median(found) if (found := [abs(each) for each in map(of, self.answers) if each is not None]) else float("nan")

    @property
    def cells(self) -> tuple[str, ...]:
        """First finding right, gain within the bound, bound over gain, estimate off by."""
        bounded, of = self.count(lambda one: one.bounded), self.count(lambda one: one.bounded is not None)
        right = f"{self.count(lambda one: one.right)} of {self.count(lambda _: True)}"
        over_gain, error = self.median(lambda one: one.bound_over_gain), self.median(lambda one: one.saving_error)
        cells = (right, f"{bounded} of {of}", f"{over_gain:.2f}", f"{error:.0%}")
        return tuple("" if "nan" in cell or cell == "0 of 0" else cell for cell in cells)

    @property
    def healthy(self) -> tuple[str, ...]:
        """Healthy trainings right, and in how many some ranks are named alone."""
        right, of = (self.count(each, healthy=True) for each in (lambda one: one.right, lambda _: True))
        return f"{right} of {of}", str(self.count(lambda one: bool(one.alone), healthy=True))


def by_cause(found: Sequence[Answer]) -> str:
    """The scores of each cause, and of all."""
    causes = sorted({one.capture.findings[0] for one in found if one.capture.findings})
    of_cause = {f"`{cause}`": [one for one in found if one.capture.findings[:1] == (cause,)] for cause in causes}
    rows = [(cause, *Score(answers).cells) for cause, answers in {**of_cause, "all": found}.items()]
    score, head = Score(found), "cause | first finding right | gain within the bound | bound over gain | estimate off by"
    right, alone = score.healthy
    return (
        f"{_table(head, rows)}\n\nHealthy trainings: {right} right, {alone} with a rank named alone. The unprofiled iteration"
        f" is estimated within {score.median(lambda one: one.iteration_error):.0%} (median)."
    )


def ablation(found: Sequence[Sequence[Answer]], suspects: Sequence[str]) -> str:
    """A row for everything together, and for each suspect."""
    usual, rows = [each[0] for each in found], []
    for name, answers in zip(["nothing", *suspects], zip(*found, strict=True), strict=True):
        changed = [
            (one.capture.name, one.right) for one, before in zip(answers, usual, strict=True) if one.right != before.right
        ]
        lost, won = (", ".join(each for each, right in changed if right is is_right) for is_right in (False, True))
        rows.append((name, *Score(answers).cells[:3], *Score(answers).healthy, lost, won))
    head = "without | first finding right | gain within the bound | bound over gain | healthy right | ranks alone | lost | won"
    return _table(head, rows)


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    columns = [column.strip() for column in head.split("|")]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [columns, ["---"] * len(columns), *rows])


def with_section(text: str, name: str, content: str) -> str:
    """A page with a section's content between its marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Analyze a set, print the tables, and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=STORED)
    parser.add_argument("--without", nargs="*", choices=SUSPECTS, metavar="SUSPECT")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    suspects = [] if options.without is None else options.without or list(SUSPECTS)
    groups = dict.fromkeys(capture.group for capture in captures(options.folder).values())
    with ProcessPoolExecutor(options.workers) as pool:
        found = [each for of in pool.map(partial(of_group, folder=options.folder, suspects=suspects), groups) for each in of]
    tables = {"scores": by_cause([each[0] for each in found])} | ({"ablation": ablation(found, suspects)} if suspects else {})
    for name, table in tables.items():
        print(table, end="\n\n")
        if options.store:
            PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), name, table), encoding="utf-8")


if __name__ == "__main__":
    main()
