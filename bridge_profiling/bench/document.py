"""The file of results: written beside the measurement, read at the desk. Imports no torch.

Its fields are stable: times are microseconds, sizes bytes, bandwidths 10⁹ bytes a second. Keys may be added; none changes its
meaning within a `schema_version`. One file holds results of several benchmarks: a new one replaces that of its kind which was
measured in the same circumstances, and leaves the others.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_profiling.errors import ProfilingConfigError

SCHEMA_VERSION = 1

#: What such a file is called where it is looked for beside captures.
NAME = "bench.json"

#: What says that a file is one of ours.
_FORMAT = "bridge-profiling bench"

#: What makes two results of a kind those of the same circumstances.
_CIRCUMSTANCES = ("kind", "world_size", "hosts", "backend", "dtype", "device", "subject")

_NUMBER = (int, float)

#: What is read of each kind when a capture is compared with it: of a result, and of each of its rows.
_READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "collectives": (
        {"world_size": int, "hosts": int, "backend": str, "device": str},
        {"operation": str, "message_bytes": int, "algorithm_bandwidth_gbs": _NUMBER, "correct": bool},
    ),
    "copies": (
        {"device": str},
        {"direction": str, "host_memory": str, "bytes": int, "bandwidth_gbs": _NUMBER, "correct": bool},
    ),
    "step": ({"device": str, "subject": str}, {"time_us.median": _NUMBER}),
    # Without a rate where a setting could not be measured.
    "data_loader": ({"subject": str}, {"batches_per_s": (dict, type(None))}),
}


@dataclass(frozen=True)
class BenchDocument:
    """Results of benchmarks.

    Args:
        path: the file.
        results: each with its `kind`, its circumstances and its `rows`.
    """

    path: Path
    results: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Results of one benchmark.

        Args:
            kind: as in `requests.KINDS`.
        """
        return [result for result in self.results if result.get("kind") == kind]


def read(path: Path) -> BenchDocument:
    """Read results.

    Args:
        path: the file.

    Raises:
        ProfilingConfigError: it is not there, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        made_by = f"bridge-profiling bench collectives -o {path / NAME if path.is_dir() else path}"
        raise ProfilingConfigError(f"{path} cannot be read: {error.strerror}", instead=f"Type {made_by}") from error
    except ValueError as error:
        raise _foreign(path, f"it is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise _foreign(path, "it does not say that it is one")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise _foreign(path, f"it has schema version {found.get('schema_version')}, and this reads {SCHEMA_VERSION}")
    results = found.get("results")
    if not isinstance(results, list) or not all(_is_result(result) for result in results):
        raise _foreign(path, "its results are damaged")
    return BenchDocument(path, results)


def check_addable(path: Path) -> list[dict[str, Any]]:
    """What a file holds that a result can be added to.

    Args:
        path: the file.

    Raises:
        ProfilingConfigError: it holds something else.
    """
    try:
        return read(path).results
    except ProfilingConfigError as error:
        raise ProfilingConfigError(
            error.what, why=error.why, instead="Name another file with -o, or remove this one"
        ) from error


def add(path: Path, result: dict[str, Any]) -> BenchDocument:
    """Write a result into a file, which keeps results of other circumstances.

    Args:
        path: the file; made if it is not there.
        result: as a benchmark gives it.

    Raises:
        ProfilingConfigError: there is a file that holds something else, or it cannot be written.
    """
    kept = check_addable(path) if path.exists() else []
    results = [each for each in kept if _circumstances(each) != _circumstances(result)] + [result]
    write(path, results)
    return BenchDocument(path, results)


def write(path: Path, results: list[dict[str, Any]]) -> None:
    """Write results; the file is there when it is whole.

    Args:
        path: the file.
        results: all that it will hold.

    Raises:
        ProfilingConfigError: it cannot be written.
    """
    text = json.dumps({"format": _FORMAT, "schema_version": SCHEMA_VERSION, "results": results}, indent=1, allow_nan=False)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        # mkstemp's file is its owner's alone; a result is for whoever may read the directory.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ProfilingConfigError(
            f"{path} cannot be written: {error.strerror}", instead="Name another file with -o"
        ) from error


def _circumstances(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(json.dumps(result.get(name)) for name in _CIRCUMSTANCES)


def _is_result(result: Any) -> bool:
    if not (
        isinstance(result, dict)
        and isinstance(result.get("kind"), str)
        and isinstance(result.get("rows"), list)
        and all(isinstance(row, dict) for row in result["rows"])
    ):
        return False
    # A kind that a later version measures has fields that are not known here, and nothing is read of it.
    of_result, of_row = _READ.get(result["kind"], ({}, {}))
    return _has(result, of_result) and all(_has(row, of_row) for row in result["rows"])


def _has(found: dict[str, Any], fields: dict[str, Any]) -> bool:
    for name, kinds in fields.items():
        value: Any = found
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return False
            value = value[part]
        if not isinstance(value, kinds):
            return False
    return True


def _foreign(path: Path, why: str) -> ProfilingConfigError:
    return ProfilingConfigError(
        f"{path} is no result of bridge-profiling bench", why=why, instead="Name a file that bridge-profiling bench -o has made"
    )
