"""`bridge-profiling monitor`: log what this machine's GPUs and processes do. The readings are `monitor`'s."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bridge_profiling.errors import ProfilingConfigError


def monitor(
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append samples and alerts as JSON lines; - is standard output.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Serve Prometheus at this port; 0: a free one.")] = None,
    bind: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to serve at.")] = "127.0.0.1",
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="Write scalars for TensorBoard.")] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two samples.")] = 1.0,
    gpus: Annotated[
        str | None, typer.Option(metavar="0,1", help="GPUs, as nvidia-smi numbers them, or their UUIDs. Default: all.")
    ] = None,
    pids: Annotated[
        str | None, typer.Option(metavar="PID,PID", help="Processes, with their children. Default: those on the GPUs.")
    ] = None,
    duration: Annotated[float | None, typer.Option(metavar="SECONDS", help="Stop after this. Default: at Ctrl-C.")] = None,
    grafana: Annotated[bool, typer.Option("--grafana", help="Print the dashboard for Grafana, and do nothing else.")] = False,
) -> None:
    """Log what GPUs and processes do until Ctrl-C: on the terminal, as JSON lines, for Prometheus or TensorBoard.

    What cannot be read is said to be unavailable, and why. Exit code 2: the request itself is wrong.
    """
    from importlib.resources import files

    if grafana:
        typer.echo(files("bridge_profiling.monitor").joinpath("grafana.json").read_text(encoding="utf-8"), nl=False)
        return
    if duration is not None and not 0 <= duration <= threading.TIMEOUT_MAX:
        raise typer.BadParameter(f"{duration} is no time to stop after", param_hint="--duration")
    processes = [_pid(pid) for pid in pids.split(",")] if pids is not None else None
    wanted = gpus.split(",") if gpus is not None else None
    # Loaded here, so that `--help` and other commands do not wait for it.
    from bridge_profiling.monitor import JsonLines, Monitor, Prometheus, TensorBoard
    from bridge_profiling.monitor.gpus import Gpus
    from bridge_profiling.monitor.lines import Lines
    from bridge_profiling.monitor.monitor import Sink

    sinks: list[Sink] = []
    try:
        if jsonl is not None:
            sinks.append(JsonLines(jsonl))
        if tensorboard is not None:
            sinks.append(TensorBoard(tensorboard))
    except OSError as error:
        raise ProfilingConfigError(
            f"{jsonl or tensorboard} cannot be written: {error.strerror}", instead="Name a place that can be written"
        ) from None
    if port is not None:
        server = Prometheus(port, bind)
        sinks.append(server)
        _say(f"serving http://{bind}:{server.port}/metrics")
    if not sinks:
        sinks.append(Lines(sys.stdout))
    found = Gpus(wanted)
    if found.unavailable is not None:
        _say(f"GPUs are unavailable: {found.unavailable}")
        if processes is None:
            processes = [os.getpid()]
            _say(f"watching process {processes[0]}, this one; name others with --pids")
    found.close()
    watching = Monitor(
        sinks=sinks, interval=interval, gpus=wanted, pids="gpu" if processes is None else processes, in_training=False
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: watching.ended.set())
    with watching:
        watching.ended.wait(duration)
    with suppress(OSError):
        sys.stdout.flush()
        return
    # Its reader has gone, and Python would complain of it at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _pid(said: str) -> int:
    if not said.strip().isdigit():
        raise typer.BadParameter(f"{said!r} is no process number", param_hint="--pids")
    return int(said)


def _say(line: str) -> None:
    # Standard output is for samples.
    print(line, file=sys.stderr, flush=True)
