"""Settings typed as `section.field=value`, or written in a YAML file, applied to a tree of dataclasses.

OmegaConf parses them; the dataclasses' annotations say what is allowed. All or nothing: a tree is
changed only after every setting is known to be right. Never imports torch or megatron-core, and knows no recipe: any
dataclass whose fields are values or further dataclasses will do.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import shlex
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.values import Given, convert, describe, is_mapping, kind, members


class _Staged:
    """Assignments held back until all of them are known to be right; reading sees those already staged."""

    def __init__(self, root: object) -> None:
        self.root = root
        self._values: dict[tuple[int, str], tuple[object, str, object]] = {}

    def read(self, owner: object, name: str) -> Any:
        key = (id(owner), name)
        return self._values[key][2] if key in self._values else getattr(owner, name)

    def write(self, owner: object, name: str, value: object) -> None:
        self._values[(id(owner), name)] = (owner, name, value)

    def commit(self) -> None:
        for owner, name, value in self._values.values():
            setattr(owner, name, value)


def apply_overrides(config: object, overrides: Iterable[str]) -> None:
    """Apply `section.field=value` settings in place; of two that name the same field, the later wins.

    Args:
        config: a dataclass whose fields are values or further dataclasses. A section that is None is created when a
            setting inside it is given.
        overrides: Hydra's syntax without additions and removals: `a.b=1e-3`, `a.b=[0,1]`, `a.b=null`, `++a.b=true`.
            Quotes around a whole argument are taken off (a launcher may leave them there), and an empty argument is
            passed over (NeMo-Run appends one).

    Raises:
        ProfilingConfigError: an unknown key, a value of the wrong type, or an argument that is no setting. Nothing has
            been changed then.
    """
    staged = _Staged(config)
    for argument in overrides:
        argument = unquote(argument).strip()
        if argument:
            key, text = _split(argument)
            _stage(staged, config, key.split("."), _parse(key, text), ())
    staged.commit()


def apply_yaml(config: object, path: str | Path) -> None:
    """Apply the settings of a YAML file in place, as `apply_overrides` does.

    Raises:
        ProfilingConfigError: the file cannot be read (see `load_yaml`), or a setting in it is wrong.
    """
    settings = load_yaml(path)
    staged = _Staged(config)
    try:
        _stage_mapping(staged, config, settings, ())
    except ProfilingConfigError as error:
        raise ProfilingConfigError(f"{path}: {error.what}", why=error.why, instead=error.instead) from None
    staged.commit()


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, its `${…}` interpolations resolved.

    Raises:
        ProfilingConfigError: the file is missing, cannot be read, is no YAML, or holds something other than a mapping.
    """
    example = "Write sections with fields under them, for example `train:` and, indented below it, `train_iters: 10`"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ProfilingConfigError(
            f"{path} does not exist", why=f"looked for it from {Path.cwd()}", instead="Type the path of a YAML file"
        ) from None
    except OSError as error:
        # OmegaConf itself raises OSError for a file that holds a bare number or word.
        why = error.strerror or "it holds a single value, where sections were expected"
        raise ProfilingConfigError(f"{path} cannot be read", why=why, instead=example) from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ProfilingConfigError(f"{path} is not valid YAML", why=_reason(error), instead=example) from None
    if not isinstance(content, dict):
        raise ProfilingConfigError(f"{path} holds a {kind(content)}", why="a mapping was expected", instead=example)
    return {str(key): value for key, value in content.items()}


def unquote(argument: str) -> str:
    """The argument without shell quotes around the whole of it, as torchrun under NeMo-Run's LocalExecutor leaves them."""
    if argument[:1] not in ("'", '"'):
        return argument
    try:
        words = shlex.split(argument)
    except ValueError:
        return argument
    return words[0] if len(words) == 1 else argument


def _split(argument: str) -> tuple[str, str]:
    if argument.startswith("~"):
        raise ProfilingConfigError(
            f"{argument!r} would remove a setting",
            why="a configuration's fields are fixed; they have values but cannot be taken away",
            instead=f"Give it a value, for example {argument[1:].partition('=')[0]}=null where null is allowed",
        )
    if argument.startswith("+") and not argument.startswith("++"):
        raise ProfilingConfigError(
            f"{argument!r} would add a setting",
            why="a configuration's fields are fixed; they can be set but none can be added",
            instead=f"Leave the + out: {argument[1:]}",
        )
    key, equals, text = argument.removeprefix("++").partition("=")
    if not equals or not key.strip():
        raise ProfilingConfigError(
            f"{argument!r} is not a setting",
            why="there is no '=' in it" if not equals else "nothing stands before the '='",
            instead="Type section.field=value, for example train.train_iters=10",
        )
    return key.strip(), text.strip()


def _parse(key: str, text: str) -> Given:
    if not text:
        return Given("", text)
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)
    except YAMLError as error:
        # Not the last word: a field that holds text takes it as it stands (nsys' %q{RANK} is no YAML).
        return Given(text, text, problem=str(getattr(error, "problem", error)))
    except OmegaConfBaseException as error:
        raise ProfilingConfigError(
            f"{key}={text} cannot be resolved", why=_reason(error), instead=f"Type {key}='${{oc.env:HOME}}' for a variable"
        ) from None
    return Given(typing.cast(dict, parsed)["value"], text)


