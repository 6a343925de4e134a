"""Trains a script under the start of `bridge-profiling run`."""

import pytest

from tests.forked_ranks import run_ranks
from tests.frameworks.scripts import start


@pytest.fixture
def train(tmp_path):
    """Runs a script as `bridge-profiling run` does, in a process that has loaded torch already."""

    def train(script, *options, ranks=1):
        (tmp_path / "train.py").write_text(script)
        return run_ranks(start, *options, "train.py", folder=tmp_path, ranks=ranks)

    return train
