"""Reads and edits the settings of a task: the config of a `run.Partial`, or the overrides of a `run.Script`."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import fiddle as fdl
import nemo_run as run
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from bridge_profiling.common.errors import ProfilingConfigError, one_line, require
from bridge_profiling.settings.overrides import Override, config_files, format_override, load_yaml, parse_override
from bridge_profiling.settings.profiling import FaultToleranceConfig, ProfilingConfig

logger = logging.getLogger(__name__)

Task: TypeAlias = run.Partial | run.Script

#: An override that a shell reads unchanged.
_UNQUOTED = re.compile(r"[\w./:@%+,=\[\]-]*", re.ASCII)

#: In the metadata of a `run.Script`: True if the script starts nsys itself on the profiled ranks.
STARTS_NSYS_KEY = "bridge_profiling.starts_nsys_itself"

#: The end of Fiddle's message about a value that it cannot serialize.
_UNSENDABLE = re.compile(r"of type <class '(?P<type>[^']+)'>\. Error occurred at path '<root>\.(?P<path>[^']*)'")

#: The way out for a config that NeMo-Run does not send: the job makes it.
_SCRIPT = (
    'Pass run.Script(path="train.py", entrypoint="python"), a script that makes the config, calls'
    " bridge_profiling.settings.overrides.apply_overrides(config, sys.argv[1:]), and trains"
)

#: The classes of sections that a config may lack.
_SECTIONS: dict[str, type] = {"profiling": ProfilingConfig, "ft": FaultToleranceConfig}


def check_task(task: object, plugin: str, section: str, names: Sequence[str]) -> None:
    """Check that a task is a Script, or a Partial whose config has these fields in a section."""
    if isinstance(task, run.Script):
        return
    check_is_task(task)
    config = _read(task, "config")
    require(
        config is not None and not isinstance(config, (str, int, float, list, dict)),
        f"{plugin} found no config in this run.Partial",
        why="its settings go into the argument `config`, a ConfigContainer",
        instead="Build the task as run.Partial(pretrain, config=run.Config(ConfigContainer)), or pass a run.Script",
    )
    target = _read(config, section)
    needed = [(config, section)] if target is None else []
    target = _section_class(config, section) if target is None else target
    for owner, name in [*needed, *((target, name) for name in names)]:
        made_by = fdl.get_callable(owner) if isinstance(owner, fdl.Buildable) else owner
        require(
            _accepts(owner, name),
            f"{plugin} needs the field {name!r} in {getattr(made_by, '__name__', type(made_by).__name__)}",
            why="the job reads its settings there",
            instead="Use a ConfigContainer with Megatron Bridge's sections (`profiling`, `ft`, `train`)",
        )


def check_is_task(task: object) -> None:
    """Raise ProfilingConfigError for anything but a function or a script, such as a ConfigContainer."""
    require(
        isinstance(task, run.Script | fdl.Partial),
        f"the task is a {type(task).__name__}",
        why="NeMo-Run submits a run.Partial (a function with its config) or a run.Script (a script with overrides)",
        instead=_SCRIPT,
    )


def check_sendable(task: Task) -> None:
    """Raise ProfilingConfigError for a run.Partial that NeMo-Run cannot serialize."""
    try:
        if isinstance(task, fdl.Partial):
            ZlibJSONSerializer().serialize(task)
    except Exception as error:
        # Fiddle's message holds the whole value, which may be a ConfigContainer.
        found = _UNSENDABLE.search(str(error))
        reason = f"{found['path']} is a {found['type']}" if found else one_line(error)
        raise ProfilingConfigError(
            f"the task {getattr(fdl.get_callable(task), '__name__', task)} cannot be sent to the job: {reason}",
            why="NeMo-Run sends plain values, lists, enums and functions of modules, but no torch.dtype or local function",
            instead=_SCRIPT,
        ) from error


def script_arguments(task: Task, converter: Callable[[Any], list[str]] | None, script_args: object) -> list[str] | None:
    """The arguments that a `script_args_converter_fn` makes for a Script; None for a Partial or without a converter."""
    require(
        converter is None or callable(converter),
        f"script_args_converter_fn={converter!r} is not a function",
        why="it is called with the plugin's script arguments",
        instead="Pass a function that takes them and returns a list of strings",
    )
    if converter is None or not isinstance(task, run.Script):
        return None
    arguments = converter(script_args)
    require(
        isinstance(arguments, list) and all(isinstance(argument, str) for argument in arguments),
        f"script_args_converter_fn returned {arguments!r}",
        why="its result is appended to the script's arguments",
        instead='Return a list of strings, for example ["--profile-step-start", "10"]',
    )
    return arguments


def write_settings(task: Task, section: str, values: Mapping[str, object], arguments: list[str] | None = None) -> None:
    """Set fields of a section: attributes of a Partial's config, overrides of a Script. A second call changes nothing.

    A missing section of a Partial's config becomes a `run.Config` of our class, or of the config's own. In a Script an override
    replaces an earlier one of the same field in place; `arguments` are appended in place of the overrides.
    """
    if not isinstance(task, run.Script):
        target = _read(task.config, section)
        if target is None:
            target = run.Config(_section_class(task.config, section))
            setattr(task.config, section, target)
        for name, value in values.items():
            setattr(target, name, list(value) if isinstance(value, list) else value)
        return
    if arguments is None:
        arguments = [_write_override(task, f"{section}.{name}", value) for name, value in values.items()]
    elif not any(task.args[i : i + len(arguments)] == arguments for i in range(len(task.args) - len(arguments) + 1)):
        task.args = [*task.args, *arguments]
    if isinstance(task.inline, str) and task.inline:
        logger.warning(
            "NeMo-Run passes no arguments to an inline run.Script, so it does not receive: %s."
            " Write them into its text, or use run.Script(path=…).",
            " ".join(arguments),
        )


def _write_override(task: run.Script, key: str, value: object) -> str:
    given = _overrides(task, key)
    text = next((override.prefix for override in given.values()), "") + format_override(key, value)
    # Slurm's shell removes these quotes; elsewhere our entry point does.
    argument = text if _UNQUOTED.fullmatch(text) else f"'{text}'"
    require(
        "'" not in text,
        f"{key}={value!r} cannot be passed to a run.Script as an override",
        why="a shell would read its quotes",
        instead="Leave out the quotes, or write the arguments yourself in script_args_converter_fn",
    )
    first, *others = [*given, len(task.args)]
    args = [*task.args[:first], argument, *task.args[first + 1 :]]
    task.args = [arg for i, arg in enumerate(args) if i not in others]
    return text


def _overrides(task: run.Script, key: str) -> dict[int, Override]:
    """The overrides of a key, by their position in the arguments."""
    parsed = {i: parse_override(str(arg)) for i, arg in enumerate(task.args)}
    return {i: override for i, override in parsed.items() if override is not None and override.key == key}


def read_setting(task: Task, section: str, name: str) -> Any:
    """A setting's value in a Partial's config or a Script's last override of it; None if it is not set."""
    if isinstance(task, run.Script):
        values = [override.value for override in _overrides(task, f"{section}.{name}").values()]
        return values[-1] if values else _file_setting(task, section, name)
    return _read(_read(_read(task, "config"), section), name)


