"""`python -m bridge_profiling.bench KIND REQUEST FILE`: one process of a measurement; rank 0 writes the result.

The `bench` command starts it; under a launcher each rank's command starts its own.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_profiling.bench.results import MeasurementError
from bridge_profiling.common.errors import ProfilingConfigError, print_error
from bridge_profiling.common.launch_env import LaunchEnv


def main(arguments: Sequence[str]) -> int:
    """Measure, or start the ranks that do; `arguments` are the kind of benchmark, its parameters as JSON, and the result file.

    Returns the exit code: 0, 2 for a wrong request, the `exit_code` of an error in `results`, or 130 for a signal.
    """
    kind, text, output = arguments
    # The ranks and workers that this process has started end as it unwinds.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        LaunchEnv.check()
        env, request = LaunchEnv.read(), json.loads(text)
        # Each kind has a module of its name, imported here because it imports torch, which takes seconds.
        module = importlib.import_module(f"bridge_profiling.bench.{kind}")
        nproc = request.pop("nproc", None)
        if kind == "collectives" and env.launcher == "none":
            return module.start_ranks(nproc, request["backend"], arguments)
        result = module.measure(**request)
        if env.rank == 0:
            Path(output).write_text(json.dumps(result), encoding="utf-8")
        _check_rows(result["rows"])
    except (MeasurementError, ProfilingConfigError) as error:
        print_error(error)
        return 2 if isinstance(error, ProfilingConfigError) else error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


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
