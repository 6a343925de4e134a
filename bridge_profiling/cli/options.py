"""What several commands take, typed and checked alike."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class EngineName(StrEnum):
    """Where captures are read."""

    process = "process"
    ray = "ray"


RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Captures of any origin: a directory, a file, or a NeMo-Run experiment.")
]
ParquetOption = Annotated[
    Path | None,
    typer.Option(metavar="DIRECTORY", help="Keep the ranks' tables here, as Parquet. RUN may be such a directory."),
]
EngineOption = Annotated[EngineName, typer.Option(help="Read captures in processes of this machine, or on a Ray cluster.")]
RayAddressOption = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="The Ray cluster's. Default: $RAY_ADDRESS, else one is started.")
]
BenchOption = Annotated[
    Path | None,
    typer.Option(
        "--bench",
        metavar="FILE",
        help="Compare with results of `bridge-profiling bench`. Default: bench.json in RUN, if it is there.",
    ),
]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Captures read at a time. Default: one per CPU.")]


def check_output(output: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is read for it.

    Args:
        output: what `-o` names; None names nothing.
    """
    if output is not None and (not output.parent.is_dir() or output.is_dir()):
        raise typer.BadParameter(f"{output} cannot be written: name a file in a directory that is there", param_hint="-o")


def check_parquet(parquet: Path | None) -> None:
    """Refuse a file where a directory of tables is meant.

    Args:
        parquet: what `--parquet` names; None names nothing.
    """
    if parquet is not None and parquet.exists() and not parquet.is_dir():
        raise typer.BadParameter(f"{parquet} is a file", param_hint="--parquet")
