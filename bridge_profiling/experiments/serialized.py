"""Reads what NeMo-Run wrote with its serializer, as data: never imports, builds or runs what it names.

NeMo-Run's own reader imports the modules of the task, megatron-core and torch among them. A submit host may have
neither, and a diagnosis has no need of them.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge_profiling.errors import ProfilingConfigError

_KEY = re.compile(r"(?:Attr\(name|Index\(index|Key\(key)=(?P<value>.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Built:
    """A class or function with the arguments it would be called with.

    Attributes:
        target: its full name, for example `nemo_run.core.execution.slurm.SlurmExecutor`.
        arguments: the arguments given; those left to their defaults are missing.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of `target`."""
        return self.target.rpartition(".")[2]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or `default` where it was not given."""
        return self.arguments.get(name, default)

    def nested(self) -> dict[str, Any]:
        """The arguments as sections within sections."""
        return {name: value.nested() if isinstance(value, Built) else value for name, value in self.arguments.items()}


def load(text: str) -> Any:
    """A serialized task, executor or job: a Built, or a list of them.

    Raises:
        ProfilingConfigError: it is not what NeMo-Run writes.
    """
    try:
        document = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
        return _Reader(document["objects"]).value(document["root"])
    except (binascii.Error, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProfilingConfigError(
            f"this is not a task or an executor as NeMo-Run writes it: {error}",
            instead="Name the directory of an experiment, or of one of its jobs",
        ) from error


class _Reader:
    """Fiddle's JSON: objects by name, which refer to each other."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def value(self, node: Mapping[str, Any]) -> Any:
        kind = node["type"]
        if kind == "leaf":
            return node["value"]
        if kind == "ref":
            return self._object(self._objects[node["key"]])
        if kind == "pyref":
            return f"{node['module']}.{node['name']}"
        return None

    def _object(self, node: Mapping[str, Any]) -> Any:
        name = node["type"]["name"]
        items = [(_key(key), self.value(value)) for key, value in node["items"]]
        if name == "dict":
            return dict(items)
        if name in ("list", "tuple", "set", "frozenset"):
            return [value for _, value in items]
        target = self._target(node["metadata"])
        return Built(target or f"{node['type']['module']}.{name}", {str(key): value for key, value in items})

    def _target(self, metadata: Any) -> str | None:
        if not isinstance(metadata, Mapping) or metadata.get("type") != "ref":
            return None
        for key, value in self._objects[metadata["key"]]["items"]:
            if _key(key) == "fn_or_cls":
                return self.value(value)
        return None


def _key(text: str) -> Any:
    match = _KEY.fullmatch(text)
    if match is None:
        raise ValueError(f"unknown key {text!r}")
    return ast.literal_eval(match["value"])
