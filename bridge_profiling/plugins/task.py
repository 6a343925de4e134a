"""Reads and edits the settings of a task: a `run.Partial`'s config tree, or a `run.Script`'s Hydra-style overrides.

Knows where a setting lives and how it is written, and nothing of profilers. Never touches the executor.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import fiddle as fdl
import nemo_run as run

from bridge_profiling.config import FaultToleranceConfig, ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError

logger = logging.getLogger(__name__)

Task: TypeAlias = run.Partial | run.Script

#: What a missing section of the config is filled with.
_SECTIONS: dict[str, type] = {"profiling": ProfilingConfig, "ft": FaultToleranceConfig}

_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2})(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
_TRUE = {"true", "yes", "on", "1"}
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "none", "nan", "inf"}
#: Text that Hydra, OmegaConf and a shell all read as it stands. NeMo-Run gives a Script's arguments to a shell on Slurm
#: and to the process itself elsewhere, so no quoting would be right in both places.
_PLAIN_TEXT = re.compile(r"[\w./:@%+-]+", re.ASCII)


def check_task(task: object, plugin: str, fields: Mapping[str, Sequence[str]]) -> None:
    """Refuse a task that cannot hold these settings.

    Args:
        task: what the plugin was given.
        plugin: the plugin's name, for the message.
        fields: the settings it will write, as `{section: fields}`.

    Raises:
        ProfilingConfigError: neither Partial nor Script, or a Partial without such a config.
    """
    if isinstance(task, run.Script):
        return
    if not isinstance(task, run.Partial):
        raise ProfilingConfigError(
            f"{plugin} got a {type(task).__name__}",
            why="it edits the task before it is submitted, so it must know its form",
            instead="Pass a run.Partial (a function with its config) or a run.Script (a script with overrides)",
        )
    config = _read(task, "config")
    if config is None or isinstance(config, (str, int, float, list, dict)):
        raise ProfilingConfigError(
            f"{plugin} found no config in this run.Partial",
            why="the settings it makes live in the argument `config`, a ConfigContainer",
            instead="Build the task as run.Partial(pretrain, config=run.Config(ConfigContainer)), or pass a run.Script",
        )
    for section, names in fields.items():
        target = _read(config, section)
        if target is None:
            _check_accepts(config, section, plugin)
            target = _section_class(config, section)
        for name in names:
            _check_accepts(target, name, plugin)


def write(task: Task, section: str, values: Mapping[str, object]) -> None:
    """Set fields of a section: attributes of a Partial's config, overrides of a Script.

    A missing section of a Partial's config becomes a `run.Config` of our class, or of the config's own. In a Script an
    earlier override of the same field is replaced where it stands, so that a second call changes nothing.
    """
    if isinstance(task, run.Script):
        write_overrides(task, [f"{section}.{name}={override_value(value)}" for name, value in values.items()])
        return
    target = _read(task.config, section)
    if target is None:
        target = run.Config(_section_class(task.config, section))
        setattr(task.config, section, target)
    for name, value in values.items():
        setattr(target, name, list(value) if isinstance(value, list) else value)


def read(task: Task, section: str, name: str) -> object:
    """A setting as it stands: a Partial's value, the text of a Script's override, None where there is none."""
    if isinstance(task, run.Script):
        return _last_override(task, f"{section}.{name}")
    return _read(_read(task.config, section), name)


def has_field(task: Task, section: str, name: str) -> bool:
    """Whether a setting exists, as far as the submit host can see: a Script's are known in the job alone."""
    if isinstance(task, run.Script):
        return True
    target = _read(task.config, section)
    return _accepts(_section_class(task.config, section) if target is None else target, name)


def starts_nsys_itself(task: Task) -> bool:
    """Whether the task puts its own ranks under nsys: a Partial by its function's mark, a Script by being ours."""
    if isinstance(task, run.Partial):
        function = getattr(task, "__fn_or_cls__", None)
        return getattr(function, "starts_nsys_itself", False) is True
    if task.inline:
        return False
    path = Path(task.path.replace(".", "/") + ".py" if task.m else task.path)
    if path.parts[-2:] != ("launch", "pretrain.py"):
        return False
    # The name is a common one. Where the file can be seen from here, its mark decides; on a cluster's own path, the name.
    return not path.is_file() or "starts_nsys_itself" in path.read_text(encoding="utf-8", errors="replace")


def is_on(task: Task, section: str, name: str) -> bool:
    """Whether a boolean setting is on, as the job would see it."""
    if isinstance(task, run.Script):
        text = _last_override(task, f"{section}.{name}")
        return text is not None and text.strip("'\"").lower() in _TRUE
    # `is True`: an attribute of a mocked config is a Mock, which is truthy and means nothing.
    return _read(_read(task.config, section), name) is True


