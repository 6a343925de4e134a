"""Overrides (`section.field=value`) and YAML files: parsed, formatted, and applied to a tree of dataclasses.

OmegaConf parses values; the annotations of the dataclasses say which are allowed. A tree changes only if every setting is
valid. Imports neither torch nor megatron-core, and works on any dataclass whose fields are values or dataclasses.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import io
import itertools
import json
import os
import re
import shlex
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bridge_profiling.common.errors import ProfilingConfigError, TraceError, require
from bridge_profiling.common.regular_files import read_regular
from bridge_profiling.settings.yaml_values import Given, convert, describe, is_mapping, kind, members, read_scalar

_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2})(?P<key>[A-Za-z_][^\s=]*)\s*=\s*(?P<text>.*)", re.DOTALL)

#: No setting is deeper, and YAML's parser calls itself for each level.
_DEEPEST = 32

#: Bytes of a file of settings, and values in it with those that it repeats by reference: ten lines can stand for 10^9.
_MAX_FILE_BYTES, _MAX_VALUES = 1 << 20, 100_000

#: Text that Hydra, OmegaConf and a shell all read unchanged. NeMo-Run passes the arguments of a Script to a shell on Slurm
#: and directly to the process elsewhere, so no quoting is right in both places.
_PLAIN_TEXT = re.compile(r"[\w./:@%+-]+", re.ASCII)
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "none", "nan", "inf"}


@dataclass(frozen=True)
class Override:
    """One `section.field=value`; `prefix` is Hydra's `+` or `++`, or empty."""

    key: str
    text: str
    prefix: str = ""

    @property
    def value(self) -> Any:
        """The value as YAML; `text` where it is not YAML or refers to variables of another machine."""
        with suppress(ProfilingConfigError):
            return _parse(self.key, self.text).value
        return self.text


def parse_override(argument: str) -> Override | None:
    """Parse an argument such as `a.b=1`, `++a.b=1` or `'a.b=1'`; None if it is not an override."""
    match = _OVERRIDE.fullmatch(unquote(argument).strip())
    return Override(match["key"], match["text"], match["prefix"]) if match else None


def format_override(key: str, value: object) -> str:
    """An override that sets `key` to `value`: `a.b=true`, `a.b=null`, `a.b=[0,1]`, `a.b=["--c=d,e"]`, `a.b=text`."""
    return f"{key}={format_value(value)}"