def _file_setting(task: run.Script, section: str, name: str) -> Any:
    """A setting in the YAML files that a script of ours is given; of another script, `--config` may be anything."""
    value = None
    for file in config_files(map(str, task.args)) if starts_nsys(task) else ():
        values = load_yaml(file).get(section)
        value = values.get(name, value) if isinstance(values, Mapping) else value
    return value


def is_on(task: Task, section: str, name: str) -> bool:
    """Whether a boolean setting is on."""
    # Not its truth: an attribute of a mocked config is a Mock, which is truthy.
    return read_setting(task, section, name) in (True, "true")


def read_integer(task: Task, section: str, name: str) -> int | None:
    """An integer setting, or None if the submit host cannot know it."""
    value = read_setting(task, section, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def starts_nsys(task: Task) -> bool:
    """Whether the task starts nsys itself: STARTS_NSYS_KEY in a Script, `function.starts_nsys_itself` in a Partial."""
    if isinstance(task, run.Script):
        return (getattr(task, "metadata", None) or {}).get(STARTS_NSYS_KEY) is True
    return getattr(getattr(task, "__fn_or_cls__", None), "starts_nsys_itself", False) is True


def _read(target: Any, name: str) -> Any:
    try:
        return getattr(target, name, None)
    except ValueError:  # Fiddle's, for an unset field with a default factory
        return None


def _section_class(config: Any, section: str) -> Any:
    """The class of a missing section."""
    owner = fdl.get_callable(config) if isinstance(config, fdl.Buildable) else type(config)
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return _SECTIONS.get(section) or {field.name: field.default_factory for field in fields}.get(section)


def _accepts(target: Any, name: str) -> bool:
    if isinstance(target, fdl.Buildable):
        parameters = inspect.signature(fdl.get_callable(target)).parameters.values()
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)
    if dataclasses.is_dataclass(target):
        return name in {field.name for field in dataclasses.fields(target)} or hasattr(target, name)
    return True
