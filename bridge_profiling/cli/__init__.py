"""The command `bridge-profiling`: a command imports its code when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
    from typer import Option

    from bridge_profiling.cli import common
    from bridge_profiling.cli.bench import bench
    from bridge_profiling.cli.compare import compare
    from bridge_profiling.cli.doctor import doctor
    from bridge_profiling.cli.export import flamegraph, merge
    from bridge_profiling.cli.monitor import monitor
    from bridge_profiling.cli.run import run
    from bridge_profiling.cli.show import analyze, memory, report
    from bridge_profiling.cli.trigger import trigger
except ModuleNotFoundError as error:  # installed without dependencies, as in a container
    if error.name is None or error.name.split(".")[0] == "bridge_profiling":
        raise
    sys.exit(f"error: the command line needs {error.name}. Type pip install omegaconf rich typer; none of them installs torch.")

from bridge_profiling import __version__

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (report, run, analyze, merge, flamegraph, compare, memory, trigger, doctor, monitor):
    # Arguments after `run`'s script belong to the script.
    app.command(context_settings={"allow_interspersed_args": _command is not run})(common.with_flags(_command))
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bridge-profiling {__version__}")
        raise typer.Exit


@app.callback()
@common.with_flags
def _flags(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Profile a training with Megatron Core under NeMo-Run, or any PyTorch script, and show where its time goes."""


def main() -> None:
    """Run a command. Exit code 2 for a request that cannot be carried out, 1 for a failure."""
    sys.exit(common.exit_code(app))
