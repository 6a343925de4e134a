"""Each test runs in a process that was started by no launcher."""

import pytest

from tests.forked_ranks import LAUNCHER_VARIABLES


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """This process was started by no launcher."""
    for name in (*LAUNCHER_VARIABLES, "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
