"""Ranks started on this machine."""

import subprocess

import pytest

from bridge_profiling.bench.ranks import run_locally

pytestmark = pytest.mark.integration

#: Stands in for the benchmark: rank 1 fails at once, and rank 0 would run for minutes.
MODULE = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("error: rank 1 of " + os.environ["WORLD_SIZE"])
print("waiting", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_the_first_rank_that_fails_ends_the_others_and_is_reported(tmp_path, monkeypatch, capsys):
    package = tmp_path / "bridge_profiling" / "bench"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(MODULE)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    assert run_locally([], 2, "gloo") == 1
    assert capsys.readouterr().err == "error: rank 1 of 2\n"
    assert started[0].returncode < 0