def format_value(value: object) -> str:
    """A value as typed in an override."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_format_item, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _format_item(item: object) -> str:
    return json.dumps(item) if isinstance(item, str) and not _PLAIN_TEXT.fullmatch(item) else format_value(item)


def check_plain_text(value: str, name: str) -> None:
    """Raise ProfilingConfigError for text that an override cannot carry: spaces, quotes, `=`, `$`, `null`, a number, …"""
    word = value.lower().lstrip("+-")
    require(
        _PLAIN_TEXT.fullmatch(value) and word not in _NOT_TEXT and isinstance(Override(name, value).value, str),
        f"{name}={value!r} cannot be passed to a run.Script as an override",
        why="a shell or the override parser would read it as something else",
        instead=f"Use letters, digits and ./_:@%+- in {name}, or write the arguments yourself in script_args_converter_fn",
    )


def apply_overrides(config: object, overrides: Iterable[str]) -> None:
    """Apply `section.field=value` settings in place; the last one for a field wins.

    Args:
        config: a dataclass whose fields are values or dataclasses. A section that is None is created when one of its
            fields is set.
        overrides: Hydra's syntax without additions and removals: `a.b=1e-3`, `a.b=[0,1]`, `a.b=null`, `++a.b=true`.
            Launchers may leave quotes around a whole argument, and NeMo-Run appends an empty argument: both are ignored.

    Raises:
        ProfilingConfigError: an unknown key, a value of the wrong type, or an argument that is not an override. Nothing is
            changed then.
    """
    arguments = filter(None, (unquote(argument).strip() for argument in overrides))
    checked = [_checked(argument) for argument in arguments]
    _apply(config, [(override.key, _parse(override.key, override.text)) for override in checked])


def apply_yaml(config: object, path: str | Path, *, section: str | None = None) -> None:
    """Apply the settings of a YAML file in place, as `apply_overrides` does.

    Args:
        config: as of `apply_overrides`.
        path: the file.
        section: apply this section alone.

    Raises:
        ProfilingConfigError: the file cannot be read (see `load_yaml`) or lacks the section, or a setting in it is wrong.
    """
    settings = load_yaml(path)
    if section is not None:
        example = f"Write `{section}:` and, indented below it, a field and its value"
        require(section in settings, f"{path} has no section {section}", instead=example)
        settings = {section: settings[section]}
    try:
        _apply(config, [(key, Given(value)) for key, value in settings.items()])
    except ProfilingConfigError as error:
        raise ProfilingConfigError(f"{path}: {error.what}", why=error.why, instead=error.instead) from None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, with `${…}` interpolations resolved.

    Raises:
        ProfilingConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    example = "Write sections with fields under them, for example `train:` and, indented below it, `train_iters: 10`"
    try:
        text = read_regular(Path(path), _MAX_FILE_BYTES)
        if (node := yaml.compose(text, Loader=yaml.SafeLoader)) is not None:
            _count(node, {})
        content = OmegaConf.to_container(OmegaConf.load(io.BytesIO(text)), resolve=True)
    except TraceError as error:
        # Settings are read several times, by the ranks too, and a pipe only once.
        instead = "Write the settings to a file, and type its path: a pipe or a device is not read"
        raise ProfilingConfigError(str(error), instead=instead) from None
    except RecursionError:
        raise ProfilingConfigError(f"{path} is nested too deeply", instead=example) from None
    except FileNotFoundError:
        raise ProfilingConfigError(
            f"{path} does not exist", why=f"the working directory is {Path.cwd()}", instead="Type the path of a YAML file"
        ) from None
    except OSError as error:
        # OmegaConf itself raises OSError for a file with a single number or word.
        why = error.strerror or "it holds a single value instead of sections"
        raise ProfilingConfigError(f"{path} cannot be read", why=why, instead=example) from None
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ProfilingConfigError(f"{path} is not valid YAML", why=_reason(error), instead=example) from None
    if not isinstance(content, dict):
        raise ProfilingConfigError(f"{path} holds a {kind(content)}", why="a mapping was expected", instead=example)
    return {str(key): value for key, value in content.items()}


def config_files(arguments: Iterable[str]) -> list[str]:
    """The existing files among `--config FILE` and `--config=FILE` in the arguments of a script."""
    files = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        option, equals, text = argument.partition("=")
        if option == "--config":
            files.append(text if equals else following)
    return [file for file in files if os.path.isfile(file)]


def unquote(argument: str) -> str:
    """The argument without shell quotes around it; torchrun under NeMo-Run's LocalExecutor leaves them there."""
    if argument[:1] not in ("'", '"'):
        return argument
    try:
        words = shlex.split(argument)
    except ValueError:
        return argument
    return words[0] if len(words) == 1 else argument


def _checked(argument: str) -> Override:
    """The override in an argument of `apply_overrides`, or the reason why it is not one."""
    override, bare = parse_override(argument), argument.lstrip("~+")
    require(
        not argument.startswith("~") and (override is None or override.prefix != "+"),
        f"{argument!r} {'removes' if argument.startswith('~') else 'adds'} a setting",
        why="the fields of a configuration are fixed",
        instead=f"Leave the {argument[0]} out: {bare if '=' in bare else f'{bare}=null'}",
    )
    if override is None:
        raise ProfilingConfigError(
            f"{argument!r} is not of the form name=value",
            instead="Type section.field=value, for example train.train_iters=10",
        )
    return override


