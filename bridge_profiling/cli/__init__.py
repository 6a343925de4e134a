"""The command `bridge-profiling`: a command imports the code that it needs when it runs."""

from __future__ import annotations

import atexit
import signal
import sys
from typing import Annotated

try:
    import typer
    from typer import Option
except ModuleNotFoundError as error:  # installed without dependencies, as in a container
    sys.exit(f"error: the command line needs {error.name}. Type pip install omegaconf rich typer; none of them installs torch.")
except KeyboardInterrupt:  # before `main` could be called
    sys.exit(128 + signal.SIGINT)

from bridge_profiling import __version__
from bridge_profiling.cli import bench, compare, doctor, export, monitor, run, show, trigger
from bridge_profiling.cli.options import with_flags
from bridge_profiling.cli.outcome import exit_code

_HELP = {"help_option_names": ["-h", "--help"]}

# Boxes by Rich would double the time of `--help`.
app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_HELP)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bridge-profiling {__version__}")
        raise typer.Exit


@app.callback()
@with_flags
def _flags(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Profile a training with Megatron Core under NeMo-Run, or any PyTorch script, and show where its time goes."""


_COMMANDS = (
    *(show.report, run.run, show.analyze, export.merge, export.flamegraph, compare.compare, show.memory, trigger.trigger),
    *(doctor.doctor, monitor.monitor),
)
for _command in _COMMANDS:
    # The list of commands shows the first paragraph whole. Arguments after `run`'s script belong to the script.
    _first, _settings = str(_command.__doc__).partition("\n\n")[0], _HELP | {"allow_interspersed_args": _command is not run.run}
    app.command(short_help=" ".join(_first.split()), context_settings=_settings)(with_flags(_command))
app.add_typer(bench.bench, name="bench")


def main() -> None:
    """Run a command. Exit code 2 for a request that cannot be carried out, 1 for a failure, 128 and its number for a signal."""
    code = exit_code(app)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is left to clean up: while the interpreter ends, Ctrl-C would only print a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
