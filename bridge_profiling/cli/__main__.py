"""`python -m bridge_profiling.cli`, where the command itself is not on PATH."""

from bridge_profiling.cli import main

main()
