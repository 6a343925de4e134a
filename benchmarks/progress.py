"""Speeds at another commit and now, measured in turns: seconds or CPU seconds, their ratio, and peak memory.

    python benchmarks/progress.py COMMIT CAPTURES [--rows help,report,…]

CAPTURES has the folders kineto/pp2_dp2, kineto/tp2_dp2, nsys/tp2_dp2 and memory/tp2_dp2. Ranks are copied under other
numbers, and files repeated in time. Seconds depend on the machine and the hour, ratios of pairs hardly: a goal in seconds is
shown as the ratio to the figure of 9b764a4 with which it was set.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from large_files import Used, measured, write_report, write_snapshot
from paired import paired_ratio
from report_page import write_ranks
from scaled_captures import write_scaled
from table import machine, script

HERE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """A command on captures.

    Args:
        name: of the row.
        command: arguments of Python; {work} is the folder of the captures.
        figure: what COMMIT's figure was when the goal was set: seconds, or a ratio to a peer.
        goal: the goal, in the same unit.
        limits: the measurement that the goal limits.
        pairs: how often each side runs after a first time, which counts as well where these are fewer than three.
        cached: an earlier run has filled the cache.
    """

    name: str
    command: tuple[str, ...]
    figure: float | None = None
    goal: float | None = None
    limits: str = "wall_s"
    pairs: int = 5
    cached: bool = False


def _cli(*arguments: str) -> tuple[str, ...]:
    return ("-m", "bridge_profiling.cli", *arguments)


def _report(ranks: int) -> tuple[str, ...]:
    return _cli("report", f"{{work}}/ranks-{ranks}", "-o", "{work}/page.html")


_COMPARE = _cli("compare", "{work}/ranks-2", "{work}/other-2")
_LARGE = _cli("analyze", "{work}/large", "--json")
_EXPORT = _cli("analyze", "{work}/rank-0.sqlite", "--json")

#: Figures are those of 9b764a4, with which the goals were set.
ROWS = {
    "help": Row("`--help`", _cli("--help"), 0.26, 0.12, pairs=11),
    "report": Row("`report`, 2 ranks of 14 MB", _report(2), 1.8, 1.2),
    "cached": Row("the same, from the cache", _report(2), 1.4, 0.7, cached=True),
    "compare": Row("`compare` of two such runs, from the cache", _COMPARE, 2.6, 1.5, cached=True),
    "64": Row("`report`, 64 ranks of 14 MB", _report(64), pairs=3),
    "256": Row("`report`, 256 ranks of 14 MB", _report(256), 35, 18, pairs=2),
    "1024": Row("`report`, 1,024 ranks of 14 MB", _report(1024), pairs=1),
    # CPU time of HolisticTraceAnalysis, divided by ours.
    "large": Row("`analyze --json`, a rank of 271 MB", _LARGE, 1 / 8.5, 1 / 12, "cpu_s"),
    "nsys": Row("`analyze --json`, an nsys export of 927 MB", _EXPORT, limits="cpu_s", pairs=2),
    "memory": Row("`memory`, a snapshot of 200 MB", _cli("memory", "{work}/rank-0.pickle"), limits="cpu_s", pairs=2),
}

#: A thousand ranks are 1.5 GB of files, and take ten minutes.
_USUAL = tuple(each for each in (*ROWS, "hook") if each != "1024")


def write_captures(captures: Path, work: Path, rows: list[str]) -> None:
    """The files that these rows read."""
    folders = {"ranks-2": 2, "other-2": 2} | {f"ranks-{each}": int(each) for each in rows if each.isdigit()}
    for name, count in folders.items():
        (work / name).mkdir()
        write_ranks(captures / "kineto" / "pp2_dp2", work / name, count, 1)
    if "large" in rows:
        write_scaled(captures / "kineto" / "tp2_dp2" / "rank-0.json.gz", work / "large" / "rank-0.json.gz", 9)
    if "nsys" in rows:
        write_report(captures / "nsys" / "tp2_dp2" / "rank0.sqlite.xz", work / "rank-0.sqlite", 1000)
    if "memory" in rows:
        write_snapshot(captures / "memory" / "tp2_dp2" / "snapshot_0.pickle.xz", work / "rank-0.pickle", 161)


def run(row: Row, checkout: Path, work: Path, cache: Path) -> Used:
    """What the row's command uses with the code of a checkout."""
    if not row.cached:
        shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, *(each.format(work=work) for each in row.command)]
    return measured(command, cache, checkout)


def hook_ratio(checkout: Path) -> float:
    """An iteration outside of the window, divided by Megatron Bridge's pair of calls: the checkout's own benchmark."""
    return script("hook_overhead.py", "--rounds", "15", checkout=checkout)["ratio"]


def measure(row: Row, sides: dict[str, Path], work: Path) -> dict[str, list[Used]]:
    """Both sides of a row, in turns, after a first time that compiles modules and fills the cache."""
    found: dict[str, list[Used]] = {side: [] for side in sides}
    for turn in range(row.pairs + 1):
        for side in sorted(sides, reverse=bool(turn % 2)):
            used = run(row, sides[side], work, work / f"cache-{side}")
            if turn or row.pairs < 3:
                found[side].append(used)
    return found


def line(row: Row, found: dict[str, list[Used]]) -> str:
    """A row of the table."""
    before, now = ([getattr(each, row.limits) for each in found[side]] for side in ("before", "now"))
    ratio = paired_ratio(now, before)
    peak = " to ".join(f"{max(each.peak_mb for each in found[side]):.0f}" for side in ("before", "now"))
    goal = f"{row.goal / row.figure:.2f}" if row.goal and row.figure else ""
    unit = {"wall_s": "s", "cpu_s": "CPU s"}[row.limits]
    spread = f"**{ratio.median:.2f}** ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"| {row.name} | {median(before):.2f} | {median(now):.2f} {unit} | {spread} | {goal} | {peak} MB |"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("captures", type=Path)
    parser.add_argument("--rows", default=",".join(_USUAL), help=f"which of {', '.join((*ROWS, 'hook'))}")
    options = parser.parse_args()
    rows = options.rows.split(",")
    print(
        machine() + "\n\n| | before | now | now / before | goal | peak memory |\n|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        work, other = Path(name, "work"), Path(name, options.commit)
        work.mkdir()
        other.mkdir()
        archive = subprocess.run(["git", "archive", options.commit], check=True, capture_output=True, cwd=HERE).stdout
        subprocess.run(["tar", "-x", "-C", str(other)], input=archive, check=True)
        sides = {"before": other, "now": HERE}
        write_captures(options.captures.resolve(), work, rows)
        for each in rows:
            if each in ROWS:
                print(line(ROWS[each], measure(ROWS[each], sides, work)), flush=True)
        if "hook" in rows:
            before, now = zip(*([hook_ratio(side) for side in sides.values()] for _ in range(3)), strict=True)
            ratio = paired_ratio(now, before)
            print(
                f"| an iteration outside the window / Bridge's pair of calls | {median(before):.2f} | {median(now):.2f} "
                f"| **{ratio.median:.2f}** ({ratio.low:.2f} to {ratio.high:.2f}) | {1.0 / (689 / 501):.2f} | |"
            )


if __name__ == "__main__":
    main()
