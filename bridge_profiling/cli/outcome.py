"""How a command ends: its exit code, and one line of standard error for what ended it."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import Any

import typer

from bridge_profiling.cli.output import FAILURE, print_error
from bridge_profiling.cli.signals import interruptible
from bridge_profiling.common.errors import ProfilingConfigError, TraceError, install_command, shortage

#: Exit code of a wrong request. A command that a signal ends has 128 and the signal's number, as in a shell.
USAGE = 2

#: Errors of a disk: a request that can be carried out elsewhere has failed.
_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: Typer's or Click's, depending on Typer's release.
_UsageError: type[Any]
_ClickException: type[Any]
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]


def exit_code(app: typer.Typer) -> int:
    """Run an app's command, and print what ended it on one line of standard error; a user who types Ctrl-C knows it."""
    with interruptible() as received:
        try:
            code = _exit_code(app)
            _flush_output()
            is_cut_off = code == 128 + signal.SIGINT  # what Typer makes of `Interrupted`; older releases raise
        except (KeyboardInterrupt, typer.Abort):
            code, is_cut_off = 128 + signal.SIGINT, True
        except BrokenPipeError:  # `| head` has seen enough
            _discard_output()
            code, is_cut_off = FAILURE, False
        except BaseException:
            # Also what a library makes of the signal, as DuckDB does.
            if not received:
                raise
            code, is_cut_off = FAILURE, True
        if is_cut_off and received and received[0] != signal.SIGINT:
            with suppress(OSError):  # the terminal may be gone
                print_error(f"ended by {signal.Signals(received[0]).name}")
    return 128 + received[0] if received else code


def _flush_output() -> None:
    """Write the rest of standard output. A full disk loses it, which the exit code says already."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Write what is left for standard output nowhere."""
    with suppress(OSError, ValueError):  # it has no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(app: typer.Typer) -> int:
    try:
        # The number of a closed standard stream would be that of the next file to be opened, and children write to it.
        while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(unused, True)
        os.close(unused)
        sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
        if any(option.startswith("error") for option in sys.warnoptions):
            # What a library deprecates, NeMo-Run's at least, ends no command; Python shows it instead.
            warnings.simplefilter("default")
        if sys.stdout is None:
            raise OSError("standard output is closed. Redirect it, to /dev/null for instance")
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Captures hold names in any script, and our sentences dashes and arrows: what an encoding lacks becomes "?".
            sys.stdout.reconfigure(errors="replace")
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except ProfilingConfigError as error:
        print_error(str(error))
        return FAILURE if getattr(error.__cause__, "errno", None) in _DISK_FAILURES else USAGE
    except _ClickException as error:
        # Some of Typer's releases call a value that is none of an option's a "Value error".
        message = error.format_message().strip().replace("Value error, ", "")
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(message)
        elif message:
            context = getattr(error, "ctx", None)
            end = "" if message[-1] in ".?" else "."
            help_command = "" if context is None else f" Type {context.command_path} --help."
            print_error(f"{message[0].lower()}{message[1:]}{end}{help_command}")
        return USAGE if isinstance(error, _UsageError) else FAILURE
    except BrokenPipeError:
        raise
    except (TraceError, OSError) as error:
        filename = getattr(error, "filename", None)
        reason = getattr(error, "strerror", None) or str(error)
        print_error(shortage(error) or (f"{filename}: {reason}" if filename else reason))
        return FAILURE
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "bridge_profiling":
            raise
        print_error(f"this command needs {error.name}, which is not installed. Type {install_command('analysis')}.")
        return USAGE
    except Exception as error:
        if (short := shortage(error)) is None:
            raise
        print_error(short)
        return FAILURE
