"""`python -m bridge_profiling.bench KIND REQUEST FILE`: one process of a measurement; rank 0 writes the result.

The `bench` command starts it; under a launcher each rank's command starts its own.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_profiling.bench.requests import CollectivesRequest, from_text
from bridge_profiling.bench.results import MeasurementError, UnavailableError
from bridge_profiling.common.errors import ProfilingConfigError, print_error
from bridge_profiling.common.launch_env import LaunchEnv


def main(arguments: Sequence[str]) -> int:
    """Measure, or start the ranks that do; `arguments` are the kind of benchmark, its request as JSON, and the result file.

    Returns the exit code: 0, 2 for a wrong request, the `exit_code` of an error in `results`, or 128 plus a signal.
    """
    kind, text, output = arguments
    try:
        request = from_text(kind, text)
        LaunchEnv.check()
        env = LaunchEnv.read()
        if env.launcher == "none":
            _unwind_on_signals()
            if isinstance(request, CollectivesRequest):
                from bridge_profiling.bench import ranks

                return ranks.run_locally(arguments, request.processes, request.backend)
        # Each kind has a module of its name, imported here because it imports torch, which takes seconds.
        result = importlib.import_module(f"bridge_profiling.bench.{kind}").measure(request)
        if env.rank == 0:
            Path(output).write_text(json.dumps(result), encoding="utf-8")
        _check_rows(result["rows"])
    except (MeasurementError, UnavailableError, ProfilingConfigError) as error:
        print_error(error)
        return 2 if isinstance(error, ProfilingConfigError) else error.exit_code
    except _Signalled as error:
        return 128 + error.args[0]
    return 0


class _Signalled(BaseException):
    """This process received the signal of this number."""


def _unwind_on_signals() -> None:
    """Raise on SIGINT and SIGTERM, so that the ranks or workers started by this process are ended as well."""

    def end(number: int, frame: object) -> None:
        # Workers of a data loader inherit this handler, and have nothing to unwind.
        if multiprocessing.parent_process() is not None:
            os._exit(128 + number)
        # A second signal must not interrupt the unwinding.
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        # The workers received the signal too; the loader would raise an error for each that ends.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise _Signalled(number)

    # The command asks with this signal where the process is, before it kills it.
    faulthandler.register(signal.SIGUSR1)
    handled = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    for each in handled:
        signal.signal(each, end)


def _check_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Raise MeasurementError if a row failed or its data arrived wrong. The result with all rows is written before."""
    for row in rows:
        if str(row.get("status")).startswith("failed"):
            raise MeasurementError(row["status"].removeprefix("failed: "))
    wrong = dict.fromkeys(str(row["operation"]) for row in rows if row.get("correct") is False)
    if wrong:
        raise MeasurementError(f"the data received by {', '.join(wrong)} is wrong; its results are invalid")


if __name__ == "__main__":
    # Warnings between torch's own components are of no use here.
    warnings.filterwarnings("ignore", category=FutureWarning)
    own = sys.argv[1:]
    # The user's code may parse arguments at import, and must not see ours.
    del sys.argv[1:]
    sys.exit(main(own))