def _stage_mapping(staged: _Staged, owner: object, settings: Mapping[Any, Any], where: tuple[str, ...]) -> None:
    for key, value in settings.items():
        _stage(staged, owner, str(key).split("."), Given(value), where)


def _stage(staged: _Staged, owner: Any, keys: Sequence[str], given: Given, where: tuple[str, ...]) -> None:
    """Stage one setting; `keys` lead from `owner`, which stands at `where` in the tree, to the field."""
    (name, *rest), hints = keys, _field_hints(type(owner))
    if name not in hints:
        raise _unknown_key(staged.root, where, keys, list(hints), given)
    path = (*where, name)
    dotted, hint, current = ".".join(path), hints[name], staged.read(owner, name)
    section = _section_type(hint, current)
    if section is None:
        if rest and not is_mapping(hint):
            raise ProfilingConfigError(
                f"{dotted} has no field {rest[0]!r}",
                why=f"it is a value ({describe(hint)}), not a section",
                instead=f"Type {dotted}={given.typed}",
            )
        value = _with_entries(current, rest, given, hint, dotted) if is_mapping(hint) else convert(given, hint, dotted)
        staged.write(owner, name, value)
    elif rest or isinstance(given.value, Mapping):
        if current is None:
            current = _new_section(section, dotted)
            staged.write(owner, name, current)
        if rest:
            _stage(staged, current, rest, given, path)
        else:
            _stage_mapping(staged, current, given.value, path)
    elif given.value is None and type(None) in members(hint):
        staged.write(owner, name, None)
    else:
        raise _not_a_value(section, dotted, given)


def _field_hints(cls: type) -> dict[str, Any]:
    """The type of every field that may be set; those a class computes for itself are left out."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        # Some annotation was imported for type checkers alone, and a value cannot be checked against it.
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def _section_type(hint: object, current: object) -> type | None:
    if dataclasses.is_dataclass(current):
        return type(current)
    return next((m for m in members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m)), None)


def _new_section(section: type, dotted: str) -> object:
    try:
        return section()
    except TypeError as error:
        raise ProfilingConfigError(
            f"{dotted} is not set, and cannot be made from nothing", why=str(error), instead="Set it in the recipe's code"
        ) from None


def _not_a_value(section: type, dotted: str, given: Given) -> ProfilingConfigError:
    names = list(_field_hints(section))
    instead = f"Type {dotted}.field=value; its fields: {_listing(names)}" if names else f"Leave {dotted} out"
    return ProfilingConfigError(f"{dotted} is a section, and cannot be {given}", instead=instead)


def _with_entries(current: Any, keys: Sequence[str], given: Given, hint: object, dotted: str) -> Any:
    """A copy of a dict field with one entry set (`keys` lead to it), or with a whole mapping merged in."""
    if not keys and not isinstance(given.value, Mapping):
        return convert(given, hint, dotted)
    mapping = next((m for m in members(hint) if typing.get_origin(m) in (dict, collections.abc.Mapping)), dict[Any, Any])
    key_hint, value_hint = typing.get_args(mapping)
    result = dict(current or {})
    for key, value in [(keys[0], given)] if keys else [(key, Given(value)) for key, value in given.value.items()]:
        path, key = f"{dotted}.{key}", convert(Given(key, str(key)), key_hint, f"the key {dotted}.{key}")
        deeper = is_mapping(value_hint) or len(keys) > 1
        result[key] = (
            _with_entries(result.get(key), keys[1:], value, value_hint, path) if deeper else convert(value, value_hint, path)
        )
    return result


def _unknown_key(
    root: Any, where: tuple[str, ...], keys: Sequence[str], names: list[str], given: Given
) -> ProfilingConfigError:
    section = ".".join(where) or "the configuration"
    wrong = ".".join((*where, *keys))
    nearest = _nearest(root, wrong, where, keys, names)
    if nearest is not None:
        instead = f"Type {nearest}{f'={given.text}' if given.text is not None else ''}"
    else:
        instead = f"Fields of {section}: {_listing(names)}" if names else f"Leave it out: {section} has no fields yet"
    return ProfilingConfigError(f"{wrong} does not exist", why=f"{section} has no field {keys[0]!r}", instead=instead)


def _nearest(root: Any, wrong: str, where: tuple[str, ...], keys: Sequence[str], names: list[str]) -> str | None:
    paths = list(_paths(root, ()))
    same_name = [path for path in paths if path.rpartition(".")[2] == keys[-1]]
    if same_name:
        return max(same_name, key=lambda path: difflib.SequenceMatcher(None, path, wrong).ratio())
    for name in difflib.get_close_matches(keys[0], names, n=1):
        guess = ".".join((*where, name, *keys[1:]))
        below = [path for path in paths if path.startswith(".".join((*where, name)))]
        return next(iter(difflib.get_close_matches(guess, below, n=1)), ".".join((*where, name)))
    leaves = {path.rpartition(".")[2]: path for path in paths}
    return next((leaves[name] for name in difflib.get_close_matches(keys[-1], leaves, n=1, cutoff=0.75)), None)


def _paths(owner: Any, where: tuple[str, ...]) -> Iterator[str]:
    """The dotted path of every field that is a value, in a tree given by an instance or, where None, by its class."""
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
    """What a parser says, in one line."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None:
        return str(error).splitlines()[0]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else str(problem)
