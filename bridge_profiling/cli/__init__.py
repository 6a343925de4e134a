"""The command `bridge-profiling`: one module per command, which imports its code when it runs."""

from __future__ import annotations

import sys

try:
    import typer

    from bridge_profiling.cli.analyze import analyze
    from bridge_profiling.cli.bench import bench
    from bridge_profiling.cli.compare import compare
    from bridge_profiling.cli.doctor import doctor
    from bridge_profiling.cli.memory import memory
    from bridge_profiling.cli.merge import merge
    from bridge_profiling.cli.monitor import monitor
    from bridge_profiling.cli.report import report
    from bridge_profiling.cli.run import run
    from bridge_profiling.cli.trigger import trigger
except ModuleNotFoundError as error:  # installed without dependencies, as in a container
    if error.name is None or error.name.split(".")[0] == "bridge_profiling":
        raise
    sys.exit(f"error: the command line needs {error.name}. Type pip install omegaconf rich typer; none of them installs torch.")

from bridge_profiling.errors import ProfilingConfigError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(report)
# Arguments after the script belong to the script.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(analyze)
app.command()(merge)
app.command()(compare)
app.command()(memory)
app.command()(trigger)
app.command()(doctor)
app.command()(monitor)
app.add_typer(bench, name="bench")


@app.callback()
def _commands() -> None:
    """Profile a training with Megatron Core under NeMo-Run, or any PyTorch script, and show where its time goes."""


def main() -> None:
    """Run a command; exit code 2 for a request that cannot be carried out."""
    try:
        app()
    except ProfilingConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
