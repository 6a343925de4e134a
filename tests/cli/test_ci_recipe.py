"""The workflow of docs/how-to/in-ci.md, command by command: what GitHub's own actions do is done here by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "in-ci.md"
MAIN = "${{ github.ref == 'refs/heads/main' }}"

#: Iterations end at fixed times, nearly all of which is spent asleep, on one thread: a busy machine delays one and shortens the
#: next, and the median stays. After a stall, time is not made up for, since that would shorten many.
TRAIN = """
import argparse, os, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int)
iterations = parser.parse_args().iterations
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ends = time.monotonic()
for _ in range(iterations):
    model(torch.ones(8, 64)).sum().backward()
    ends = max(ends + float(os.environ["ITERATION_S"]), time.monotonic())
    time.sleep(max(ends - time.monotonic(), 0))
    optimizer.step()
"""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def steps() -> list[dict[str, Any]]:
    (text,) = re.findall(r"```yaml\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    (job,) = yaml.safe_load(text)["jobs"].values()
    return job["steps"]


def holds(condition: str | None, workspace: Path, branch: str) -> bool:
    """What GitHub makes of the conditions on the page."""
    known = {
        None: True,
        "${{ always() }}": True,
        "${{ hashFiles('baseline/**') != '' }}": any((workspace / "baseline").rglob("*.json")),
        MAIN: branch == "main",
    }
    return known[condition]


def job(workspace: Path, branch: str, iteration_s: float) -> tuple[int, str]:
    """Run the job as GitHub does: the exit code of the step that fails, and the summary."""
    summary = workspace / "summary.md"
    summary.write_text("")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(summary),
        "ITERATION_S": str(iteration_s),
    }
    subprocess.run(["rm", "-rf", "this-commit"], cwd=workspace, check=True)  # each job has a clean checkout
    for step in steps():
        if "run" in step and holds(step.get("if"), workspace, branch):
            command = ["bash", "-e", "-c", step["run"]]
            done = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=300)
            if done.returncode:
                return done.returncode, summary.read_text() + done.stderr
    return 0, summary.read_text()


def test_equal_runs_pass_and_one_of_half_the_speed_fails(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert job(tmp_path, "main", 0.1) == (0, "")
    assert (tmp_path / "baseline" / "manifest").is_dir()

    code, summary = job(tmp_path, "pull-request", 0.1)
    assert code == 0, summary
    assert summary.startswith("### Iteration time\n```text\nbaseline → this-commit\n")
    assert "iterations without profiling" in summary

    code, summary = job(tmp_path, "pull-request", 0.2)
    assert code == 3, summary
    assert "this-commit is slower" in summary
    assert "error: the median iteration is slower by more than 5%" in summary
    page = (tmp_path / "comparison.html").read_text()
    assert "this-commit is slower" in page

    # The page is uploaded after a failure, too, and only the main branch stores a baseline.
    (kept,) = (step for step in steps() if "upload-artifact" in step.get("uses", ""))
    assert kept["if"] == "${{ always() }}"
    assert kept["with"]["path"].split() == ["comparison.html", "this-commit"]
    assert {step.get("if") for step in steps() if "cache/save" in step.get("uses", "")} == {MAIN}