def read_integer(task: Task, section: str, name: str) -> int | None:
    """An integer setting where it can be seen on the submit host, else None."""
    if isinstance(task, run.Script):
        text = _last_override(task, f"{section}.{name}")
        return int(text) if text is not None and re.fullmatch(r"\d+", text) else None
    value = _read(_read(task.config, section), name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def override_value(value: object) -> str:
    """How a value is written in a Hydra-style override: `true`, `[0,1]`, `50`, plain text, `["--a=b,c"]`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ",".join(_list_item(item) for item in value) + "]"
    return str(value)


def _list_item(item: object) -> str:
    text = override_value(item)
    return text if not isinstance(item, str) or _PLAIN_TEXT.fullmatch(text) else json.dumps(text)


def _argument(override: str) -> str:
    """An override as one argument, quoted for Slurm's shell where it holds quotes; our entry point takes them off elsewhere."""
    return f"'{override}'" if '"' in override else override


def check_plain_text(value: str, name: str) -> None:
    """Refuse text that an override cannot carry unchanged.

    Raises:
        ProfilingConfigError: spaces, quotes, commas, `=`, `$` and the like, or text that reads as another type.
    """
    if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _NOT_TEXT and not _is_number(value):
        return
    raise ProfilingConfigError(
        f"{name}={value!r} cannot be passed to a run.Script as an override",
        why="a shell or the override parser would read it as something else",
        instead=f"Use letters, digits and ./_:@%+- in {name}, or write the arguments yourself in script_args_converter_fn",
    )


def write_overrides(task: run.Script, overrides: Sequence[str]) -> None:
    """Append `key=value` overrides to a Script, replacing earlier ones of the same key where they stand."""
    args = list(task.args)
    for override in overrides:
        key, value = override.split("=", 1)
        places = [i for i, arg in enumerate(args) if (match := _parse(arg)) and match["key"] == key]
        if not places:
            args.append(_argument(override))
            continue
        first = _parse(args[places[0]])
        assert first is not None
        args[places[0]] = _argument(f"{first['prefix']}{key}={value}")
        args = [arg for i, arg in enumerate(args) if i not in places[1:]]
    task.args = args
    _warn_inline(task, overrides)


def append_arguments(task: run.Script, arguments: Sequence[str]) -> None:
    """Append a converter's arguments to a Script, once."""
    size = len(arguments)
    if any(task.args[i : i + size] == list(arguments) for i in range(len(task.args) - size + 1)):
        return
    task.args = [*task.args, *arguments]
    _warn_inline(task, arguments)


def convert(converter: Callable[[Any], list[str]], script_args: object) -> list[str]:
    """A converter's arguments for a Script.

    Raises:
        ProfilingConfigError: it returned something else than a list of strings.
    """
    arguments = converter(script_args)
    if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
        raise ProfilingConfigError(
            f"script_args_converter_fn returned {arguments!r}",
            why="its result is appended to the script's arguments",
            instead='Return a list of strings, for example ["--profile-step-start", "10"]',
        )
    return arguments


def check_converter(converter: object) -> None:
    """Refuse a `script_args_converter_fn` that is no function."""
    if converter is not None and not callable(converter):
        raise ProfilingConfigError(
            f"script_args_converter_fn={converter!r} is not a function",
            why="it is called with the plugin's script arguments",
            instead="Pass a function that takes them and returns a list of strings",
        )


def _read(target: Any, name: str) -> Any:
    if target is None:
        return None
    try:
        return getattr(target, name)
    except (AttributeError, ValueError):
        # Fiddle raises ValueError for an unset field whose default is made by a factory.
        return None


def _section_class(config: Any, section: str) -> Any:
    """What a section that is not there yet is made of."""
    owner = fdl.get_callable(config) if isinstance(config, fdl.Buildable) else type(config)
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    factories = {field.name: field.default_factory for field in fields}
    return _SECTIONS.get(section) or factories.get(section)


def _accepts(target: Any, name: str) -> bool:
    if isinstance(target, fdl.Buildable):
        parameters = inspect.signature(fdl.get_callable(target)).parameters.values()
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)
    if dataclasses.is_dataclass(target):
        return name in {field.name for field in dataclasses.fields(target)} or hasattr(target, name)
    return True


def _check_accepts(target: Any, name: str, plugin: str) -> None:
    if not _accepts(target, name):
        owner = fdl.get_callable(target) if isinstance(target, fdl.Buildable) else target
        raise ProfilingConfigError(
            f"{plugin} needs the field {name!r} in {getattr(owner, '__name__', type(owner).__name__)}",
            why="the job reads its settings there",
            instead="Use a ConfigContainer with Megatron Bridge's sections (`profiling`, `ft`, `train`)",
        )


def _parse(arg: object) -> re.Match[str] | None:
    if not isinstance(arg, str):
        return None
    if len(arg) > 1 and arg[0] == arg[-1] and arg[0] in "'\"":  # quoted for Slurm's shell by the user
        arg = arg[1:-1]
    return _OVERRIDE.fullmatch(arg)


def _last_override(task: run.Script, key: str) -> str | None:
    values = [match["value"] for arg in task.args if (match := _parse(arg)) and match["key"] == key]
    return values[-1] if values else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _warn_inline(task: run.Script, arguments: Sequence[str]) -> None:
    if task.inline:
        logger.warning(
            "NeMo-Run passes no arguments to an inline run.Script, so these never reach it: %s."
            " Write them into its text, or use run.Script(path=…).",
            " ".join(arguments),
        )
