"""Options of several commands, and their checks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class EngineName(StrEnum):
    """Workers that read captures."""

    process = "process"
    ray = "ray"


RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Captures from any tool: a directory, a file, or a NeMo-Run experiment.")
]
ParquetOption = Annotated[
    Path | None,
    typer.Option(metavar="DIRECTORY", help="Keep the ranks' tables here as Parquet. RUN may be such a directory."),
]
EngineOption = Annotated[EngineName, typer.Option(help="Read captures in processes on this machine or on a Ray cluster.")]
RayAddressOption = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Address of the Ray cluster. Default: $RAY_ADDRESS, or a new cluster.")
]
BenchOption = Annotated[
    Path | None,
    typer.Option(
        "--bench",
        metavar="FILE",
        help="Compare with results of `bridge-profiling bench`. Default: bench.json in RUN, if it exists.",
    ),
]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Number of captures to read at once. Default: one per CPU.")]


def check_output(output: Path | None) -> None:
    """Refuse an output file that cannot be written, before any capture is read.

    Args:
        output: value of `-o`; None if it is not given.
    """
    if output is not None and (not output.parent.is_dir() or output.is_dir()):
        raise typer.BadParameter(f"{output} cannot be written: type a file in an existing directory", param_hint="-o")


def check_parquet(parquet: Path | None) -> None:
    """Refuse a file where a directory of tables is expected.

    Args:
        parquet: value of `--parquet`; None if it is not given.
    """
    if parquet is not None and parquet.exists() and not parquet.is_dir():
        raise typer.BadParameter(f"{parquet} is a file", param_hint="--parquet")
