"""Ranks started on this machine, and wrong launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bridge_profiling.bench import requests
from bridge_profiling.bench.__main__ import main
from bridge_profiling.bench.ranks import run_locally

ROOT = Path(__file__).parents[2]

#: Stands in for the benchmark: rank 1 fails at once, and rank 0 would run for minutes.
MODULE = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("error: rank 1 of " + os.environ["WORLD_SIZE"])
print("waiting", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_the_first_rank_that_fails_ends_the_others_and_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "bridge_profiling" / "bench").mkdir(parents=True)
    for folder in ("bridge_profiling", "bridge_profiling/bench"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "bridge_profiling" / "bench" / "__main__.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert run_locally([], 2, "gloo") == 1
    assert capsys.readouterr().err == "error: rank 1 of 2\n"
    assert time.monotonic() - began < 60


def test_a_rank_without_a_world_size_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    request = requests.CopiesRequest((1024,))
    assert main(["copies", requests.to_text(request), str(tmp_path / "result.json")]) == 2
    assert "WORLD_SIZE is not set" in capsys.readouterr().err


def test_an_invalid_request_is_refused_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from bridge_profiling.bench.__main__ import main\n"
        "code = main(sys.argv[1:]); sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    arguments = ["step", '{"step": "train"}', str(tmp_path / "result.json")]
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "does not name a factory" in done.stderr
