"""Commands typed in a working directory with one good rank, and traces to damage."""

from tests.cli.conftest import folder, typed
from tests.traces.conftest import write_trace

__all__ = ["folder", "typed", "write_trace"]
