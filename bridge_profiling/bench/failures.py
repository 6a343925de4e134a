"""How a benchmark ends when it cannot give a result, and the exit codes that say so. Imports no torch."""

from __future__ import annotations

import re
import traceback

#: A measurement failed, or what was moved arrived wrong.
FAILED = 1

#: The request itself is wrong.
WRONG_REQUEST = 2

#: This machine has not what it takes: no CUDA device, no such backend.
UNAVAILABLE = 4


#: Where a frame of a printed traceback is.
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')

#: What somebody else's code may raise that ends the measurement and is told: scripts that read arguments exit.
THEIR_ERRORS = (Exception, SystemExit)


class UnavailableError(RuntimeError):
    """This machine has not what it takes. The message says what."""


class MeasurementError(RuntimeError):
    """What is measured failed by itself. The message says what it said, and where."""


def told(error: BaseException) -> str:
    """An error of somebody else's code in one line: where it was raised, and what it says.

    Args:
        error: as caught.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    says = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    # What a data loader's worker raised arrives with the worker's traceback as its text.
    _, of_worker, original = str(error).partition("Original Traceback")
    places = _PLACE.findall(original)
    if of_worker and places:
        where = ":".join(places[-1])
        says = f"{original.strip().splitlines()[-1]}"
    return says if where is None else f"{says} ({where})"
