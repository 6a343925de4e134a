"""The request to profile Ray workers: NeMo RL's environment variables, read, checked and written.

Shared by the submit host, the driver, which starts workers under a profiler, and the workers. Imports neither ray nor torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch

from bridge_profiling.common.errors import did_you_mean, require
from bridge_profiling.manifest import Window
from bridge_profiling.settings.window import Spelling, parse_steps

#: Steps to capture, `start:stop`: half-open, counted from 1 as in NeMo RL.
STEP_RANGE_VARIABLE = "NRL_NSYS_PROFILE_STEP_RANGE"
#: Names of workers to profile: shell patterns, separated by commas.
PATTERNS_VARIABLE = "NRL_NSYS_WORKER_PATTERNS"
#: Options of `nsys profile` as a JSON object; they override the defaults.
EXTRA_OPTIONS_VARIABLE = "NRL_NSYS_EXTRA_OPTIONS"
#: One of PROFILERS; ours, since NeMo RL supports only nsys.
PROFILER_VARIABLE = "BRIDGE_PROFILING_RAY_PROFILER"

_SPELLED = Spelling(start=STEP_RANGE_VARIABLE, end=STEP_RANGE_VARIABLE, first=1)

#: A shell pattern of worker names.
_PATTERN = re.compile(r"[\w.:/@=+*?\[\]!^-]+")

VARIABLES = (STEP_RANGE_VARIABLE, PATTERNS_VARIABLE, PROFILER_VARIABLE, EXTRA_OPTIONS_VARIABLE)

PROFILERS = ("nsys", "torch")

#: Text that a shell leaves unchanged: Ray passes options to nsys directly in its trial run, and through a shell in use.
_UNCHANGED_BY_A_SHELL = re.compile(r"[\w./:@%+,=^{}-]*", re.ASCII)
_BRACE_EXPANSION = re.compile(r"\{[^}]*(,|\.\.)[^}]*\}")
_OPTION_NAME = re.compile(r"[A-Za-z]|[a-z0-9][a-z0-9-]+")


@dataclass(frozen=True)
class RayRequest:
    """The steps (`start <= step < stop`, from 1) and Ray workers to profile, by shell patterns of their names.

    `extra_options` of nsys have names without dashes, otherwise as written, since NeMo RL's own code merges them by these
    names.
    """

    window: Window
    patterns: tuple[str, ...]
    profiler: str = PROFILERS[0]
    extra_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def checked(
        cls, window: Window, patterns: str, profiler: str, options: Mapping[str, object], *, name: str = EXTRA_OPTIONS_VARIABLE
    ) -> RayRequest:
        """A request from values as users write them: patterns separated by commas, an empty `profiler` for nsys."""
        listed = tuple(filter(None, map(str.strip, patterns.split(",")))) if isinstance(patterns, str) else ()
        wrong = [pattern for pattern in listed if not _PATTERN.fullmatch(pattern)]
        require(
            listed and not wrong,
            f"{PATTERNS_VARIABLE}={patterns!r} holds {f'{wrong[0]!r}, which matches no name' if wrong else 'no pattern'}",
            why="it takes shell patterns of workers' names, separated by commas; a name has letters, digits and ._:/@=+-",
            instead=f'Type for example {PATTERNS_VARIABLE}="*policy*,*vllm*", or "*" for every worker',
        )
        chosen = profiler.strip() or PROFILERS[0]
        require(
            chosen in PROFILERS,
            f"{PROFILER_VARIABLE}={profiler!r} is not known",
            why=f"the profilers of workers are {' or '.join(PROFILERS)}",
            instead=did_you_mean(chosen, PROFILERS, before=f"{PROFILER_VARIABLE}="),
        )
        return cls(window, listed, chosen, check_options(options, name=name))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RayRequest | None:
        """The request in the environment, or None. Empty variables count as unset."""
        steps, patterns = (environ.get(name, "").strip() for name in (STEP_RANGE_VARIABLE, PATTERNS_VARIABLE))
        if not steps and not patterns:
            return None
        given, missing, example = (
            (STEP_RANGE_VARIABLE, PATTERNS_VARIABLE, '"*policy*"') if steps else (PATTERNS_VARIABLE, STEP_RANGE_VARIABLE, "2:3")
        )
        require(
            steps and patterns,
            f"{given}={environ[given]} is set, and {missing} is not",
            why="one names the steps to profile, the other the workers",
            instead=f"Type {missing}={example} as well, or unset {given}",
        )
        options = _parse_options(environ.get(EXTRA_OPTIONS_VARIABLE, "").strip() or "{}")
        return cls.checked(parse_steps(steps, _SPELLED), patterns, environ.get(PROFILER_VARIABLE, ""), options)

    def selects(self, worker: str) -> bool:
        """Whether to profile a worker of this name."""
        return any(fnmatch(worker, pattern) for pattern in self.patterns)

    def variables(self) -> dict[str, str]:
        """The environment variables of this request."""
        variables = {
            STEP_RANGE_VARIABLE: f"{self.window.start}:{self.window.end}",
            PATTERNS_VARIABLE: ",".join(self.patterns),
            PROFILER_VARIABLE: self.profiler,
        }
        return variables | ({EXTRA_OPTIONS_VARIABLE: json.dumps(dict(self.extra_options))} if self.extra_options else {})


def _parse_options(text: str) -> dict[str, object]:
    try:
        options, problem = json.loads(text), ""
    except ValueError as error:
        options, problem = None, f": {error}"
    require(
        isinstance(options, dict),
        f"{EXTRA_OPTIONS_VARIABLE}={text} is not a JSON object{problem}",
        why="each entry is an option of `nsys profile` without its dashes, and its value",
        instead=f"""Type for example {EXTRA_OPTIONS_VARIABLE}='{{"gpu-metrics-device": "all", "cpuctxsw": "none"}}'""",
    )
    return options


def check_options(options: Mapping[str, object], *, name: str) -> dict[str, str]:
    """Convert options to Ray's form: names without dashes; values as text, booleans as `true` and `false`."""
    checked: dict[str, str] = {}
    for option, value in options.items():
        bare = option.lstrip("-")
        require(
            _OPTION_NAME.fullmatch(bare),
            f"{name} holds {option!r}, which is not an option's name",
            instead='Type the name as `nsys profile --help` shows it, without dashes: "cuda-graph-trace"',
        )
        written = str(value).lower() if isinstance(value, bool) else str(value)
        # NeMo RL's own `o` comes in quotes.
        written = re.sub(r"^'(.*)'$", r"\1", written)
        require(
            isinstance(value, (str, int)) and written and not changed_by_a_shell(written),
            f"{name} gives {option!r} the value {value!r}",
            why="it takes text or an integer, and Ray starts nsys through a shell, which changes other characters",
            instead='Use letters, digits and ._/:@%+,=-, for example "none", or leave it out',
        )
        checked[bare] = written
    return checked


def changed_by_a_shell(text: str) -> bool:
    """Whether a shell may change this word."""
    return _UNCHANGED_BY_A_SHELL.fullmatch(text) is None or _BRACE_EXPANSION.search(text) is not None