def _parse(key: str, text: str) -> Given:
    """A typed value. Text that YAML refuses, or changes, has a `problem`: a text field still accepts it as it is."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return Given(text, text, problem="it is a comment" if text else "")
        # Of a single value all the text counts, with a comment after it.
        return read_scalar(node, text) if isinstance(node, yaml.ScalarNode) else _given(node, text, set())
    except OmegaConfBaseException as error:
        raise ProfilingConfigError(
            f"{key}={text[:200]} cannot be resolved",
            why=_reason(error),
            instead=f"Type {key}='${{oc.env:HOME}}' for a variable",
        ) from None
    except RecursionError:
        return Given(text, text, problem=f"it is nested more than {_DEEPEST} deep")
    except (YAMLError, ValueError) as error:
        # nsys' %q{RANK} is not YAML. Python reads no integer of more than 4,300 digits.
        return Given(text, text, problem=str(getattr(error, "problem", None) or error)[:200])


def _given(node: yaml.Node, text: str, seen: set[yaml.Node], depth: int = 0) -> Given:
    """The value of a node that was composed from `text`; ValueError for what grows beyond all bounds."""
    typed = text[node.start_mark.index : node.end_mark.index]
    if node in seen:
        raise ValueError("it refers to another part of itself")
    seen.add(node)
    if isinstance(node, yaml.ScalarNode):
        return read_scalar(node, typed)
    if depth == _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if isinstance(node, yaml.SequenceNode):
        parts = tuple(_given(item, text, seen, depth + 1) for item in node.value)
        return Given([part.value for part in parts], typed, parts=parts)
    entries = [(_given(key, text, seen, depth + 1), _given(item, text, seen, depth + 1)) for key, item in node.value]
    values = {key.value: item.value for key, item in entries if isinstance(key.value, str | int | float) and not key.problem}
    if len(values) < len(entries):
        raise ValueError("a key in it is not text, or comes twice")
    return Given(values, typed, parts=tuple(item for _, item in entries))


def _count(node: yaml.Node, counts: dict[yaml.Node, int], depth: int = 0) -> int:
    """The number of values that a node stands for; ValueError for too many, or if they are nested too deeply."""
    if depth == _DEEPEST and not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if node not in counts:
        counts[node] = 1  # of a node inside itself, YAML's own error is better
        inside = () if isinstance(node, yaml.ScalarNode) else node.value
        for each in itertools.chain.from_iterable(inside) if isinstance(node, yaml.MappingNode) else inside:
            counts[node] += _count(each, counts, depth + 1)
        if counts[node] > _MAX_VALUES:
            raise ValueError(f"it stands for more than {_MAX_VALUES:,} values")
    return counts[node]


def _apply(config: object, settings: Iterable[tuple[str, Given]]) -> None:
    """Assign each value to the field at its dotted path; if one is invalid, undo all and raise."""
    with ExitStack() as undo:
        for key, given in settings:
            _assign(config, config, key.split("."), given, (), undo)
        undo.pop_all()


def _assign(root: object, owner: Any, keys: Sequence[str], given: Given, where: tuple[str, ...], undo: ExitStack) -> None:
    """Assign one value; `where` is the path from `root` to `owner`, and `keys` the path from there to the field."""
    (name, *rest), hints = keys, _field_hints(type(owner))
    if name not in hints:
        raise _unknown_key(root, where, keys, list(hints), given)
    path = (*where, name)
    dotted, hint, current = ".".join(path), hints[name], getattr(owner, name)
    section = _section_type(hint, current)
    if section is None:
        if rest and not is_mapping(hint):
            raise ProfilingConfigError(
                f"{dotted} has no field {rest[0]!r}",
                why=f"it is a value ({describe(hint)}), not a section",
                instead=f"Type {dotted}={given.typed}",
            )
        value = _with_entries(current, rest, given, hint, dotted)
    elif rest or isinstance(given.value, Mapping):
        value = current
        if value is None:
            try:
                value = section()
            except TypeError as error:
                raise ProfilingConfigError(
                    f"{dotted} is null and has no default value", why=str(error), instead="Set it in the recipe's Python code"
                ) from None
        entries = (
            [(rest, given)]
            if rest
            else [(str(key).split("."), item) for key, item in zip(given.value, given.items(), strict=True)]
        )
        for deeper, entry in entries:
            _assign(root, value, deeper, entry, path, undo)
    elif given.value is None and type(None) in members(hint):
        value = None
    else:
        names = list(_field_hints(section))
        instead = f"Type {dotted}.field=value; its fields: {_listing(names)}" if names else f"Leave {dotted} out"
        raise ProfilingConfigError(f"{dotted} is a section, and cannot be {given}", instead=instead)
    if value is not current:
        undo.callback(setattr, owner, name, current)
        setattr(owner, name, value)


def _field_hints(cls: type) -> dict[str, Any]:
    """The types of the fields that can be set, without computed ones."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        # An annotation imported only for type checkers; values cannot be checked against it.
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def _section_type(hint: object, current: object) -> type | None:
    if dataclasses.is_dataclass(current):
        return type(current)
    return next((m for m in members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m)), None)


