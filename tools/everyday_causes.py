"""Write the tables of docs/concepts/everyday-causes.md: what is found in each everyday capture, against what was measured.

  python tools/everyday_causes.py

It analyzes every capture, in minutes. tests/everyday/test_accuracy.py checks that the page is current.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_profiling.report.json import document  # noqa: E402
from bridge_profiling.run import Run  # noqa: E402
from tests.planted.cases import CASES, Case  # noqa: E402
from tools.injected_captures.everyday.captures import GROUPS, VISIBLE, Capture, Milliseconds, unpack  # noqa: E402

PAGE = ROOT / "docs" / "concepts" / "everyday-causes.md"

#: Findings that name no cause of lost time: the result of others, the work, the cost of profiling, full memory.
NEUTRAL = frozenset({"low_device_busy", "dominant_kernel", "profiler_overhead", "memory_headroom"})

#: Pairs whose blocks of iterations are further apart than this share of their median are listed apart.
STEADY = 0.10

#: Devices that are busy for a smaller share of the unprofiled iteration wait for hosts: findings about all ranks are not false.
BUSY = 0.80


#: Halves of a round, by whether they were set aside.
HALVES = ("for development", "set aside")

#: A finding with less than this share of its saving in the baseline is one that the cause brought.
MUCH_SMALLER = 0.5


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

    def is_cause(self, capture: Capture) -> bool:
        """Whether it names the cause of a capture by its name, on the cause's ranks."""
        return self.id in capture.findings and self.ranks == capture.ranks

    def shows_cause(self, capture: Capture) -> bool:
        """The same, or that it says all that the capture can show of the cause."""
        all_that_shows = capture.pause_alone and self.possible in capture.findings and self.ranks == capture.ranks
        return self.is_cause(capture) or all_that_shows


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is found in a capture.

    Args:
        capture: the capture.
        found: the findings that name a cause, the first one first.
        profiled_ms: the captured iteration.
        estimated_ms: the same without the profiler, from recorded events alone; None where this version does not estimate it.
        contradictions: findings whose bound is below their estimate, or beyond an iteration; `all` if they save more than it.
        idle: the finding of a device that idles, which names no cause, but bounds what idling can cost; None without.
        in_baseline: findings of the capture without the cause.
    """

    capture: Capture
    found: Sequence[Named]
    profiled_ms: float
    estimated_ms: float | None
    contradictions: Sequence[str] = ()
    idle: Named | None = None
    in_baseline: Sequence[Named] = ()

    @property
    def right(self) -> bool:
        """Whether the first finding is the cause, on its ranks; for a healthy run, whether no finding is false."""
        if self.capture.busy_share is not None:
            return not (self.found if self.capture.busy_share >= BUSY else self.alone)
        return bool(self.found) and self.found[0].shows_cause(self.capture)

    @property
    def right_by_name(self) -> bool:
        """Whether the first finding has the name of the cause."""
        return bool(self.found) and self.found[0].is_cause(self.capture)

    @property
    def beyond_baseline(self) -> Named | None:
        """The first finding that the baseline does not have, or that is much smaller there."""
        usual = {each.id: each.saving_ms or 0.0 for each in self.in_baseline}
        return next((each for each in self.found if self._brought(each, usual.get(each.id))), None)

    @staticmethod
    def _brought(each: Named, usual_ms: float | None) -> bool:
        return usual_ms is None or (each.saving_ms or 0.0) > usual_ms / MUCH_SMALLER

    @property
    def right_beyond_baseline(self) -> bool:
        """Whether that finding is the cause, on its ranks."""
        return self.beyond_baseline is not None and self.beyond_baseline.shows_cause(self.capture)

    @property
    def judged(self) -> Named | None:
        """The finding whose saving is compared with the gain: of the cause, else the first one, else of an idle device."""
        of_cause = (each for each in self.found if each.shows_cause(self.capture))
        return next(of_cause, self.found[0] if self.found else self.idle)

    @property
    def saving_ms(self) -> float | None:
        """The estimate of that finding."""
        return self.judged.saving_ms if self.judged else None

    @property
    def at_most_ms(self) -> float | None:
        """Its upper bound."""
        return self.judged.at_most_ms if self.judged else None

    @property
    def alone(self) -> list[str]:
        """Findings that name some of the ranks and not all: in a healthy run, none should."""
        return [each.id for each in self.found if len(each.ranks) < self.capture.world_size]

    @property
    def bounded(self) -> bool | None:
        """Whether the measured gain is at most the upper bound, up to the noise of the measurement."""
        gain = self.capture.gain
        return None if gain is None else gain - self.capture.noise <= (self.at_most_ms or 0.0)

    @property
    def saving_error(self) -> float | None:
        """The estimate over the measured gain, less 1; None where the gain is lost in the noise."""
        over_gain = self._over_gain(self.saving_ms)
        return None if over_gain is None else over_gain - 1

    @property
    def bound_over_gain(self) -> float | None:
        """The upper bound over the measured gain; None where the gain is lost in the noise, or the cause is not found."""
        return self._over_gain(self.at_most_ms) if self.judged and self.judged.shows_cause(self.capture) else None

    def _over_gain(self, amount_ms: float | None) -> float | None:
        gain = self.capture.gain
        return None if gain is None or amount_ms is None or gain <= self.capture.noise else amount_ms / gain

    @property
    def iteration_error(self) -> float | None:
        """The estimated iteration over the measured one, less 1; None where a window says nothing about the mean."""
        if self.estimated_ms is None or self.capture.window_share != 1.0:
            return None
        return self.estimated_ms / self.capture.unprofiled.median - 1


def answer(capture: Capture, folder: Path, open_run: Callable[[Path], Run]) -> Answer:
    """Analyze a capture as `bridge-profiling analyze --json` does."""
    with open_run(folder) as run:
        said: Any = document(run.facts, run.conclusion)
        captured_us = run.grids.captured_iteration_us  # the mean, as what is measured without a profiler
    named = [finding for finding in said["findings"] if finding["id"] not in NEUTRAL]
    idle = [finding for finding in said["findings"] if finding["id"] == "low_device_busy"]
    verdict = said["verdict"]
    estimated_us = verdict.get("estimated_profiler_us")
    return Answer(
        capture=capture,
        found=[_named(finding) for finding in named],
        contradictions=_contradictions(said),
        idle=_named(idle[0]) if idle else None,
        profiled_ms=captured_us / 1e3,
        estimated_ms=None if estimated_us is None else (captured_us - estimated_us) / 1e3,
    )


def _contradictions(said: dict[str, Any]) -> list[str]:
    whole_us, found, total_us = said["verdict"]["unprofiled_us"] or 0.0, [], 0.0
    for finding in said["findings"]:
        about_us, at_most_us = finding["recoverable_us_per_iteration"] or 0.0, finding["at_most_us_per_iteration"] or 0.0
        # Iterations that means leave out can be longer.
        counts = "iterations_captured" not in finding["evidence"] and finding["id"] != "slow_iterations"
        total_us += about_us * counts
        if about_us > at_most_us or (counts and at_most_us > whole_us + 1e-6):
            found.append(finding["id"])
    return [*found, "all"] if total_us > whole_us + 1e-6 else found


def _named(finding: dict[str, Any]) -> Named:
    saving, at_most = (
        None if (time_us := finding[f"{name}_us_per_iteration"]) is None else time_us / 1e3
        for name in ("recoverable", "at_most")
    )
    collects = finding["confidence"] == "low" and "garbage collection is one possible cause" in finding["action"]
    return Named(
        finding["id"],
        tuple(finding["ranks"]),
        saving,
        at_most,
        "garbage_collection" if collects else None,
    )


def answers(scratch: Path, open_run: Callable[[Path], Run]) -> list[Answer]:
    """The answers about all captures that may be looked at, in the order of `cases.json`."""
    for group in GROUPS:
        unpack(group, scratch)
    return with_baselines([answer(capture, scratch / capture.name, open_run) for capture in VISIBLE.values()])


def with_baselines(found: Iterable[Answer]) -> list[Answer]:
    """The answers, each with what is found in its baseline."""
    by_name = {one.capture.name: one for one in found}
    baselines = {name: by_name.get(one.capture.baseline or "") for name, one in by_name.items()}
    return [replace(one, in_baseline=of.found) if (of := baselines[name]) else one for name, one in by_name.items()]


def megatron(open_run: Callable[[Path], Run]) -> list[Answer]:
    """The answers about the captures of tests/planted, whose manifests time the unprofiled iterations."""
    timed = {}
    for case in CASES.values():
        with open_run(case.folder) as run:
            timed[case.name] = _timed(run)
    return with_baselines(answer(_megatron_capture(case, timed), case.folder, open_run) for case in CASES.values())


def _timed(run: Run) -> Milliseconds:
    """An iteration outside the window: the median over ranks and iterations, the shortest iteration and the longest."""
    each = [median(manifest.durations_ns(profiled=False)) / 1e6 for manifest in run.facts.manifests]
    whole = [ns / 1e6 for manifest in run.facts.manifests for ns in manifest.durations_ns(profiled=False)]
    return Milliseconds(median(each), min(whole), max(whole))


def _megatron_capture(case: Case, timed: dict[str, Milliseconds]) -> Capture:
    return Capture(
        name=case.name,
        group="megatron",
        recorder="hook" if case.profiler == "torch" else "nsys",
        world_size=len(case.captured),
        findings=(case.finding,) if case.finding else (),
        ranks=tuple(rank for rank in case.planted_ranks if rank in case.captured),
        unprofiled=timed[case.name],
        baseline=case.twin,
        baseline_unprofiled=timed[case.twin] if case.twin else None,
        # A checkpoint comes once in the window and never outside, and memory costs no time.
        comparable=case.finding not in ("checkpoint_stall", "memory_growth", "memory_fragmentation"),
        set_aside=False,
        round=1,
        busy_share=None if case.finding else 1.0,
        window_share=1.0,
        pause_alone=False,
    )


# -- the page --------------------------------------------------------------------------------------------------------------


def causes_table(found: Iterable[Answer]) -> str:
    """Cause, first finding, ranks, estimated and largest saving, and measured gain of each capture with a cause."""
    rows = []
    for one in found:
        capture = one.capture
        if not capture.findings:
            continue
        first, beyond = (one.found[0] if one.found else None), one.beyond_baseline
        rows.append(
            (
                capture.name, "set aside" if capture.set_aside else "", f"`{capture.findings[0]}`", _ranks(capture.ranks),
                _id(first), _ranks(first.ranks if first else ()), "yes" if one.right else "no",
                "the same" if beyond and beyond is first else _id(beyond), "yes" if one.right_beyond_baseline else "no",
                _ms(one.saving_ms), _ms(one.at_most_ms), _ms(capture.gain), {True: "yes", False: "no", None: ""}[one.bounded],
                _percent(one.saving_error),
            )
        )  # fmt: skip
    return table(
        "capture | | cause | on ranks | first finding | ranks | right | first beyond the baseline's | right | estimated saving,"
        " ms | at most, ms | measured gain, ms | within the bound | estimate off by",
        rows,
    )


def _id(finding: Named | None) -> str:
    return f"`{finding.id}`" if finding else "nothing"


def healthy_table(found: Iterable[Answer]) -> str:
    """What is found in captures without a cause."""
    rows = [
        (
            one.capture.name, one.capture.recorder, f"{one.capture.busy_share or 0.0:.0%}",
            ", ".join(f"`{each.id}` on {_ranks(each.ranks)}" for each in one.found) or "nothing",
            "yes" if one.right else "no",
        )
        for one in found
        if not one.capture.findings
    ]  # fmt: skip
    return table("capture | recorder | device busy | found | right", rows)


def iterations_table(found: Iterable[Answer]) -> str:
    """The unprofiled iteration of each capture, measured and estimated."""
    rows = [
        (
            one.capture.name, one.capture.recorder, _ms(one.profiled_ms), _ms(one.estimated_ms),
            _ms(one.capture.unprofiled.median), _percent(one.iteration_error),
            "" if one.capture.unprofiled.spread <= STEADY else "unsteady",
        )
        for one in found
        if one.capture.window_share == 1.0
    ]  # fmt: skip
    return table("capture | recorder | profiled, ms | estimated, ms | measured, ms | off by | ", rows)


def summary(found: Sequence[Answer]) -> str:
    """The figures that the tables add up to."""
    lines = []
    for name, chosen in (
        ("All", found),
        *(
            (f"Round {number}, {half}", _of(found, number, half))
            for number in dict.fromkeys(one.capture.round for one in found)
            for half in HALVES
            if any(one.capture.findings for one in _of(found, number, half))
        ),
    ):
        causes = [one for one in chosen if one.capture.findings]
        if not causes:
            continue
        right, beyond = sum(one.right for one in causes), sum(one.right_beyond_baseline for one in causes)
        bounded = [one.bounded for one in causes if one.bounded is not None]
        errors = [abs(one.saving_error) for one in causes if one.saving_error is not None and one.right]
        over_gain = [one.bound_over_gain for one in causes if one.bound_over_gain is not None]
        lines.append(
            f"- {name}: the first finding is right in {right} of {len(causes)} ({right / len(causes):.0%}), the first beyond"
            f" the baseline's in {beyond} ({beyond / len(causes):.0%}); the measured gain is within the upper bound in"
            f" {sum(bounded)} of {len(bounded)}, and the bound is {median(over_gain):.2f} times the gain (median); the estimate"
            f" of a right finding is off by {_share(errors)} (median)."
        )
    by_name = sum(one.right_by_name for one in found if one.capture.findings)
    pauses = sum(one.right and not one.right_by_name for one in found if one.capture.findings)
    lines.append(
        f"- Of these, {pauses} are pauses in which Python collects garbage and the capture does not record that: right is"
        f" `host_pause` with low confidence and garbage collection as one possible cause. By name, {by_name} are right."
    )
    healthy = [one for one in found if not one.capture.findings]
    lines.append(
        f"- Healthy trainings: right in {sum(one.right for one in healthy)} of {len(healthy)}; only some of the ranks are named"
        f" in {sum(bool(one.alone) for one in healthy)}."
    )
    steady = [one for one in found if one.iteration_error is not None and one.capture.unprofiled.spread <= STEADY]
    errors = [abs(one.iteration_error or 0.0) for one in steady]
    lines.append(
        f"- Unprofiled iteration, {len(steady)} steady captures: the estimate is off by {_share(errors)} (median),"
        f" {max(errors):.0%} (worst)."
        if errors
        else "- Unprofiled iteration: this version does not estimate it."
    )
    return "\n".join(lines)


def _of(found: Iterable[Answer], number: int, half: str) -> list[Answer]:
    return [one for one in found if one.capture.round == number and HALVES[one.capture.set_aside] == half]


def page(found: Sequence[Answer], of_megatron: Sequence[Answer]) -> str:
    """The page with its tables.

    Args:
        found: about everyday trainings.
        of_megatron: about trainings of Megatron-Core.
    """
    text = PAGE.read_text(encoding="utf-8")
    for name, content in (
        ("summary", summary(found)),
        ("causes", causes_table(found)),
        ("megatron", causes_table(of_megatron)),
        ("healthy", healthy_table(found)),
        ("iterations", iterations_table([*found, *of_megatron])),
    ):
        text = with_section(text, name, content)
    return text


def with_section(text: str, name: str, content: str) -> str:
    """A page with a section's content between its marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n\n{end}{rest.split(end)[1]}"


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; `|` separates its columns."""
    columns = head.split("|")
    lines = [f"| {' | '.join(column.strip() for column in columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"


def _share(errors: Sequence[float]) -> str:
    return f"{median(errors):.0%}" if errors else "not known"


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description="Analyze all everyday captures, in minutes, and write their page.").parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tables = Path(scratch, "tables")
        tables.mkdir()

        def open_run(path: Path) -> Run:
            """What is kept of a run is outside the repository."""
            return Run(path, parquet=Path(tempfile.mkdtemp(dir=tables)))

        found = answers(Path(scratch, "captures"), open_run)
        text = page(found, megatron(open_run))
    PAGE.write_text(text, encoding="utf-8")
    print(summary(found))


if __name__ == "__main__":
    main()
