"""`bridge-profiling bench`: measure a link or a data loader on its own.

Each benchmark runs in a separate process, which imports torch; under torchrun or srun it joins the other ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from bridge_profiling.bench import requests, results
from bridge_profiling.cli import common
from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.common.processes import OwnedProcess

#: Seconds that the measuring process has to end after a signal. Its ranks have 5 s to end before they are killed.
_ENDING_S = 10

bench = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure a link or a data loader on its own.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench.callback()
def _flags(json_schema: common.JsonSchemaOption = False) -> None:
    pass


@bench.command()
@common.with_flags
def collectives(
    nproc: Annotated[
        int | None, Option(help="Ranks to start without torchrun or srun. Default: one per device, else 2.")
    ] = None,
    operations: Annotated[
        str, Option(metavar="NAMES", help="Some of all-reduce,all-gather,reduce-scatter,all-to-all,send,send-recv.")
    ] = "",
    sizes: Annotated[str, Option(metavar="SIZES", help="Message sizes: from:to:factor, or 1KiB,1.5MiB.")] = "1KiB:256MiB:4x",
    dtype: Annotated[str, Option(help=f"Element type: {', '.join(requests.DTYPES)}.")] = "float32",
    backend: Annotated[str | None, Option(help="nccl or gloo. Default: nccl on CUDA devices.")] = None,
    seconds: Annotated[float, Option(help="Approximate time for each operation and size.")] = 1.0,
    **result: Any,
) -> None:
    """Measure communication by operation and size: time, algorithm bandwidth, bus bandwidth.

    Exit code 1: it failed, or received wrong data. 2: invalid request. 4: this machine lacks the required hardware.
    """
    selected = requests.operations_from(operations)
    request = requests.CollectivesRequest(selected, requests.sizes_from(sizes), dtype, backend, nproc, seconds)
    _run(request, **result)


@bench.command("data-loader")
@common.with_flags
def data_loader(
    loader: Annotated[str, Option(metavar="MODULE:FACTORY", help="Your function that returns a DataLoader or a dataset.")],
    workers: Annotated[str, Option(metavar="NUMBERS", help="Numbers of workers to try.")] = "0,1,2,4",
    pin_memory: Annotated[bool | None, Option(help="Measure only with, or only without, pinning. Default: both.")] = None,
    prefetch: Annotated[str, Option(metavar="NUMBERS", help="Batches that each worker prefetches, to try.")] = "2",
    batch_size: Annotated[int, Option(help="Samples per batch, if the factory returns a dataset.")] = 1,
    seconds: Annotated[float, Option(help="Approximate time for each combination.")] = 5.0,
    **result: Any,
) -> None:
    """Measure a data loader over workers, pinning and prefetching, and recommend a setting.

    Exit code 1: the loader failed. 2: invalid request.
    """
    counts, ahead = requests.integers_from(workers, "--workers"), requests.integers_from(prefetch, "--prefetch")
    pinning = (False, True) if pin_memory is None else (pin_memory,)
    _run(requests.DataLoaderRequest(loader, counts, pinning, ahead, batch_size, seconds), **result)


def _run(request: requests.Request, output: Path | None, *, as_json: bool) -> None:
    _check_output(output)
    result, code = _measured(request)
    if result is not None:
        # Printed before it is written, so that a full disk does not lose the result of minutes.
        if as_json:
            typer.echo(json.dumps(result, indent=1))
        else:
            from bridge_profiling.report.comparison_view import recommendation, result_table
            from bridge_profiling.report.terminal import print_tables

            print_tables([result_table(result)], result["limitations"], common.console())
            if advice := recommendation(result):
                common.echo(advice)
        if output is not None:
            results.add(output, result)
            if not as_json:
                common.note(f"result: {output}")
    if code:
        raise typer.Exit(code)


def _check_output(output: Path | None) -> None:
    """Refuse a file that cannot hold a result, before minutes are spent on one."""
    common.check_output(output)
    if output is None:
        return
    results.check_addable(output)
    # The file is replaced by a new one.
    if not os.access(output.parent, os.W_OK):
        raise ProfilingConfigError(
            f"{output} cannot be written", why="its directory is read-only for you", instead="Use another file with -o"
        )


def _measured(request: requests.Request) -> tuple[dict[str, Any] | None, int]:
    """The result, which only rank 0 has, and the exit code; error messages are on standard error."""
    with tempfile.TemporaryDirectory(prefix="bridge_profiling-bench-") as folder:
        path = Path(folder) / "result.json"
        arguments = [request.kind, requests.to_text(request), str(path)]
        command = [sys.executable, "-m", "bridge_profiling.bench", *arguments]
        # Standard output is reserved for the result; NCCL and the user's code print to standard error.
        # The child ends its ranks first.
        code, received = common.wait_for(
            lambda: OwnedProcess(command, stdout=sys.stderr.fileno(), env=_environment()),
            dict.fromkeys(common.ENDING, signal.SIGTERM),
            insist=_end,
        )
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if received is not None:
        return result, 128 + received
    if code < 0:
        common.print_error(f"the measuring process was killed by {signal.Signals(-code).name}")
    return result, code if code >= 0 else 128 - code


def _end(child: subprocess.Popen[bytes], ended: threading.Event, number: int) -> None:
    """Repeat a signal until the measuring process has ended, and kill it if it does not; it then says where it is.

    Python acts on a signal only between two instructions: one that arrives just before a blocking call waits for its end,
    and the user's code can swallow the exception, as Python does in a finalizer.
    """
    for _ in range(_ENDING_S):
        if ended.wait(1):
            return
        child.send_signal(number)
    common.print_error(f"the measuring process was killed: it did not end within {_ENDING_S} s of the signal, and was at:")
    child.send_signal(signal.SIGUSR1)
    if not ended.wait(1):
        child.kill()


def _environment() -> dict[str, str]:
    """Variables of the measuring process, which must find this package and the modules in the working directory."""
    package = str(Path(__file__).parents[2])
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", ""), package]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
