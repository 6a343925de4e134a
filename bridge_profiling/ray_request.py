"""What is asked of Ray workers by environment variables: NeMo RL's convention, read, checked and written.

The submit host checks with it what a job is given, the driver which workers to start under a profiler, a worker which steps
to capture. Imports neither ray nor torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch

from bridge_profiling.config import Window
from bridge_profiling.errors import ProfilingConfigError

#: Steps to capture, `start:stop`: half-open, counted from 1 as NeMo RL does.
STEP_RANGE_VARIABLE = "NRL_NSYS_PROFILE_STEP_RANGE"
#: Names of workers to profile: shell patterns, separated by commas.
PATTERNS_VARIABLE = "NRL_NSYS_WORKER_PATTERNS"
#: Options of `nsys profile` over the default ones: a JSON object.
EXTRA_OPTIONS_VARIABLE = "NRL_NSYS_EXTRA_OPTIONS"
#: The profiler, one of PROFILERS; ours, since NeMo RL knows nsys alone.
PROFILER_VARIABLE = "BRIDGE_PROFILING_RAY_PROFILER"

VARIABLES = (STEP_RANGE_VARIABLE, PATTERNS_VARIABLE, PROFILER_VARIABLE, EXTRA_OPTIONS_VARIABLE)

PROFILERS = ("nsys", "torch")

#: What a shell leaves as it is: Ray passes options to nsys itself when it tries them, and through a shell when it uses them.
_UNCHANGED_BY_A_SHELL = re.compile(r"[\w./:@%+,=^{}-]*", re.ASCII)
_BRACE_EXPANSION = re.compile(r"\{[^}]*(,|\.\.)[^}]*\}")
_OPTION_NAME = re.compile(r"[A-Za-z]|[a-z0-9][a-z0-9-]+")


@dataclass(frozen=True)
class RayRequest:
    """Which steps of which Ray workers to profile.

    Args:
        window: the steps, `start <= step < stop`, counted from 1.
        patterns: shell patterns of worker names.
        profiler: one of PROFILERS.
        extra_options: options of `nsys profile`, over the default ones; names without dashes, else as they were written, since
            NeMo RL's own code merges them by these.
    """

    window: Window
    patterns: tuple[str, ...]
    profiler: str = "nsys"
    extra_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RayRequest | None:
        """What the variables ask for; None where they ask for nothing. An empty variable counts as none.

        Raises:
            ProfilingConfigError: one of the two that belong together is missing, or a value cannot be read.
        """
        steps, patterns = (environ.get(name, "").strip() for name in (STEP_RANGE_VARIABLE, PATTERNS_VARIABLE))
        if not steps and not patterns:
            return None
        if not steps or not patterns:
            given, value = (STEP_RANGE_VARIABLE, steps) if steps else (PATTERNS_VARIABLE, patterns)
            missing = f'{PATTERNS_VARIABLE}="*policy*"' if steps else f"{STEP_RANGE_VARIABLE}=2:3"
            raise ProfilingConfigError(
                f"{given}={value} is set, and {missing.split('=')[0]} is not",
                why="the one says which steps to profile, the other of which workers",
                instead=f"Type {missing} as well, or unset {given}",
            )
        return cls(
            parse_step_range(steps),
            parse_patterns(patterns),
            parse_profiler(environ.get(PROFILER_VARIABLE, "")),
            parse_extra_options(environ.get(EXTRA_OPTIONS_VARIABLE, "")),
        )

    def selects(self, worker: str) -> bool:
        """Whether a worker of this name is to be profiled."""
        return any(fnmatch(worker, pattern) for pattern in self.patterns)

    def variables(self) -> dict[str, str]:
        """The variables that ask for this."""
        variables = {
            STEP_RANGE_VARIABLE: f"{self.window.start}:{self.window.end}",
            PATTERNS_VARIABLE: ",".join(self.patterns),
            PROFILER_VARIABLE: self.profiler,
        }
        return variables | ({EXTRA_OPTIONS_VARIABLE: json.dumps(dict(self.extra_options))} if self.extra_options else {})


def parse_step_range(text: str) -> Window:
    """The steps that `2:3` names: step 2 alone.

    Raises:
        ProfilingConfigError: it is no pair of step numbers, starts before 1, or holds no step.
    """
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text, re.ASCII)
    if match is None:
        raise ProfilingConfigError(
            f"{STEP_RANGE_VARIABLE}={text!r} is not start:stop",
            why="it takes the first step to capture and the first not to, two whole numbers",
            instead=f"Type {STEP_RANGE_VARIABLE}=2:3 to capture step 2",
        )
    start, stop = int(match[1]), int(match[2])
    if start < 1:
        raise ProfilingConfigError(
            f"{STEP_RANGE_VARIABLE}={text} starts at step 0",
            why="steps are counted from 1",
            instead=f"Type {STEP_RANGE_VARIABLE}=1:{max(stop, 2)}",
        )
    if start >= stop:
        raise ProfilingConfigError(
            f"{STEP_RANGE_VARIABLE}={text} holds no step",
            why="the stop is the first step that is not captured any more",
            instead=f"Type {STEP_RANGE_VARIABLE}={start}:{start + 1} to capture step {start} alone",
        )
    return Window(start, stop)


def parse_patterns(text: str) -> tuple[str, ...]:
    """The patterns in `*policy*, *vllm*`.

    Raises:
        ProfilingConfigError: there is none.
    """
    patterns = tuple(filter(None, (pattern.strip() for pattern in text.split(","))))
    if not patterns:
        raise ProfilingConfigError(
            f"{PATTERNS_VARIABLE}={text!r} holds no pattern",
            instead=f'Type for example {PATTERNS_VARIABLE}="*policy*,*vllm*", or "*" for every worker',
        )
    return patterns


def parse_profiler(text: str) -> str:
    """The profiler of this name; nothing is nsys.

    Raises:
        ProfilingConfigError: there is no such profiler.
    """
    name = text.strip() or PROFILERS[0]
    if name not in PROFILERS:
        raise ProfilingConfigError(
            f"{PROFILER_VARIABLE}={text!r} is not known",
            why=f"workers are profiled by {' or '.join(PROFILERS)}",
            instead=f"Type {PROFILER_VARIABLE}={PROFILERS[0]}, or leave it out for the same",
        )
    return name


def parse_extra_options(text: str) -> dict[str, str]:
    """Options of `nsys profile`, names without dashes; nothing is none.

    Raises:
        ProfilingConfigError: no JSON object, or an option that nsys could not be given through Ray.
    """
    if not text.strip():
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        options = error
    if not isinstance(options, dict):
        detail = f": {options}" if isinstance(options, ValueError) else ""
        raise ProfilingConfigError(
            f"{EXTRA_OPTIONS_VARIABLE}={text} is not a JSON object{detail}",
            why="each entry is an option of `nsys profile`, without its dashes, and the value it takes",
            instead=f"""Type for example {EXTRA_OPTIONS_VARIABLE}='{{"gpu-metrics-device": "all", "cpuctxsw": "none"}}'""",
        )
    return check_options(options, name=EXTRA_OPTIONS_VARIABLE)


def check_options(options: Mapping[str, object], *, name: str) -> dict[str, str]:
    """Options as Ray is given them: names without dashes, values as text.

    Args:
        options: by long or short names, with or without dashes; booleans become `true` and `false`.
        name: how the user knows them.

    Raises:
        ProfilingConfigError: a name that is none, a value that is no text, or one that a shell would change.
    """
    checked: dict[str, str] = {}
    for option, value in options.items():
        bare = option.lstrip("-")
        if not _OPTION_NAME.fullmatch(bare):
            raise ProfilingConfigError(
                f"{name} holds {option!r}, which is no name of an option",
                instead='Type the name as `nsys profile --help` shows it, without dashes: "cuda-graph-trace"',
            )
        written = str(value).lower() if isinstance(value, bool) else str(value)
        # NeMo RL's own `o` comes in quotes.
        written = re.sub(r"^'(.*)'$", r"\1", written)
        if not isinstance(value, (str, int)) or not written:
            raise ProfilingConfigError(
                f"{name} gives {option!r} the value {value!r}",
                why="an option of nsys takes text or a whole number",
                instead=f'Type for example {{"{option}": "none"}}, or leave it out',
            )
        if changed_by_a_shell(written):
            raise ProfilingConfigError(
                f"{name} gives {option!r} the value {value!r}",
                why="Ray starts nsys through a shell, which would change it",
                instead="Use letters, digits and ._/:@%+,=- alone",
            )
        checked[bare] = written
    return checked


def changed_by_a_shell(text: str) -> bool:
    """Whether a shell might read this word as something else."""
    return _UNCHANGED_BY_A_SHELL.fullmatch(text) is None or _BRACE_EXPANSION.search(text) is not None
