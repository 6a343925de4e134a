"""The user's own code that is measured: found by `module:factory`, called, and its errors told in one line."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from bridge_profiling.bench.failures import THEIR_ERRORS, MeasurementError, told
from bridge_profiling.bench.requests import module_and_name
from bridge_profiling.errors import ProfilingConfigError


def factory_of(text: str, option: str) -> Callable[..., Any]:
    """The function that a user names.

    Args:
        text: `module:factory`, importable from the working directory.
        option: whose value it is.

    Raises:
        ProfilingConfigError: there is no such module or function, or the module fails when it is imported.
    """
    module, name = module_and_name(text, option)
    try:
        found: Any = importlib.import_module(module)
    except THEIR_ERRORS as error:
        name_of_missing = error.name if isinstance(error, ModuleNotFoundError) else None
        missing = name_of_missing is not None and f"{module}.".startswith(f"{name_of_missing}.")
        why = f"there is no module {name_of_missing}" if missing else f"importing {module} fails: {told(error)}"
        raise ProfilingConfigError(
            f"{option} {text}: {why}",
            instead="Start in the module's directory, or put that on PYTHONPATH" if missing else "",
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ProfilingConfigError(f"{option} {text}: {module} has no function {name}")
    return found


def called(factory: Callable[..., Any], option: str, **offered: Any) -> Any:
    """What a factory gives, with those of the offered arguments that it takes.

    Args:
        factory: of `factory_of`.
        option: that named it.
        offered: arguments by name.

    Raises:
        ProfilingConfigError: it takes others, without which it cannot be called.
        MeasurementError: it failed.
    """
    taken = _taken(factory, offered)
    try:
        inspect.signature(factory).bind(**taken)
    except TypeError as error:
        can = f"takes no arguments, or of {', '.join(offered)} those that it wants" if offered else "takes no arguments"
        raise ProfilingConfigError(f"{option}: {error}", why=f"a factory {can}") from error
    except ValueError:  # a builtin without a signature
        pass
    try:
        return factory(**taken)
    except THEIR_ERRORS as error:
        raise MeasurementError(f"{option}: the factory failed: {told(error)}") from error


def takes(factory: Callable[..., Any], *names: str) -> bool:
    """Whether a factory takes all of some arguments by name.

    Args:
        factory: which.
        names: of the arguments.
    """
    return len(_taken(factory, dict.fromkeys(names))) == len(names)


def _taken(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}
