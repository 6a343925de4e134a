"""`python -m bridge_profiling.bench KIND REQUEST FILE`: one process of a measurement; rank 0 writes the result.

The command line starts it, or a launcher does on every rank through the command line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_profiling.bench import ranks
from bridge_profiling.bench.failures import FAILED, UNAVAILABLE, WRONG_REQUEST, MeasurementError, UnavailableError
from bridge_profiling.bench.requests import (
    CollectivesRequest,
    CopiesRequest,
    DataLoaderRequest,
    Request,
    StepRequest,
    from_text,
)
from bridge_profiling.errors import ProfilingConfigError


def main(arguments: Sequence[str]) -> int:
    """Measure, or start the ranks that do.

    Args:
        arguments: the benchmark's name, its request as JSON, and the file for the result.

    Returns:
        The exit code: `failures` has them.
    """
    kind, text, output = arguments
    try:
        request = from_text(kind, text)
        place = ranks.place_from(os.environ)
        if place is None:
            _unwind_on_signals()
        if place is None and isinstance(request, CollectivesRequest):
            return ranks.start_here(arguments, _processes(request))
        place = place or ranks.Place()
        result = _measured(request, place)
    except UnavailableError as error:
        return _failed(error, UNAVAILABLE)
    except MeasurementError as error:
        return _failed(error, FAILED)
    except ProfilingConfigError as error:
        return _failed(error, WRONG_REQUEST)
    except _Ended as error:
        return int(error.args[0])
    if place.rank == 0:
        Path(output).write_text(json.dumps(result), encoding="utf-8")
    failed = [row["status"] for row in result["rows"] if str(row.get("status")).startswith("failed")]
    if failed:
        return _failed(failed[0].removeprefix("failed: "), FAILED)
    wrong = [row for row in result["rows"] if row.get("correct") is False]
    if wrong:
        what = ", ".join(dict.fromkeys(str(row.get("operation") or row.get("direction")) for row in wrong))
        return _failed(f"what arrived is not what was sent: {what}; the figures are worth nothing", FAILED)
    return 0


class _Ended(BaseException):
    """Somebody has told this process to end."""


def _unwind_on_signals() -> None:
    """Let what ends this process unwind it, which ends the ranks or workers that it has started."""

    def end(number: int, frame: object) -> None:
        # A loader's workers inherit this, and have nothing to unwind.
        if multiprocessing.parent_process() is not None:
            os._exit(128 + number)
        # Being told once more does not keep it from that.
        for each in told_by:
            signal.signal(each, signal.SIG_IGN)
        # A loader raises what its workers end with, which have been told as well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise _Ended(128 + number)

    told_by = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    for each in told_by:
        signal.signal(each, end)


def _failed(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _processes(request: CollectivesRequest) -> int:
    """How many ranks are started here: as asked, else one per CUDA device, else 2."""
    import torch

    devices = torch.cuda.device_count() if request.backend != "gloo" else 0
    if request.backend is None and not torch.cuda.is_available():
        devices = 0
    found = request.processes or devices or 2
    if request.processes is None and devices == 1:
        raise UnavailableError(
            "one CUDA device: unavailable, communication takes two; type --backend gloo to measure the host's instead"
        )
    return found


def _measured(request: Request, place: ranks.Place) -> dict[str, Any]:
    # Each imports torch, which takes seconds: a wrong request is told before.
    match request:
        case CollectivesRequest():
            import torch

            from bridge_profiling.bench import collectives
            from bridge_profiling.bench.world import joined

            if place.size < 2:
                raise ProfilingConfigError(
                    "the launcher started one rank, which has nobody to communicate with",
                    instead="Start two or more, or run without a launcher and type --nproc 2",
                )
            backend = request.backend or ("nccl" if torch.cuda.is_available() else "gloo")
            with joined(place, backend) as world:
                return collectives.measure(request, world)
        case CopiesRequest():
            from bridge_profiling.bench import copies

            return copies.measure(request)
        case DataLoaderRequest():
            from bridge_profiling.bench import data_loader

            return data_loader.measure(request)
        case StepRequest():
            from bridge_profiling.bench import training_step

            return training_step.measure(request)


if __name__ == "__main__":
    # What torch's own parts say to one another is no news to who measures.
    warnings.filterwarnings("ignore", category=FutureWarning)
    mine = sys.argv[1:]
    # The user's code may read arguments of its own where it is imported; ours are none of them.
    del sys.argv[1:]
    sys.exit(main(mine))
