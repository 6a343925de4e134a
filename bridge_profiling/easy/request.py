"""What `bridge-profiling run` is asked for, and how it is told to each rank. Loads no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bridge_profiling.config import ProfilingConfig, parse_ranks, parse_steps
from bridge_profiling.errors import ProfilingConfigError

#: What a profiler's name switches on.
PROFILERS: dict[str, dict[str, Any]] = {
    "torch": {"use_pytorch_profiler": True},
    "memory": {"record_memory_history": True},
    "nsys": {"use_nsys_profiler": True},
}

#: Three iterations to warm up, then five: the first and the last pay for the profiler's start and stop.
DEFAULT_STEPS = "3:8"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A script, and what to profile of it.

    Args:
        script: path of the script, or the module's name.
        arguments: the script's own.
        module: whether `script` names a module, as after `python -m`.
        profiler: one of PROFILERS.
        steps: window of iterations, `3:8`.
        ranks: `all`, or ranks with commas between them.
        output_dir: root of what is written; None for the variable BRIDGE_PROFILING_DIR, else `profiles`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    profiler: str = "torch"
    steps: str = DEFAULT_STEPS
    ranks: str = "all"
    output_dir: str | None = None

    def config(self, world_size: int | None = None) -> ProfilingConfig:
        """The same as a `profiling` section, checked.

        Args:
            world_size: number of ranks, when known.

        Raises:
            ProfilingConfigError: steps or ranks that are none, or that lie outside the job.
        """
        start, end = parse_steps(self.steps)
        config = ProfilingConfig(
            profile_step_start=start,
            profile_step_end=end,
            profile_ranks=parse_ranks(self.ranks, words=("all",)),
            output_dir=self.output_dir,
            **PROFILERS[self.profiler],
        )
        config.finalize(world_size=world_size)
        return config

    def to_arguments(self) -> list[str]:
        """The request as `parse` reads it."""
        options = ["--profiler", self.profiler, "--steps", self.steps, "--ranks", self.ranks]
        options += ["--output-dir", self.output_dir] if self.output_dir is not None else []
        return [*options, *(["-m"] if self.module else []), self.script, *self.arguments]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ProfilingConfigError(message, instead="Type --help for the options, and the script's own after the script")


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line of a rank.

    Raises:
        ProfilingConfigError: an option that does not exist, or no script.
    """
    parser = _Parser(
        prog="python -m bridge_profiling.easy.start",
        description="Run a PyTorch script as it is, and profile some of its iterations. Every rank of a job is started so.",
        allow_abbrev=False,
    )
    parser.add_argument("--profiler", choices=sorted(PROFILERS), default="torch", help="what records (default: torch)")
    parser.add_argument("--steps", default=DEFAULT_STEPS, help="first iteration, and first one after it (default: 3:8)")
    parser.add_argument("--ranks", default="all", help="all, or ranks as 0,1 (default: all)")
    parser.add_argument("--output-dir", help="where captures go (default: $BRIDGE_PROFILING_DIR, else profiles)")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name, as with python -m")
    parser.add_argument("script", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    # By hand: argparse would take a "--" among the script's arguments for its own.
    ours, script, theirs = _split(arguments)
    found = parser.parse_args([*ours, *script])
    return Request(**{**vars(found), "arguments": tuple(theirs)})


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Our options, the script's name, and what belongs to the script."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        if arguments[place] == "--":
            return list(arguments[:place]), list(arguments[place + 1 : place + 2]), list(arguments[place + 2 :])
        takes_value = arguments[place].startswith("--") and "=" not in arguments[place] and arguments[place] != "--help"
        place += 2 if takes_value else 1
    return list(arguments[:place]), list(arguments[place : place + 1]), list(arguments[place + 1 :])
