"""What a training and the supervisor of its nsys tell each other: small JSON files in a directory that only they know.

    spec.json        what the supervisor is to run, written before it starts
    capture.json     where manifest and report belong, written by the training when its hook opens
    stopped.json     the window is closed, written by the training
    capture-1.json, stopped-1.json, …   the same of an nsys that makes several captures, when a window opens and closes
    delivered.json   the report lies where it belongs, or why not, written by the supervisor
    exit.json        the training's exit code, for the case that nsys is gone and cannot tell it

Starts nothing and knows nothing of nsys' options.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_profiling.atomic import write_json
from bridge_profiling.errors import CaptureError

#: Names the directory in the environment of a training that a supervisor started.
HANDOVER_VARIABLE = "BRIDGE_PROFILING_NSYS"

#: Says in the environment of a rank why it trains without the nsys that was asked for.
REFUSED_VARIABLE = "BRIDGE_PROFILING_NSYS_REFUSED"


@dataclass(frozen=True)
class Handover:
    """The directory of one training and its supervisor."""

    directory: Path

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str] = os.environ) -> Handover | None:
        """The one this training was started with; None without a supervisor, also in a process the training started."""
        directory = environ.get(HANDOVER_VARIABLE)
        handover = cls(Path(directory)) if directory else None
        return handover if handover is not None and handover.read("training").get("pid") in (None, os.getpid()) else None

    def write(self, name: str, **content: object) -> None:
        """Write `<name>.json`, whole.

        Raises:
            OSError: it cannot be written.
        """
        write_json(self.directory / f"{name}.json", content)

    def read(self, name: str) -> dict[str, Any]:
        """What `<name>.json` holds; empty while it is not there."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.directory / f"{name}.json").read_text(encoding="utf-8"))
        return {}

    def begin_capture(self, at_most: int, **content: object) -> int:
        """Write down the next of several captures; its number, from 1.

        Raises:
            CaptureError: nsys records no more of them.
        """
        number = next(number for number in itertools.count(1) if not self.has(f"capture-{number}"))
        if number > at_most:
            raise CaptureError(f"nsys was told at its start to make {at_most} captures, and has made them")
        self.write(f"capture-{number}", **content)
        return number

    def has(self, name: str) -> bool:
        """Whether `<name>.json` has been written."""
        return (self.directory / f"{name}.json").exists()
