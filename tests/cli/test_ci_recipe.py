"""The workflow of docs/how-to/compare-runs.md: the step that compares is run as GitHub runs it, with runs of known times."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.compare.compared_runs import quiet

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "compare-runs.md"


@pytest.mark.integration
@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.2, 3)])
def test_equal_runs_pass_and_a_slower_one_fails_with_the_reason_in_the_summary(tmp_path, factor, code):
    (text,) = re.findall(r"```yaml\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    (job,) = yaml.safe_load(text)["jobs"].values()
    _, comparison, *_ = (step["run"] for step in job["steps"] if "run" in step)
    quiet().write(tmp_path / "baseline")
    quiet(factor, seed=2).write(tmp_path / "this-commit")
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment = os.environ | path | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    command = ["bash", "-e", "-c", comparison]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    summary = (tmp_path / "summary.md").read_text()
    assert done.returncode == code, summary + done.stderr
    assert summary.startswith("### Iteration time\n```text\nbaseline → this-commit\n")
    assert ("error: the median iteration is slower by more than 5%" in summary) == bool(code)
    assert ("this-commit is slower" in (tmp_path / "comparison.html").read_text()) == bool(code)
