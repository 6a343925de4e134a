"""`bridge-profiling flamegraph`: writes the stacks of a run for speedscope, with `report.flame_graph`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

from bridge_profiling.cli import common
from bridge_profiling.config import parse_ranks

#: Members of `report.flame_graph.Weight`, which takes longer to import than `--help` should.
WeightName = StrEnum("WeightName", ["host", "device"])


def flamegraph(
    run: common.RunArgument,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", metavar="FILE", help="The file. Default: flamegraph.speedscope.json, or flamegraph.folded.txt."
        ),
    ] = None,
    weight: Annotated[
        WeightName, Option(help="Host time in each stack, or device time that it launched.", **common.closed(WeightName))
    ] = WeightName.host,
    ranks: Annotated[str, Option(metavar="all|0,1,…", help="Ranks to write.")] = "all",
    folded: Annotated[bool, Option("--folded", help="Write folded text instead, as flamegraph.pl reads it.")] = False,
    workers: common.WorkersOption = None,
) -> None:
    """Write a flame graph of each rank and thread. Open it at https://www.speedscope.app, which uploads nothing.

    Exit code 1: a capture could not be read, or only in part; the others are written. 2: invalid request.
    """
    wanted = parse_ranks(ranks, ("all",))
    from bridge_profiling.report import flame_graph as files

    output = output or Path(files.FOLDED_NAME if folded else files.SPEEDSCOPE_NAME)
    files.check_replaceable(output, folded=folded)
    with common.open_runs(run, output=output, workers=workers) as (found,):
        from bridge_profiling.analysis.caveats import sentences

        # Everything is computed before anything is printed: a progress bar would overwrite the answer.
        found.prefetch("flame_graph")
        errors, limitations = found.errors, sentences(found.caveats("flame_graph"))
        if not found.infos:
            common.finish([*errors, f"{run} holds no trace"])
        count = found.write_flame_graph(
            output, weight=weight.value, ranks=None if isinstance(wanted, str) else wanted, folded=folded
        )
    where = "" if folded else " Open it at https://www.speedscope.app"
    common.note(f"{output}: {count} stacks by {weight.value} time.{where}")
    for sentence in limitations:
        common.note(f"- {sentence}")
    common.finish(errors)
