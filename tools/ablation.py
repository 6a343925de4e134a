"""Switch heuristics off one at a time, and say which answers about the everyday captures that loses and wins.

    python tools/ablation.py [SUSPECT …]

`SUSPECTS` has what can be switched off. Without a choice, the table of all goes into docs/concepts/everyday-causes.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_profiling.run import Run  # noqa: E402
from tests.findings.simulated_jobs import Here  # noqa: E402
from tools import everyday_causes  # noqa: E402
from tools.injected_captures.everyday.captures import GROUPS, VISIBLE, unpack  # noqa: E402

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


def answers(name: str, suspects: Sequence[str], folder: Path) -> list[everyday_causes.Answer]:
    """What is found in a capture: as it is, and without each suspect."""
    capture, tables = VISIBLE[name], folder / "tables" / name
    tables.mkdir(parents=True, exist_ok=True)
    with Run(folder / name, parquet=tables, engine=Here()) as run:
        found = [everyday_causes.answer(capture, folder, lambda _: nullcontext(run))]
        for suspect in suspects:
            with without(suspect):
                again = copy(run)
                for concluded in ("grids", "findings", "conclusion"):
                    vars(again).pop(concluded, None)
                found.append(everyday_causes.answer(capture, folder, partial(lambda each, _: nullcontext(each), again)))
    return found


def table(suspects: Sequence[str], of_captures: Sequence[Sequence[everyday_causes.Answer]]) -> str:
    """A row for everything together, and for each suspect."""
    usual, *others = (everyday_causes.with_baselines(each) for each in zip(*of_captures, strict=True))
    rows = [("nothing", *_score(usual), "", "")]
    for suspect, found in zip(suspects, others, strict=True):
        changed = [(one.capture.name, one.right) for one, before in zip(found, usual, strict=True) if one.right != before.right]
        lost, won = ([name for name, right in changed if right == is_right] for is_right in (False, True))
        rows.append((suspect, *_score(found), ", ".join(lost), ", ".join(won)))
    head = "without | first finding right | gain within the bound | bound over gain | healthy right | ranks alone | lost | won"
    return everyday_causes.table(head, rows)


def _score(found: Sequence[everyday_causes.Answer]) -> tuple[str, ...]:
    causes = [one for one in found if one.capture.findings]
    healthy = [one for one in found if not one.capture.findings]
    over_gain = median(one.bound_over_gain for one in causes if one.bound_over_gain is not None)
    counts = (sum(one.right for one in causes), sum(one.bounded is True for one in causes))
    of_healthy = (sum(one.right for one in healthy), sum(bool(one.alone) for one in healthy))
    return (*map(str, counts), f"{over_gain:.2f}", *map(str, of_healthy))


def main() -> None:
    """Print the table, or put that of all suspects into the page."""
    parser = argparse.ArgumentParser(description="What each heuristic earns on the everyday captures, in a quarter of an hour.")
    parser.add_argument("suspects", nargs="*", help="all by default")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if unknown := set(options.suspects) - set(SUSPECTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Type one of: {', '.join(SUSPECTS)}")
    suspects = options.suspects or list(SUSPECTS)
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(options.workers) as pool:
        folder = Path(scratch)
        list(pool.map(partial(unpack, target=folder), GROUPS))
        found = list(pool.map(partial(answers, suspects=suspects, folder=folder), VISIBLE))
    rows = table(suspects, found)
    print(rows)
    if not options.suspects:
        page = everyday_causes.PAGE
        page.write_text(everyday_causes.with_section(page.read_text(encoding="utf-8"), "ablation", rows), encoding="utf-8")


if __name__ == "__main__":
    main()
