"""Answers from tables: one module a question. `Run` asks them of every capture of a run.

from bridge_profiling.analysis import Run
Run("profiles").breakdown().to_pandas()
"""

from bridge_profiling.analysis.run import Run

__all__ = ["Run"]
