"""Packs captures into one file: a sixth of the size that the same events have as JSON and xz.

    python tools/columns.py FILE.columns... DIRECTORY    # writes the captures as their profilers left them

Most of a trace is the same in every iteration, on every rank and in every case: which operators follow each other, and which
kernels they launch. So an event is stored as the number of its template (everything but its numbers) and its numbers. Each
column holds differences, and all documents of a file share the templates and one compression. The noise of times remains: each
decimal digit of a microsecond costs 0.8 bytes an event. Starts and ends are rounded, so that the nesting of events stays.
"""

from __future__ import annotations

import argparse
import json
import lzma
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: At the begin of a file.
_MAGIC = b"everyday1"

_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26, "lc": 3, "lp": 0, "pb": 0}]

_TIMES = ("ts", "dur")


def encode(documents: dict[str, dict[str, Any]], ticks: int) -> bytes:
    """Pack documents.

    Args:
        documents: by the path each is kept at: Kineto traces with times in microseconds, and others, such as manifests.
        ticks: precision of times, as a part of a microsecond: 10 keeps 0.1 us.
    """
    templates: dict[str, int] = {}
    parts, listed = [], []
    for path, document in documents.items():
        columns: dict[str, list[int]] = {"template": []} if "traceEvents" in document else {}
        for event in sorted(document.get("traceEvents", []), key=_place):
            template, numbers = _split(event, ticks)
            columns["template"].append(templates.setdefault(json.dumps(template, separators=(",", ":")), len(templates)))
            for name, value in numbers.items():
                columns.setdefault(name, []).append(value)
        keys = {name: value for name, value in document.items() if name != "traceEvents"}
        listed.append({"path": path, "keys": keys, "columns": {name: len(values) for name, values in columns.items()}})
        parts += [_differences(np.array(values, np.int64)) for values in columns.values()]
    head = json.dumps({"ticks": ticks, "templates": list(templates), "traces": listed}, separators=(",", ":")).encode()
    body = b"".join([struct.pack("<Q", len(head)), head, *parts])
    return _MAGIC + lzma.compress(body, format=lzma.FORMAT_XZ, filters=_XZ)


def _place(event: dict[str, Any]) -> tuple[str, str, str, float]:
    return str(event.get("cat")), str(event.get("pid")), str(event.get("tid")), event["ts"]


def _split(event: dict[str, Any], ticks: int) -> tuple[dict[str, Any], dict[str, int]]:
    template = {name: value for name, value in event.items() if name not in _TIMES}
    # Without the whole microseconds, products of floating-point numbers are exact enough for nanoseconds.
    whole, part = divmod(event["ts"], 1)
    numbers = {"ts": int(whole) * ticks + round(part * ticks)}
    if "dur" in event:
        numbers["dur"] = round((part + event["dur"]) * ticks) - round(part * ticks)
    if arguments := event.get("args", {}):
        numbers |= {f"args.{name}": value for name, value in arguments.items() if type(value) is int}
        # A number's place among the arguments; its value has a column.
        template["args"] = {name: 0 if type(value) is int else value for name, value in arguments.items()}
    template["numbers"] = list(numbers)
    return template, numbers


def _differences(values: NDArray[np.int64]) -> bytes:
    """Differences of neighbours, small ones near zero, the bytes of the same weight side by side."""
    steps = np.diff(values, prepend=np.int64(0))
    folded = ((steps << 1) ^ (steps >> 63)).astype("<u8")
    return folded.view(np.uint8).reshape(-1, 8).T.tobytes()


def decode(data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each document, and the path it is kept at."""
    body = lzma.decompress(data.removeprefix(_MAGIC))
    (length,) = struct.unpack_from("<Q", body)
    head, place = json.loads(body[8 : 8 + length]), 8 + length
    templates = [json.loads(text) for text in head["templates"]]
    for listed in head["traces"]:
        columns = {}
        for name, count in listed["columns"].items():
            planes = np.frombuffer(body, np.uint8, 8 * count, place).reshape(8, count)
            folded = np.ascontiguousarray(planes.T).view("<u8").reshape(-1)
            steps = (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
            columns[name] = iter(np.cumsum(steps).tolist())
            place += 8 * count
        events = [_event(templates[number], columns, head.get("ticks", 10)) for number in columns.get("template", ())]
        yield listed["path"], listed["keys"] | ({"traceEvents": events} if columns else {})


def _event(template: dict[str, Any], columns: dict[str, Iterator[int]], ticks: int) -> dict[str, Any]:
    event = {name: value for name, value in template.items() if name != "numbers"}
    arguments = dict(event.get("args", {}))
    for name in template["numbers"]:
        value = next(columns[name])
        if name in _TIMES:
            event[name] = value / ticks
        else:
            arguments[name.removeprefix("args.")] = value
    return event | {"args": arguments} if arguments else event


def write(documents: Iterable[tuple[str, dict[str, Any]]], target: Path) -> None:
    """Write documents at their paths below `target`."""
    for path, document in documents:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    for file in options.files:
        write(decode(file.read_bytes()), options.directory)
