"""The options of `nsys profile`: our defaults, merged by option name with the user's, checked before they are used.

The submit host checks them, the rank puts them on its command line. Never runs nsys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge_profiling.errors import ProfilingConfigError

#: APIs that are traced unless the user names others.
DEFAULT_TRACE = ("nvtx", "cuda")

#: What a rank that starts its own nsys gives it, with the reasons; the user's options win over each.
DEFAULT_OPTIONS = (
    "--sample=none",  # CPU sampling interrupts the launching thread, and needs a permission few clusters give
    "--cpuctxsw=none",  # inside the window: 1.13 x the step without context switches, 1.23 x with them
    "--cuda-graph-trace=node",  # as a whole, a graph would hide its kernels, and with them what to change
    "--cuda-event-trace=false",  # NCCL and overlap record events by the thousand; versions without it never trace them
    "--force-overwrite=true",  # the name is ours, and a retry of a start that failed may find it
    "--kill=none",  # whatever ends the collection, a `--duration` for example, the training goes on
    "--wait=primary",  # a helper process left behind by the training must not keep the job waiting
)

#: Options that are written for the user, and how to set them instead.
_RESERVED = {
    "--trace": 'Pass nsys_trace=["nvtx", "cuda"]',
    "--output": "Leave it out; the report goes to the job's directory",
}
#: nsys' short options that mean the same as a long one.
_LONG_NAMES = {
    "-b": "--backtrace",
    "-c": "--capture-range",
    "-d": "--duration",
    "-e": "--env-var",
    "-f": "--force-overwrite",
    "-n": "--inherit-environment",
    "-o": "--output",
    "-p": "--nvtx-capture",
    "-s": "--sample",
    "-t": "--trace",
    "-w": "--show-output",
    "-x": "--stop-on-exit",
    "-y": "--delay",
}


def check_trace(trace: object, *, name: str = "nsys_trace") -> None:
    """Refuse an `nsys_trace` that is no list of API names.

    Raises:
        ProfilingConfigError: a string, an empty list, or entries that are no names.
    """
    names = trace if isinstance(trace, list) else []
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[a-z0-9-]+", name) for name in names):
        raise ProfilingConfigError(
            f"{name}={trace!r} is not a list of APIs to trace",
            why="each entry is one name that `nsys profile --trace` knows",
            instead=f'Type {name}=["nvtx", "cuda"], or leave it out for the same',
        )


def check_extra_args(extra_args: object, *, name: str = "nsys_extra_args") -> None:
    """Refuse `nsys_extra_args` that cannot be passed on.

    Raises:
        ProfilingConfigError: not a list of strings, a value without its option, an option that is written for them, or
            text that Slurm's shell and a plain process would read differently.
    """
    example = f'Type for example {name}=["--cuda-graph-trace=graph", "--gpu-metrics-device=0"]'
    if not isinstance(extra_args, list) or not all(isinstance(arg, str) and arg for arg in extra_args):
        raise ProfilingConfigError(f"{name}={extra_args!r} is not a list of options", instead=example)
    for arg in extra_args:
        if re.search(r"[\s'\"]", arg):
            raise ProfilingConfigError(
                f"{name} holds {arg!r}, with a space or a quote",
                why="NeMo-Run gives it to a shell on Slurm and to nsys itself elsewhere, which read it differently",
                instead="Give an option and its value as two entries, without quotes",
            )
    for option, tokens in split_options(extra_args):
        if not option.startswith("-"):
            raise ProfilingConfigError(f"{name} starts with {tokens[0]!r}, a value without an option", instead=example)
        if option in _RESERVED:
            raise ProfilingConfigError(
                f"{name} holds {tokens[0]!r}", why="that option is written for you", instead=_RESERVED[option]
            )


def merge_options(defaults: Sequence[str], extra_args: Sequence[str]) -> list[str]:
    """The launcher's options with the user's over them, by option name.

    `--flag=value`, `--flag value` and nsys' short form name the same option. The user's keep their order, after what is
    left of the defaults. Merging the same options twice gives the same list.
    """
    given = {name for name, _ in split_options(extra_args)}
    kept = [token for name, tokens in split_options(defaults) if name not in given for token in tokens]
    return [*kept, *extra_args]


def with_sqlite(extra_args: Sequence[str]) -> list[str]:
    """The user's options, with the export that writes an SQLite file beside the report.

    Raises:
        ProfilingConfigError: the options ask for an export of another kind alone.
    """
    exports = [" ".join(tokens) for name, tokens in split_options(extra_args) if name == "--export"]
    if not exports:
        return [*extra_args, "--export=sqlite"]
    if not any("sqlite" in export for export in exports):
        raise ProfilingConfigError(
            f"export_sqlite=True, but nsys_extra_args holds {exports[-1]}",
            why="nsys takes one --export, and this one writes no SQLite file",
            instead="Leave out export_sqlite, or type --export=sqlite,… in nsys_extra_args",
        )
    return list(extra_args)


def value_of(args: Sequence[str], option: str) -> str | None:
    """The value that an option has among these, whichever way it is written; None where it is not there."""
    for name, tokens in split_options(args):
        if name == option:
            return tokens[0].split("=", 1)[1] if "=" in tokens[0] else (tokens[1] if len(tokens) > 1 else None)
    return None


def reports_with_range(args: Sequence[str]) -> bool:
    """Whether nsys writes its report when a capture range ends; else it does when the application or its time does."""
    ends = value_of(args, "--capture-range-end")
    return value_of(args, "--capture-range") not in (None, "none") and (ends is None or ends.startswith(("stop", "repeat")))


def captures_of(args: Sequence[str]) -> int:
    """How many capture ranges these options have nsys record: one, unless they say `repeat:N`."""
    ends = re.fullmatch(r"repeat(?:-shutdown)?:(\d+)", value_of(args, "--capture-range-end") or "")
    return int(ends[1]) if ends else 1


def split_options(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Options with the tokens they were written as: `--flag value` is one option of two tokens."""
    options: list[tuple[str, list[str]]] = []
    for token in args:
        if token.startswith("-") or not options:
            name = token.split("=", 1)[0]
            options.append((_LONG_NAMES.get(name, name), [token]))
        else:
            options[-1][1].append(token)
    return options
