"""The commands that write a run for other viewers: `merge` one Perfetto trace of all ranks, `flamegraph` their stacks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

from bridge_profiling.cli.options import FetchOption, RunArgument, WorkersOption
from bridge_profiling.cli.output import finish, note, progress
from bridge_profiling.cli.runs import open_runs

#: Members of `report.flame_graph.Weight`, which takes longer to import than `--help` should.
WeightName = StrEnum("WeightName", ["host", "device"])


def merge(
    run: RunArgument,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="The trace, compressed if the name ends with .gz.")
    ] = Path("all_ranks.json.gz"),
    host: Annotated[bool, Option(help="Include the hosts' ranges in addition to the devices' work.")] = True,
    findings: Annotated[bool, Option(help="Annotate the findings of `report`.")] = True,
    workers: WorkersOption = None,
    fetch: FetchOption = False,
) -> None:
    """Merge the traces of all ranks into one, on one clock. Open it at https://ui.perfetto.dev.

    Exit code 1: a capture could not be read, or only in part; the others are merged. 2: invalid request.
    """
    with open_runs(run, output=output, workers=workers, fetch=fetch) as (found,):
        from bridge_profiling.facts.types import sentences
        from bridge_profiling.report import words

        # Findings first: one pass over the captures then reads everything that is needed.
        judged = found.findings if findings else []
        facts = found.facts
        errors, ranks = facts.errors, len(facts.captures.entries())
        if not ranks:
            finish([*errors, f"{run} holds no trace to merge"])
        aligned = facts.caveats("clock_offsets") if ranks > 1 else ()
        # Findings have evaluated everything else already.
        limitations = facts.limitations if findings else sentences([*facts.capture_caveats, *aligned])
        with progress("merging", "ranks") as on_merged:
            count = found.merge(output, host=host, findings=findings, on_progress=on_merged)
    annotated = f" and {words.counted(len(judged), 'finding')}" if judged else ""
    note(f"{output}: {count} events of {ranks} ranks{annotated}. Open it at https://ui.perfetto.dev")
    finish(errors, limitations)


def flamegraph(
    run: RunArgument,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", metavar="FILE", help="The file. Default: flamegraph.speedscope.json, or flamegraph.folded.txt."
        ),
    ] = None,
    weight: Annotated[WeightName, Option(help="Host time in each stack, or device time that it launched.")] = WeightName.host,
    ranks: Annotated[str, Option(metavar="all|0,1,…", help="Ranks to write.")] = "all",
    folded: Annotated[bool, Option("--folded", help="Write folded text instead, as flamegraph.pl reads it.")] = False,
    workers: WorkersOption = None,
    fetch: FetchOption = False,
) -> None:
    """Write a flame graph of each rank and thread. Open it at https://www.speedscope.app, which uploads nothing.

    Exit code 1: a capture could not be read, or only in part; the others are written. 2: invalid request.
    """
    from bridge_profiling.report import flame_graph as files
    from bridge_profiling.settings.window import parse_ranks

    wanted = parse_ranks(ranks, ("all",))

    output = output or Path(files.FOLDED_NAME if folded else files.SPEEDSCOPE_NAME)
    files.check_replaceable(output, folded=folded)
    with open_runs(run, output=output, workers=workers, fetch=fetch) as (found,):
        from bridge_profiling.facts.types import sentences

        # Everything is computed before anything is printed: a progress bar would overwrite the answer.
        limitations = sentences(found.facts.caveats("flame_graph"))
        errors = found.facts.errors
        if not found.facts.every_info:
            finish([*errors, f"{run} holds no trace"])
        chosen = None if isinstance(wanted, str) else wanted
        count = files.write_flame_graph(found.facts, output, weight=weight.value, ranks=chosen, folded=folded)
    where = "" if folded else " Open it at https://www.speedscope.app"
    note(f"{output}: {count} stacks by {weight.value} time.{where}")
    finish(errors, limitations)
