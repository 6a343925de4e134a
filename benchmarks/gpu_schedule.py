"""Runs the cases of gpu_overhead.py and trace_cost.py on the GPUs of a machine, one case per GPU, within a given time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.gpu_cases import Case
from benchmarks.gpu_processes import Lane, Place, end_all, lanes, visible_gpus
from benchmarks.gpu_rounds import Bench, Row
from benchmarks.gpu_sizes import Sizes
from benchmarks.gpu_tables import cost_lines, row_lines

#: Seconds after its time limit in which a benchmark may finish.
_GRACE_SECONDS = 30.0


@dataclass
class Record:
    """The results of all cases.

    Attributes:
        asked: the command's arguments.
        path: where it is written after each case, as JSON; None writes nothing.
    """

    asked: dict[str, Any]
    path: Path | None
    rows: list[Row] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def keep(self, bench: Bench, seconds: float) -> None:
        """Add a case's results, even if it failed later."""
        self.rows += bench.results.rows
        self.costs += bench.results.costs
        self.seconds[bench.name] = seconds
        if bench.results.facts:
            self.facts[bench.name] = bench.results.facts
        if bench.results.raw:
            self.raw[bench.name] = bench.results.raw
        self.write()

    def write(self) -> None:
        """Write all results."""
        if self.path is None:
            return
        content = vars(self) | {"path": str(self.path), "rows": [row.as_json() for row in self.rows], "machine": _machine()}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1, default=str) + "\n")
        os.replace(temporary, self.path)


def _machine() -> dict[str, Any]:
    commit = None
    with contextlib.suppress(OSError):
        here = Path(__file__).parent
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here, check=False)
        commit = asked.stdout.strip() or None
    return {"python": platform.python_version(), "cores": os.cpu_count(), "commit": commit}


class Schedule:
    """Assigns cases to lanes until none is left or the time is over.

    Args:
        cases: in the order in which they begin.
        lanes: where they run, one in each at a time.
        arguments: the command's.
        record: where results go.
        scratch: for the trainings' files.
    """

    def __init__(
        self, cases: Sequence[Case], lanes: Sequence[Lane], arguments: argparse.Namespace, record: Record, scratch: Path
    ) -> None:
        self._waiting, self._lanes, self._arguments, self._record = list(cases), lanes, arguments, record
        self._scratch, self._lock = scratch, threading.Lock()
        self._end = monotonic() + arguments.seconds
        fixed, wanted = sum(case.fixed for case in cases), sum(case.seconds for case in cases)
        self._factor = max((arguments.seconds * len(lanes) - fixed) / max(wanted, 1.0), 0.1)
        expected = (fixed + wanted * self._factor) / len(lanes)
        self.say(
            f"{len(cases)} cases on {len(lanes)} {'GPU(s)' if lanes[0].gpu else 'CPU'}, {len(lanes[0].cores)} cores each;"
            f" {expected:.0f} s expected, with {self._factor:.0%} of the time that each usually measures"
        )

    def say(self, text: str) -> None:
        """Print a line without interleaving."""
        with self._lock:
            print(text, flush=True)

    def run(self) -> None:
        """Run them all."""
        threads = [threading.Thread(target=self._work, args=(lane,), daemon=True) for lane in self._lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(self._end + _GRACE_SECONDS - monotonic(), 0))
        if any(thread.is_alive() for thread in threads):
            self.say("the time is over: the trainings that still run are ended")
            end_all()
            for thread in threads:
                thread.join(_GRACE_SECONDS)

    def _work(self, lane: Lane) -> None:
        lane.take()
        while True:
            with self._lock:
                if not self._waiting:
                    return
                case = self._waiting.pop(0)
            self._try(case, lane)

    def _try(self, case: Case, lane: Lane) -> None:
        left = self._end - monotonic()
        if left < case.fixed:
            self._record.left_out[case.name] = f"{left:.0f} s were left, and it takes {case.fixed:.0f} s"
            self.say(f"-- {case.name}: left out, {self._record.left_out[case.name]}")
            return
        began = monotonic()
        seconds = min(case.seconds * self._factor, left - case.fixed)
        sizes = Sizes(self._arguments.layers, self._arguments.micro_batches, megatron=not self._arguments.torch_layers)
        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as folder:
            bench = Bench(case.name, Place(lane, Path(folder)), sizes, seconds, self._arguments.rounds, self.say)
            try:
                case.run(bench)
            except Exception as error:
                self._record.failed[case.name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
                self.say(f"!! {case.name} failed: {type(error).__name__}: {error}")
            took = monotonic() - began
            with self._lock:
                self._record.keep(bench, took)
        lines = [f"== {case.name}: {took:.0f} s", *row_lines(bench.results.rows), *cost_lines(bench.results.costs)]
        lines += [f"   {name}: {fact}" for name, fact in bench.results.facts.items()]
        self.say("\n".join(lines))


def main(cases: Sequence[Case], description: str | None) -> None:
    """Run the selected ones of these cases."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[""], metavar="NAME", help="names of cases, or beginnings of names; all")
    parser.add_argument("--seconds", type=float, default=380, help="for all of it (default: %(default)s)")
    rounds = "rounds of a case at most; 100 pairs in one of `idle`, 25 of `monitor`, 20 in a window and of `after-`"
    parser.add_argument("--rounds", type=int, default=80, help=rounds)
    parser.add_argument("--gpus", type=int, help="GPUs to use at most; all that are visible")
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--micro-batches", type=int, default=Sizes.micro_batches)
    parser.add_argument("--torch-layers", action="store_true", help="train torch's own layers, even where megatron-core is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write everything")
    parser.add_argument("--scratch", type=Path, help="directory on a fast disk for captures; the usual temporary one")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    arguments = parser.parse_args()
    chosen = [case for case in cases if any(_means(asked, case, cases) for asked in arguments.cases)]
    if arguments.list:
        print("\n".join(f"{case.name:36} {case.fixed:4.0f} s and {case.seconds:4.0f} s to measure" for case in chosen))
        return
    if not chosen:
        parser.error("no case has such a name; --list names them")

    # However the command ends, its trainings end with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    gpus = visible_gpus()[: arguments.gpus]
    record = Record(vars(arguments), arguments.json)
    for case in list(chosen):
        missing = "no nsys on PATH" if case.nsys and not shutil.which("nsys") else ""
        if case.cuda and not gpus:
            missing = "no GPU here"
        if missing:
            chosen.remove(case)
            record.left_out[case.name] = missing
            print(f"-- {case.name}: left out, {missing}")
    if chosen:
        with tempfile.TemporaryDirectory(prefix="overhead-", dir=arguments.scratch, ignore_cleanup_errors=True) as scratch:
            began = monotonic()
            try:
                Schedule(chosen, lanes(gpus), arguments, record, Path(scratch)).run()
            finally:
                end_all()
                record.seconds["all"] = monotonic() - began
                record.write()
    _conclude(record)


def _means(asked: str, case: Case, cases: Sequence[Case]) -> bool:
    """Whether this case is selected, by its name, or by a prefix if no case has exactly that name."""
    return case.name == asked if any(one.name == asked for one in cases) else case.name.startswith(asked)


def _conclude(record: Record) -> None:
    print("\n" + "\n".join(row_lines(record.rows)))
    print("\n".join(cost_lines(record.costs, summary=True)))
    for name, why in record.left_out.items():
        print(f"left out: {name} ({why})")
    for name, error in record.failed.items():
        print(f"FAILED: {name}: {error.splitlines()[0]}")
    print(f"{record.seconds.get('all', 0):.0f} s in all")
    if record.failed:
        sys.exit(1)
