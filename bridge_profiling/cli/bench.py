"""`bridge-profiling bench`: measure a link or a data loader on its own.

Each benchmark runs in a separate process, which imports torch; under torchrun or srun it joins the other ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from bridge_profiling.cli.options import JsonSchemaOption, with_flags
from bridge_profiling.cli.output import check_output, console, echo, note, print_error
from bridge_profiling.cli.signals import ENDING, wait_for
from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean, require
from bridge_profiling.common.processes import OwnedProcess

DtypeName = StrEnum("DtypeName", ["float32", "bfloat16", "float16"])
BackendName = StrEnum("BackendName", ["nccl", "gloo"])

_OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "send-recv")

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

#: Larger messages are typing errors.
_LARGEST_BYTES = 1 << 36

_SIZES_EXAMPLE = "Type --sizes 1KiB:256MiB:4x, or --sizes 1KiB,1MiB,64MiB"

#: Seconds that the measuring process has to end after a signal. torch.distributed.run kills ranks that ignore one after 30 s.
_ENDING_S = 40.0

bench = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure a link or a data loader on its own.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench.callback()
def _flags(json_schema: JsonSchemaOption = False) -> None:
    pass


@bench.command()
@with_flags
def collectives(
    nproc: Annotated[
        int | None, Option(min=2, help="Ranks to start without torchrun or srun. Default: one per device, else 2.")
    ] = None,
    operations: Annotated[str, Option(metavar="NAMES", help=f"Some of {','.join(_OPERATIONS)}.")] = "",
    sizes: Annotated[str, Option(metavar="SIZES", help="Message sizes: from:to:factor, or 1KiB,1.5MiB.")] = "1KiB:256MiB:4x",
    dtype: Annotated[DtypeName, Option(help="Element type.")] = DtypeName.float32,
    backend: Annotated[BackendName | None, Option(help="Default: nccl on CUDA devices.")] = None,
    seconds: Annotated[float, Option(help="Approximate time for each operation and size.")] = 1.0,
    **result: Any,
) -> None:
    """Measure communication by operation and size: time, algorithm bandwidth, bus bandwidth.

    Exit code 1: it failed, or received wrong data. 2: invalid request. 4: this machine lacks the required hardware.
    """
    names = dict.fromkeys(part.strip().replace("_", "-") for part in operations.split(",") if part.strip()) or _OPERATIONS
    for name in names:
        require(name in _OPERATIONS, f"unknown operation {name!r}", instead=did_you_mean(name, _OPERATIONS))
    request = {"operations": [name.replace("-", "_") for name in names], "sizes": sizes_from(sizes), "dtype": dtype}
    _run("collectives", {**request, "backend": backend, "nproc": nproc, "seconds": _positive(seconds)}, **result)


@bench.command("data-loader")
@with_flags
def data_loader(
    loader: Annotated[str, Option(metavar="MODULE:FACTORY", help="Your function that returns a DataLoader or a dataset.")],
    workers: Annotated[str, Option(metavar="NUMBERS", help="Numbers of workers to try.")] = "0,1,2,4",
    pin_memory: Annotated[bool | None, Option(help="Measure only with, or only without, pinning. Default: both.")] = None,
    prefetch: Annotated[str, Option(metavar="NUMBERS", help="Batches that each worker prefetches, to try.")] = "2",
    batch_size: Annotated[int, Option(min=1, help="Samples per batch, if the factory returns a dataset.")] = 1,
    seconds: Annotated[float, Option(help="Approximate time for each combination.")] = 5.0,
    **result: Any,
) -> None:
    """Measure a data loader over workers, pinning and prefetching, and recommend a setting.

    Exit code 1: the loader failed. 2: invalid request.
    """
    require(
        re.fullmatch(r"[\w.]+:\w+", loader),
        f"--loader {loader!r} does not name a factory",
        instead="Type --loader module:factory, as in --loader train:make",
    )
    request = {
        "loader": loader,
        "workers": _integers(workers, "--workers", 0),
        "pin_memory": (False, True) if pin_memory is None else (pin_memory,),
        "prefetch": _integers(prefetch, "--prefetch", 1),
        "batch_size": batch_size,
        "seconds": _positive(seconds),
    }
    _run("data_loader", request, **result)


def sizes_from(text: str) -> list[int]:
    """Sizes in bytes from `1KiB:256MiB:4x` (from, to, factor) or `1KiB,64KiB,1MiB`."""
    first, *rest = text.split(":")
    if not rest:
        return sorted(set(map(_bytes, text.split(","))))
    size, last, factor = _bytes(first), _bytes(rest[0]), rest[1].strip().rstrip("xX") if rest[1:] else "2"
    valid = len(rest) <= 2 and re.fullmatch(r"\d+(\.\d+)?", factor) and float(factor) > 1 and size <= last
    require(valid, f"{text!r} is not a range of growing sizes", instead=_SIZES_EXAMPLE)
    steps = range(1 + int(math.log(last / size, float(factor)) + 1e-9))
    return sorted({round(size * float(factor) ** step) for step in steps})


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text)
    size = round(float(found[1]) * _UNITS.get(found[2].upper(), 0)) if found else 0
    limit = f"{_LARGEST_BYTES >> 30} GiB"
    require(0 < size <= _LARGEST_BYTES, f"{text!r} is not a size between 1 byte and {limit}", instead=_SIZES_EXAMPLE)
    return size


def _integers(text: str, option: str, least: int) -> list[int]:
    """Numbers from `0,2,4`."""
    parts = [part.strip() for part in text.split(",")]
    valid = all(part.isdecimal() and int(part) >= least for part in parts)
    require(valid, f"{option} {text!r} is not a list of numbers of {least} or more", instead=f"Type {option} 1,2,4")
    return sorted(set(map(int, parts)))


def _positive(seconds: float) -> float:
    require(seconds > 0, f"--seconds {seconds:g} is not a positive time", instead="Type --seconds 1")
    return seconds


def _run(kind: str, request: dict[str, Any], output: Path | None, *, as_json: bool) -> None:
    _check_output(output)
    result, code = _measured(kind, request)
    if result is not None:
        # Printed before it is written, so that a full disk does not lose the result of minutes.
        if as_json:
            typer.echo(json.dumps(result, indent=1))
        else:
            from bridge_profiling.report.comparison_view import recommendation, result_table
            from bridge_profiling.report.terminal import print_tables

            print_tables([result_table(result)], result["limitations"], console())
            if advice := recommendation(result):
                echo(advice)
        if output is not None:
            from bridge_profiling.bench import results

            results.add(output, result)
            if not as_json:
                note(f"result: {output}")
    if code:
        raise typer.Exit(code)


def _check_output(output: Path | None) -> None:
    """Refuse a file that cannot hold a result, before minutes are spent on one."""
    check_output(output)
    if output is None:
        return
    from bridge_profiling.bench import results

    results.check_addable(output)
    # The file is replaced by a new one.
    if not os.access(output.parent, os.W_OK):
        raise ProfilingConfigError(
            f"{output} cannot be written", why="its directory is read-only for you", instead="Use another file with -o"
        )


def _measured(kind: str, request: dict[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """The result, which only rank 0 has, and the exit code; error messages are on standard error."""
    with tempfile.TemporaryDirectory(prefix="bridge_profiling-bench-") as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bridge_profiling.bench", kind, json.dumps(request), str(path)]
        # The measuring process must find this package and the modules in the working directory.
        paths = [os.getcwd(), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Standard output is reserved for the result; NCCL and the user's code print to standard error.
        code, received = wait_for(
            lambda: OwnedProcess(command, stdout=sys.stderr.fileno(), env=environment),
            dict.fromkeys(ENDING, signal.SIGTERM),
            kill_after_s=_ENDING_S,
        )
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if received is not None:
        return result, 128 + received
    if code < 0:
        print_error(f"the measuring process was killed by {signal.Signals(-code).name}")
    return result, code if code >= 0 else 128 - code
