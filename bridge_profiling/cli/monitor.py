"""`bridge-profiling monitor`: log the readings of this machine's GPUs and processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from bridge_profiling.cli.output import FAILURE, note
from bridge_profiling.cli.signals import ENDING
from bridge_profiling.common.errors import ProfilingConfigError


def monitor(
    jsonl: Annotated[Path | None, Option(metavar="FILE", help="Append JSON lines; default without --port: -")] = None,
    port: Annotated[int | None, Option(min=0, max=65535, help="Serve Prometheus here; 0: any free port.")] = None,
    bind: Annotated[str, Option(metavar="ADDRESS", help="Address to serve at.")] = "127.0.0.1",
    interval: Annotated[float, Option(metavar="SECONDS", help="Time between two samples.")] = 1.0,
    gpus: Annotated[str | None, Option(metavar="0,1", help="GPUs by nvidia-smi's numbers, or UUIDs. Default: all.")] = None,
    pids: Annotated[str | None, Option(metavar="PID,PID", help="Processes. Default: those on the GPUs.")] = None,
    duration: Annotated[float | None, Option(metavar="SECONDS", help="Stop after this time. Default: at Ctrl-C.")] = None,
    grafana: Annotated[bool, Option("--grafana", help="Print a Grafana dashboard and exit.")] = False,
    alert_rules: Annotated[bool, Option("--alert-rules", help="Print alert rules for Prometheus and exit.")] = False,
) -> None:
    """Log GPU and process readings until Ctrl-C: as JSON lines, or for Prometheus.

    A metric that cannot be read is reported as unavailable, with the reason. Exit code 1: an output did not
    take every sample, as on a full disk. 2: invalid request.
    """
    from importlib.resources import files

    if grafana or alert_rules:
        name = "grafana.json" if grafana else "alert_rules.yml"
        typer.echo(files("bridge_profiling.monitor").joinpath(name).read_text(encoding="utf-8"), nl=False)
        return
    if duration is not None and not 0 <= duration <= threading.TIMEOUT_MAX:
        raise ProfilingConfigError(
            f"--duration {duration} is not a valid number of seconds", instead="Type for example --duration 60"
        )
    if not 0 < interval <= threading.TIMEOUT_MAX:
        raise ProfilingConfigError(
            f"--interval {interval} is not a time between two samples", instead="Type for example --interval 1"
        )
    processes = [_pid(pid) for pid in pids.split(",")] if pids is not None else None
    wanted = gpus.split(",") if gpus is not None else None
    # Imported here: `--help` and other commands start faster without it.
    from bridge_profiling.monitor import JsonLines, Monitor, Prometheus
    from bridge_profiling.monitor.gpus import Gpus
    from bridge_profiling.monitor.outputs import Sink

    sinks: list[Sink] = []
    if jsonl is not None or port is None:
        try:
            sinks.append(JsonLines(jsonl or "-"))
        except OSError as error:
            raise ProfilingConfigError(
                f"{jsonl} cannot be written: {error.strerror}", instead="Choose a writable path"
            ) from None
    if port is not None:
        server = Prometheus(port, bind)
        sinks.append(server)
        # Standard output is reserved for samples.
        note(f"serving http://{bind}:{server.port}/metrics", err=True)
    found = Gpus(wanted)
    if found.unavailable is not None:
        note(f"GPUs are unavailable: {found.unavailable}", err=True)
        if processes is None:
            processes = [os.getpid()]
            note(f"watching this process ({processes[0]}); select others with --pids", err=True)
    found.close()
    watching = Monitor(
        sinks=sinks, interval=interval, gpus=wanted, pids="gpu" if processes is None else processes, in_training=False
    )
    for number in ENDING:
        signal.signal(number, lambda *_: watching.ended.set())
    with watching:
        watching.ended.wait(duration)
    try:
        sys.stdout.flush()
    except OSError:
        # The reader has closed the pipe; without this Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if watching.failed_sinks:
        raise typer.Exit(FAILURE)


def _pid(text: str) -> int:
    if not text.strip().isdigit():
        raise ProfilingConfigError(f"--pids {text!r} is not a process id", instead="Type for example --pids 4711,4712")
    return int(text)
