"""The request of `bridge-profiling run`: its options, and the arguments that pass it to each rank. Loads no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean, require
from bridge_profiling.settings import recording
from bridge_profiling.settings.profiling import PROFILERS, ProfilingConfig
from bridge_profiling.settings.window import parse_ranks, parse_steps

#: Three iterations to warm up, then five: the first and the last pay for the profiler's start and stop.
DEFAULT_STEPS = "3:8"

#: Options with a value that `bridge-profiling run` and a rank's own command line share: what the help calls it, and its help.
OPTIONS = {
    "profiler": ("|".join(PROFILERS), "The profiler. Default: that of --config, else torch."),
    "steps": ("A:B", f"First iteration, and first one after the last. Default: {DEFAULT_STEPS}."),
    "ranks": ("all|0,1,…", "Global ranks to profile. Default: all."),
    "output_dir": ("DIRECTORY", "Default: $BRIDGE_PROFILING_DIR, else profiles."),
}

_SHELL_SUFFIXES = frozenset({".sh", ".bash", ".slurm", ".sbatch"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """A script, and what to profile in it. Options that are None leave the setting to `config_file` or its default."""

    script: str  # path of the script, or the module's name
    arguments: tuple[str, ...] = ()  # the script's own
    module: bool = False  # whether `script` names a module, as after `python -m`
    profiler: str | None = None  # one of PROFILERS; torch by default
    steps: str | None = None  # window of iterations; DEFAULT_STEPS by default
    ranks: str | None = None  # `all`, or a comma-separated list of ranks; all by default
    output_dir: str | None = None  # root of captures; by default the variable BRIDGE_PROFILING_DIR, else `profiles`
    config_file: str | None = None  # YAML file with a section `profiling`
    overrides: tuple[str, ...] = ()  # overrides of that section

    @classmethod
    def typed(cls, script: str, arguments: Sequence[str], options: Mapping[str, Any], *, module: bool) -> Request:
        """The request of options as typed: those of OPTIONS and `recording.FLAGS`, `settings` and `config_file`."""
        profiler = options["profiler"]
        recording.check_flags(options, profiler and [profiler])
        return cls(
            script=script,
            arguments=tuple(arguments),
            module=module,
            config_file=options["config_file"],
            overrides=tuple(recording.to_overrides(options, options["settings"])),
            **{name: options[name] for name in OPTIONS},
        )

    def config(self, world_size: int | None = None) -> ProfilingConfig:
        """The request as a checked `profiling` section."""
        window = parse_steps(DEFAULT_STEPS)
        config = ProfilingConfig(profile_step_start=window.start, profile_step_end=window.end, profile_ranks="all")
        recording.apply(config, self.overrides, self.config_file)
        if self.steps is not None:
            window = parse_steps(self.steps)
            config.profile_step_start, config.profile_step_end = window.start, window.end
        if self.ranks is not None:
            config.profile_ranks = parse_ranks(self.ranks, words=("all",), world_size=world_size)
        if self.profiler is not None:
            config.use_pytorch_profiler = config.use_nsys_profiler = False
            setattr(config, PROFILERS[self.profiler], True)
        elif not (config.use_pytorch_profiler or config.use_nsys_profiler):
            config.use_pytorch_profiler = True
        config.output_dir = self.output_dir or config.output_dir
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
        values = {name: getattr(self, name) for name in OPTIONS} | {"config": self.config_file}
        options = [part for name, value in values.items() if value is not None for part in (recording.option(name), value)]
        options += [part for override in self.overrides for part in ("--set", override)]
        if self.module:
            options.append("-m")
        if self.script.startswith("-"):
            options.append("--")
        return [*options, self.script, *self.arguments]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ProfilingConfigError(message, instead="Type --help for the options, and the script's own after the script")


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line of a rank."""
    parser = _Parser(
        prog="python -m bridge_profiling.frameworks.start",
        description="Run a PyTorch script unchanged, and profile some of its iterations. Start every rank of a job with it.",
        allow_abbrev=False,
    )
    for name, (value, text) in OPTIONS.items():
        parser.add_argument(recording.option(name), metavar=value, help=text)
    parser.add_argument("--config", dest="config_file", metavar="FILE", help="YAML file with a section profiling")
    parser.add_argument("--set", dest="settings", action="append", metavar="FIELD=VALUE", help="a setting of that section")
    for name, (_, text) in recording.FLAGS.items():
        parser.add_argument(recording.option(name), action="store_true", help=text)
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name, as with python -m")
    parser.add_argument("script", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    # argparse would take a "--" among the script's arguments for its own, so it does not see them.
    alone = {"--help", *map(recording.option, recording.FLAGS)}
    arguments, place = list(arguments), 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "--":
        typed = arguments[place]
        place += 2 if typed.startswith("--") and "=" not in typed and typed not in alone else 1
    script = place + 1 if arguments[place : place + 1] == ["--"] else place
    found = vars(parser.parse_args([*arguments[:place], "--", *arguments[script : script + 1]]))
    if found["profiler"] not in (None, *PROFILERS):
        instead = did_you_mean(found["profiler"], PROFILERS, before="--profiler ")
        raise ProfilingConfigError(f"--profiler {found['profiler']} does not exist", instead=instead)
    return Request.typed(found["script"], arguments[script + 1 :], found, module=found["module"])
