"""A finding's command, run: Nsight Compute's report holds the kernel that the finding names."""

import csv
import os
import shutil
import subprocess
import sys

import pytest

from bridge_profiling.findings import Thresholds
from bridge_profiling.findings.kernels import function_name
from bridge_profiling.run import Run

pytestmark = [
    pytest.mark.needs("cuda"),
    pytest.mark.skipif(shutil.which("ncu") is None, reason="no ncu on PATH"),
    pytest.mark.timeout(600),
]

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

#: A matrix product that takes the most, and two instances of one template that no name of a function tells apart.
SCRIPT = """
import sys, torch
from bridge_profiling.easy import auto_profile

wide = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
single = torch.randn(1 << 25, device="cuda")
half = torch.randn(1 << 25, device="cuda", dtype=torch.bfloat16)

def step():
    wide @ wide
    for _ in range(20):
        single.mul_(1.0001)
        half.mul_(1.0001)
    torch.cuda.synchronize()

if sys.argv[1:] == ["traced"]:
    step = auto_profile(warmup=5, iterations=3, output_dir="run", summary=False)(step)
for _ in range(10):
    step()
"""


def test_every_dominant_kernels_command_reports_that_kernel_and_no_other(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "train.py", "traced"], cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=300)
    with Run(tmp_path / "run", thresholds=Thresholds(dominant_kernel=0.01)) as run:
        found = [one for one in run.findings if one.id == "dominant_kernel"]
    assert len(found) >= 2
    templates = 0
    for place, finding in enumerate(found):
        kernel, command = finding.evidence["kernel"], finding.evidence["ncu_command"]
        templates += "demangled" in command
        assert command.endswith(f"{sys.executable} train.py traced")
        report = tmp_path / f"report-{place}"
        # The basic set: what is asked here is which kernel it is, and not what ncu finds out about it.
        typed = command.removesuffix(" traced").replace("--set full", "--set basic")
        typed = typed.replace("ncu-rank-0", report.name)
        done = subprocess.run(["sh", "-c", typed], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
        if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
            pytest.skip("this user may not read the device's counters")
        assert done.returncode == 0, done.stdout + done.stderr
        listed = ["ncu", "--import", f"{report}.ncu-rep", "--print-kernel-base", "demangled", "--csv", "--page", "raw"]
        printed = subprocess.run(listed, capture_output=True, text=True, check=True, timeout=120).stdout
        rows = csv.DictReader(line for line in printed.splitlines() if line.startswith('"'))
        # A row of units comes after the headings.
        names = [row["Kernel Name"] for row in rows if row["Kernel Name"]]
        assert names, printed
        assert {function_name(name) for name in names} == {function_name(kernel)}
        assert len(set(names)) == 1, "one kernel, not several instances of its template"
        assert ("BFloat16" in names[0]) == ("BFloat16" in kernel)
    assert templates >= 2, "both instances of the template were to be told apart by the whole name"
