"""`bridge-profiling report` as it is typed: the answer, the page, the JSON, and the exit code."""

import json
import os

from tests.cli.ranks import write


def test_piped_it_prints_the_verdict_and_writes_the_page(typed, folder):
    done = typed("report", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "An iteration takes 0.9 ms" in done.stdout
    assert "low_device_busy" in done.stdout
    assert done.stdout.endswith("\npage: report.html\n")
    assert "my_gemm_kernel" in (folder / "report.html").read_text()
    assert "low_device_busy" not in typed("report", "run", "--threshold", "device_busy=0.1").stdout


def test_of_several_windows_the_newest_is_shown_and_named_first(typed, folder):
    traces = [folder / "runs" / "torch" / window / "rank-0.pt.trace.json.gz" for window in ("iter-5-7", "iter-2-4")]
    for age, trace in enumerate(traces):
        write(trace, 0)
        os.utime(trace, (9 - age, 9 - age))
    done = typed("report", "runs")
    assert "iter-5-7" in done.stdout.splitlines()[0]
    page = (folder / "report.html").read_text()
    assert page.index("iter-5-7") < page.index('id="verdict"'), "a notice above the verdict"
    assert json.loads(typed("report", "runs", "--json").stdout)["schema_version"] == 1
