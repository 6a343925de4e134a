"""How a benchmark ends when it cannot give a result, and the exit codes that say so. Imports no torch."""

from __future__ import annotations

import traceback

#: A measurement failed, or what was moved arrived wrong.
FAILED = 1

#: The request itself is wrong.
WRONG_REQUEST = 2

#: This machine has not what it takes: no CUDA device, no such backend.
UNAVAILABLE = 4


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
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}{where}"