def _with_entries(current: Any, keys: Sequence[str], given: Given, hint: object, dotted: str) -> Any:
    """The converted value; for a dict field, a copy with one entry set (`keys` is its path) or a whole mapping merged in."""
    if not keys and not (is_mapping(hint) and isinstance(given.value, Mapping)):
        return convert(given, hint, dotted)
    mapping = next((m for m in members(hint) if typing.get_origin(m) in (dict, collections.abc.Mapping)), dict[Any, Any])
    key_hint, value_hint = typing.get_args(mapping)
    result = dict(current or {})
    for key, value in [(keys[0], given)] if keys else zip(given.value, given.items(), strict=True):
        path, key = f"{dotted}.{key}", convert(Given(key, str(key)), key_hint, f"the key {dotted}.{key}")
        result[key] = _with_entries(result.get(key), keys[1:], value, value_hint, path)
    return result


def _unknown_key(
    root: Any, where: tuple[str, ...], keys: Sequence[str], names: list[str], given: Given
) -> ProfilingConfigError:
    section, wrong = ".".join(where) or "the configuration", ".".join((*where, *keys))
    nearest = _nearest(wrong, list(_paths(root, ())))
    if nearest is not None:
        instead = f"Type {nearest}{f'={given.text}' if given.text is not None else ''}"
    else:
        instead = f"Fields of {section}: {_listing(names)}" if names else f"Leave it out: {section} has no fields yet"
    return ProfilingConfigError(f"{wrong} does not exist", why=f"{section} has no field {keys[0]!r}", instead=instead)


def _nearest(wrong: str, paths: Sequence[str]) -> str | None:
    """The path with the most similar last name; of several, the one that is most similar as a whole."""

    def similarity(path: str) -> tuple[float, float]:
        pairs = ((path.rpartition(".")[2], wrong.rpartition(".")[2]), (path, wrong))
        last_name, whole = (difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return last_name, whole

    best = max(paths, key=similarity, default=None)
    return best if best is not None and similarity(best)[0] >= 0.75 else None


def _paths(owner: Any, where: tuple[str, ...]) -> Iterator[str]:
    """The dotted paths of all values below `owner`, an instance or a class."""
    for name, hint in _field_hints(owner if isinstance(owner, type) else type(owner)).items():
        current = None if isinstance(owner, type) else getattr(owner, name)
        section = _section_type(hint, current)
        if section is None:
            yield ".".join((*where, name))
        else:
            yield from _paths(section if current is None else current, (*where, name))


def _listing(names: Sequence[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _reason(error: Exception) -> str:
    """A parser's message on one line."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None:
        return str(error).splitlines()[0][:300]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else str(problem)
