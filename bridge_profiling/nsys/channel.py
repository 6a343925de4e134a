"""The files through which a training and the supervisor of its nsys communicate, in a directory that only the two know.

Each message is one JSON file that appears whole, named after its type. Captures are numbered from 1. Starts nothing, and knows
no option of nsys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from bridge_profiling.common.atomic import write_json
from bridge_profiling.common.errors import CaptureError

#: Names the directory in the environment of a training that a supervisor started.
CHANNEL_VARIABLE = "BRIDGE_PROFILING_NSYS"

#: In the environment of a rank that trains without the nsys it was asked to use: the reason.
REFUSED_VARIABLE = "BRIDGE_PROFILING_NSYS_REFUSED"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The supervisor's task, written before it starts."""

    rank: int  # global rank
    supervisor: int  # its pid
    nsys: list[str]  # the nsys command, without the application
    notes: list[str]  # the version, the options, and the parts of the request that this nsys can't fulfil; for the manifest
    command: list[str]  # the training's command
    report: str  # the report's path as nsys writes it; each of several reports gets a number before its suffix
    export_sqlite: bool  # whether to export each report
    captures: int  # how many capture ranges nsys records
    reports_with_range: bool  # whether nsys writes the report when the range ends, not when the training does


@dataclass(frozen=True)
class Training:
    """The training process, written by the supervisor when it runs."""

    pid: int


@dataclass(frozen=True)
class Capture:
    """Where one capture's manifest and report belong, and whether the window has closed; written by the training."""

    manifest: str
    report: str
    stopped: bool = False


@dataclass(frozen=True)
class Delivery:
    """The files of one capture in their final place, the report first, and the error, if any; written by the supervisor."""

    artifacts: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Exit:
    """The training's exit code, written by the training, since a lost nsys can't pass it on."""

    code: int


MessageT = TypeVar("MessageT", Spec, Training, Capture, Delivery, Exit)


@dataclass(frozen=True)
class Channel:
    """The channel of one training and its supervisor."""

    directory: Path

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str] = os.environ) -> Channel | None:
        """The channel this training was started with; None without a supervisor and in processes the training started."""
        directory = environ.get(CHANNEL_VARIABLE)
        if not directory:
            return None
        channel = cls(Path(directory))
        training = channel.read(Training)
        return channel if training is None or training.pid == os.getpid() else None

    @property
    def spec(self) -> Spec:
        """The supervisor's task; raises CaptureError once the supervisor has removed the channel."""
        spec = self.read(Spec)
        if spec is None:
            raise CaptureError("the supervisor of this rank's nsys is gone")
        return spec

    def write(self, message: MessageT, number: int | None = None) -> None:
        """Write a message; `number` is that of its capture."""
        write_json(self._path(type(message), number), asdict(message))

    def read(self, kind: type[MessageT], number: int | None = None) -> MessageT | None:
        """The message of this kind; None while there is none. `number` is that of its capture."""
        try:
            return kind(**json.loads(self._path(kind, number).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def announce(self, capture: Capture) -> int:
        """Announce the next capture and return its number, from 1. Replaces an announced capture that never stopped."""
        captures = self.spec.captures
        for number in range(1, captures + 1):
            earlier = self.read(Capture, number)
            if earlier is None or not earlier.stopped:
                self.write(capture, number)
                return number
        raise CaptureError(f"nsys was started to make {captures} captures and has made them")

    def _path(self, kind: type, number: int | None) -> Path:
        name = kind.__name__.lower()
        return self.directory / (f"{name}.json" if number is None else f"{name}-{number}.json")
