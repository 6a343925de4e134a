"""The request of `bridge-profiling run`: its options, and the arguments that pass it to each rank. Loads no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bridge_profiling.config import ProfilingConfig, parse_ranks, parse_steps
from bridge_profiling.errors import ProfilingConfigError, require

#: Settings of each profiler.
PROFILERS: dict[str, dict[str, Any]] = {
    "torch": {"use_pytorch_profiler": True},
    "memory": {"record_memory_history": True},
    "nsys": {"use_nsys_profiler": True},
}

#: Three iterations to warm up, then five: the first and the last pay for the profiler's start and stop.
DEFAULT_STEPS = "3:8"

_SHELL_SUFFIXES = frozenset({".sh", ".bash", ".slurm", ".sbatch"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """A script, and what to profile in it.

    Args:
        script: path of the script, or the module's name.
        arguments: the script's own.
        module: whether `script` names a module, as after `python -m`.
        profiler: one of PROFILERS.
        steps: window of iterations, `3:8`.
        ranks: `all`, or a comma-separated list of ranks.
        output_dir: root of captures; None for the variable BRIDGE_PROFILING_DIR, else `profiles`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    profiler: str = "torch"
    steps: str = DEFAULT_STEPS
    ranks: str = "all"
    output_dir: str | None = None

    def config(self, world_size: int | None = None) -> ProfilingConfig:
        """The request as a checked `profiling` section."""
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

    def check_script(self) -> None:
        """Check that Python can run the script. A module is only searched for when it runs."""
        if self.module:
            return
        path, instead = Path(self.script), "Type the path of a script, or -m and a module's name"
        require(path.exists(), f"{path} does not exist", instead=instead)
        runnable = not path.is_dir() or (path / "__main__.py").exists()
        require(runnable, f"{path} is a directory without a __main__.py", instead=instead)
        require(
            path.suffix not in _SHELL_SUFFIXES,
            f"{path} is a shell script",
            instead="Type the Python script that it runs, or replace python by bridge-profiling run in it",
        )

    def to_arguments(self) -> list[str]:
        """The request as `parse` reads it."""
        options = ["--profiler", self.profiler, "--steps", self.steps, "--ranks", self.ranks]
        options += ["--output-dir", self.output_dir] if self.output_dir is not None else []
        return [*options, *(["-m"] if self.module else []), self.script, *self.arguments]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ProfilingConfigError(message, instead="Type --help for the options, and the script's own after the script")


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line of a rank."""
    parser = _Parser(
        prog="python -m bridge_profiling.easy.start",
        description="Run a PyTorch script unchanged, and profile some of its iterations. Start every rank of a job with it.",
        allow_abbrev=False,
    )
    parser.add_argument("--profiler", choices=sorted(PROFILERS), default="torch", help="profiler (default: torch)")
    parser.add_argument("--steps", default=DEFAULT_STEPS, help="first iteration, and first one after it (default: 3:8)")
    parser.add_argument("--ranks", default="all", help="all, or ranks as 0,1 (default: all)")
    parser.add_argument("--output-dir", help="root of captures (default: $BRIDGE_PROFILING_DIR, else profiles)")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name, as with python -m")
    parser.add_argument("script", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    # argparse would take a "--" among the script's arguments for its own, so it does not see them.
    arguments, place = list(arguments), 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "--":
        takes_value = arguments[place].startswith("--") and "=" not in arguments[place] and arguments[place] != "--help"
        place += 2 if takes_value else 1
    script = place + 1 if arguments[place : place + 1] == ["--"] else place
    found = parser.parse_args([*arguments[:place], *arguments[script : script + 1]])
    return Request(**{**vars(found), "arguments": tuple(arguments[script + 1 :])})
