"""The command `bridge-profiling`: a command imports its code when it runs."""

from __future__ import annotations

import atexit
import importlib
import signal
import sys
from typing import Annotated, Any

try:
    import typer
    from typer import Option
    from typer.core import TyperCommand, TyperGroup

    from bridge_profiling.cli import common
except ModuleNotFoundError as error:  # installed without dependencies, as in a container
    if error.name is None or error.name.split(".")[0] == "bridge_profiling":
        raise
    sys.exit(f"error: the command line needs {error.name}. Type pip install omegaconf rich typer; none of them installs torch.")
except KeyboardInterrupt:  # before `main` could be called
    sys.exit(128 + signal.SIGINT)

from bridge_profiling import __version__

#: Each command's module and the first sentence of its help, so that `--help` imports none of them.
_COMMANDS = {
    "report": (
        "show",
        "Show where an iteration's time goes, which ranks are responsible, and what to change, here and on one page.",
    ),
    "run": (
        "run",
        "Run a PyTorch script unchanged, and profile some of its iterations: each ends with a step of its optimizer.",
    ),
    "analyze": ("show", "Show where each rank's time goes: device, iterations, kernels, communication, memory."),
    "merge": ("export", "Merge the traces of all ranks into one, on one clock. Open it at https://ui.perfetto.dev."),
    "flamegraph": (
        "export",
        "Write a flame graph of each rank and thread. Open it at https://www.speedscope.app, which uploads nothing.",
    ),
    "compare": (
        "compare",
        "Show what changed from BASE to OTHER: whether they are comparable, the difference, its confidence, and where it is.",
    ),
    "memory": (
        "show",
        "Show how much device memory is in use at the peak, what uses it, and whether it grows; for two runs, the difference.",
    ),
    "trigger": ("trigger", "Profile a job that is already running, without a restart."),
    "doctor": ("doctor", "Find what would go wrong with a profile, before the job waits in a queue."),
    "monitor": (
        "monitor",
        "Log GPU and process readings until Ctrl-C: as JSON lines, or for Prometheus.",
    ),
    "bench": ("bench", "Measure a link or a data loader on its own."),
}


class _Commands(TyperGroup):
    """The commands: what `--help` lists of each until one is run, whose module is imported then."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, short_help=text) for name, (_, text) in _COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _build(str(command.name)), rest


def _build(name: str) -> Any:
    """The command, or the group of commands, with its options."""
    made = getattr(importlib.import_module(f"bridge_profiling.cli.{_COMMANDS[name][0]}"), name)
    if not isinstance(made, typer.Typer):
        # Arguments after `run`'s script belong to the script.
        settings = {"help_option_names": ["-h", "--help"], "allow_interspersed_args": name != "run"}
        made, command = typer.Typer(add_completion=False, rich_markup_mode=None), made
        made.command(name, context_settings=settings)(common.with_flags(command))
    return typer.main.get_command(made)


app = typer.Typer(
    cls=_Commands,
    # Boxes by Rich would double the time of `--help`.
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """Run a command. Exit code 2 for a request that cannot be carried out, 1 for a failure, 128 and its number for a signal."""
    code = common.exit_code(app)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is left to clean up: while the interpreter ends, Ctrl-C would only print a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
