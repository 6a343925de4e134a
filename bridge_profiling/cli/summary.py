"""Prints the verdict on one rank's capture: `python -m bridge_profiling.cli.summary TRACE`. `auto_profile` runs it."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Print the verdict on the capture that the command line names.

    Raises:
        SystemExit: the extra `analysis` is not installed.
    """
    try:
        from rich.console import Console

        from bridge_profiling.report.run_view import summary_view
        from bridge_profiling.report.terminal import print_report
        from bridge_profiling.report.verdict import summarize
        from bridge_profiling.run import Run
    except ImportError as error:
        sys.exit(f"reading captures needs {error.name}")
    with Run(Path(sys.argv[1])) as run:
        print_report(summary_view(summarize(run)), Console(highlight=False))


if __name__ == "__main__":
    main()
