"""`bridge-profiling bench`: measure what a link, a copy, a data loader or a step gives alone. `bench` does it, elsewhere.

Each benchmark runs in a process of its own, which imports torch; under torchrun or srun it joins the other ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bridge_profiling.bench import document, requests
from bridge_profiling.cli.options import check_output

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure what a link, a copy, a data loader or a step gives alone.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Keep the result here. Results of other kinds that the file holds stay in it."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@bench.command()
def collectives(
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start here. Default: one per CUDA device, else 2. Not under torchrun or srun.")
    ] = None,
    operations: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Of all-reduce,all-gather,reduce-scatter,all-to-all,send,send-recv. Default: all."),
    ] = "",
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="SIZES", help="Of messages, from:to:factor or a list: 1KiB,1.5MiB.")
    ] = "1KiB:256MiB:4x",
    dtype: Annotated[str, typer.Option(help=f"Type of their elements: {', '.join(requests.DTYPES)}.")] = "float32",
    backend: Annotated[
        str | None, typer.Option(help="nccl or gloo. Default: nccl where there is a CUDA device, else gloo.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for each operation and size, about.")] = 1.0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure communication by operation and size: time, algorithm bandwidth, bus bandwidth.

    Exit code 1: it failed, or something arrived wrong. 2: the request itself is wrong. 4: this machine has not what it takes.
    """
    asked = requests.operations_from(operations)
    _run(
        requests.CollectivesRequest(asked, requests.sizes_from(sizes), dtype, backend, nproc, seconds), output, as_json=as_json
    )


@bench.command()
def copies(
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="SIZES", help="Of copies, from:to:factor or a list: 4KiB,1.5MiB.")
    ] = "4KiB:256MiB:4x",
    seconds: Annotated[float, typer.Option(help="Time for each kind of copy and size, about.")] = 0.5,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure copies between host and device: both ways, from pinned and from pageable memory.

    Exit code 1: something arrived wrong. 2: the request itself is wrong. 4: no CUDA device.
    """
    _run(requests.CopiesRequest(requests.sizes_from(sizes), seconds), output, as_json=as_json)


@bench.command("data-loader")
def data_loader(
    loader: Annotated[
        str, typer.Option(metavar="MODULE:FACTORY", help="A function that gives a DataLoader or a dataset, from your own code.")
    ],
    workers: Annotated[str, typer.Option(metavar="NUMBERS", help="Numbers of workers to try.")] = "0,1,2,4",
    pin_memory: Annotated[bool | None, typer.Option(help="Measure with, or without, pinning alone. Default: both.")] = None,
    prefetch: Annotated[str, typer.Option(metavar="NUMBERS", help="Batches each worker makes ahead, to try.")] = "2",
    batch_size: Annotated[int, typer.Option(help="Samples of a batch, where the factory gives a dataset.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time for each combination, about.")] = 5.0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a data loader alone, over workers, pinning and prefetching, and say which to take.

    Exit code 1: the loader failed. 2: the request itself is wrong.
    """
    _run(
        requests.DataLoaderRequest(
            loader,
            requests.integers_from(workers, "--workers"),
            (False, True) if pin_memory is None else (pin_memory,),
            requests.integers_from(prefetch, "--prefetch"),
            batch_size,
            seconds,
        ),
        output,
        as_json=as_json,
    )


@bench.command()
def step(
    step: Annotated[
        str, typer.Option(metavar="MODULE:FACTORY", help="A function of your own code that gives a function: one iteration.")
    ],
    warmup: Annotated[int, typer.Option(help="Iterations before the first that counts.")] = 5,
    iterations: Annotated[int, typer.Option(help="Iterations that count.")] = 30,
    samples: Annotated[int | None, typer.Option(help="Samples that one iteration trains on, for samples/s.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for the iterations that count, at the most, about.")] = 60.0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a step's throughput, with warm-up and bounds of the median.

    Exit code 1: the step failed. 2: the request itself is wrong.
    """
    _run(requests.StepRequest(step, warmup, iterations, seconds, samples), output, as_json=as_json)


def _run(request: requests.Request, output: Path | None, *, as_json: bool) -> None:
    _check_output(output)
    result, code = _measured(request)
    if result is not None:
        # Before it is written: what took minutes is not lost to a disk that has filled meanwhile.
        if as_json:
            typer.echo(json.dumps(result, indent=1))
        else:
            from rich.console import Console

            from bridge_profiling.report.bench_tables import print_result

            print_result(result, Console(highlight=False))
        if output is not None:
            document.add(output, result)
            if not as_json:
                typer.echo(f"result: {output}")
    if code:
        raise typer.Exit(code)


def _check_output(output: Path | None) -> None:
    """Refuse a file that cannot take a result, before minutes are spent on one."""
    check_output(output)
    if output is None:
        return
    if output.exists():
        document.check_addable(output)
    # The new file is made beside the old one.
    if not os.access(output.parent, os.W_OK):
        raise typer.BadParameter(f"{output} cannot be written: its directory is read-only for you", param_hint="-o")


def _measured(request: requests.Request) -> tuple[dict[str, Any] | None, int]:
    """The result, which rank 0 alone has, and the exit code; what went wrong is on standard error by then."""
    with tempfile.TemporaryDirectory(prefix="bridge_profiling-bench-") as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "bridge_profiling.bench",
            requests.kind_of(request),
            requests.to_text(request),
            str(path),
        ]
        # Standard output is the answer's; what NCCL and the user's code print goes beside it.
        code = _wait(subprocess.Popen(command, stdout=sys.stderr.fileno(), env=_environment()))
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return result, code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The child's exit code, as a shell would tell it. What is to end this process ends the child, and the ranks it started."""
    told: list[int] = []

    def end(number: int, frame: object) -> None:
        told.append(number)
        child.terminate()

    # What a background job or nohup has switched off stays so.
    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        return 128 + told[0]
    if code < 0:
        print(f"error: the measuring process was killed by {signal.Signals(-code).name}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _environment() -> dict[str, str]:
    """The variables of the measuring process: it finds this package and the user's modules wherever Python was started."""
    package = str(Path(__file__).parents[2])
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", ""), package]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
