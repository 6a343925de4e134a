"""What to record: the options that `run`, `trigger`, `launch/experiment.py` and a rank's own command line share.

Each becomes a setting of the section `profiling`. Loads neither torch nor Typer; OmegaConf only where there is a setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.settings.profiling import ProfilingConfig

#: Options without a value: the setting that each switches on, and its help.
FLAGS: dict[str, tuple[str, str]] = {
    "record_shapes": ("record_shapes", "Record tensor shapes."),
    "with_stack": ("pytorch_profiler_collect_callstack", "Record Python call stacks (torch profiler)."),
    "memory": ("record_memory_history", "Record CUDA's memory history as well."),
    "nvtx": ("nvtx_ranges", "Emit NVTX ranges of phases in every iteration."),
    "light": (
        "pytorch_profiler_device_only",
        "Record the device and CUDA calls, but no operators: the least overhead (torch profiler).",
    ),
}

#: Flags of the torch profiler alone.
_OF_TORCH = ("with_stack", "light")

#: Settings with an option of their own.
_OWN_OPTIONS = {
    "profile_step_start": "--steps A:B",
    "profile_step_end": "--steps A:B",
    "profile_ranks": "--ranks",
    "use_pytorch_profiler": "--profiler torch",
    "use_nsys_profiler": "--profiler nsys",
}


@dataclass
class _Root:
    """What overrides and YAML files are applied to."""

    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)


def option(name: str) -> str:
    """A flag as typed: `--record-shapes`."""
    return f"--{name.replace('_', '-')}"


def check_flags(flags: Mapping[str, object], profilers: Sequence[str] | None) -> None:
    """Raise ProfilingConfigError if flags exclude each other, or need another profiler than those that will record."""
    given = [name for name in FLAGS if flags.get(name)]
    excluded = [name for name in ("record_shapes", "with_stack") if name in given and "light" in given]
    require(
        not excluded,
        f"--light and {' and '.join(map(option, excluded))} exclude each other",
        why="--light records no operators, and shapes and stacks belong to operators",
        instead="Leave one of them out",
    )
    wrong = [name for name in _OF_TORCH if name in given and profilers is not None and "torch" not in profilers]
    require(
        not wrong,
        f"{' and '.join(map(option, wrong))} does not go with --profiler {' and '.join(profilers or [])}",
        why="it is an option of the torch profiler",
        instead="Type --profiler torch, or leave it out",
    )


def to_overrides(flags: Mapping[str, object], settings: Iterable[str] | None = None) -> list[str]:
    """Overrides of the section `profiling` for the flags given, and the values of `--set`, with or without `profiling.`.

    Raises ProfilingConfigError if a value of `--set` is not a setting, or has an option of its own.
    """
    given = [name for name in FLAGS if flags.get(name)]
    return [*map(_checked, settings or ()), *(f"profiling.{FLAGS[name][0]}=true" for name in given)]


def _checked(setting: str) -> str:
    from bridge_profiling.settings.overrides import parse_override

    parsed = parse_override(setting)
    if parsed is None:
        raise ProfilingConfigError(f"--set {setting} is not FIELD=VALUE", instead="Type for example --set profile_every=100")
    name = parsed.key.removeprefix("profiling.")
    if name in _OWN_OPTIONS:
        raise ProfilingConfigError(
            f"--set {setting} has an option of its own", instead=f"Type {_OWN_OPTIONS[name]} without --set"
        )
    return f"profiling.{name}={parsed.text}"


def apply(config: ProfilingConfig, overrides: Sequence[str], file: str | Path | None = None) -> None:
    """Set fields of `config` in place from the section `profiling` of a YAML file (`--config`), and then from overrides.

    Raises ProfilingConfigError if a field or a value is wrong, or the file has no such section. The caller checks the settings
    afterwards with `finalize`.
    """
    if not overrides and file is None:
        return
    from bridge_profiling.settings.overrides import apply_overrides, apply_yaml

    root = _Root(config)
    if file is not None:
        apply_yaml(root, file, section="profiling")
    try:
        apply_overrides(root, overrides)
    except ProfilingConfigError as error:
        what, why, instead = map(_as_typed, (error.what, error.why, error.instead))
        raise ProfilingConfigError(what, why=why, instead=instead) from None


def _as_typed(text: str) -> str:
    """A sentence about settings, naming the option that they were typed with."""
    return re.sub(r"\bprofiling\.(?=\w)", "--set ", text)
