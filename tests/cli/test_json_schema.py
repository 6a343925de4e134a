"""`--json-schema`, and that what --json prints fits it, whatever was captured."""

import json

import pytest

from bridge_profiling.report.documents import schema_text
from tests.cli.conftest import write
from tests.compare.compared_runs import WrittenRun, quiet
from tests.report.published import problems


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs with captures that cannot be read, nothing but such, on CPUs alone, without iterations, and two to compare."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "run" / "rank-0.json.gz", 0)
    for run in ("run", "bad"):
        write(folder / run / "rank-1.json.gz", 1, cut=60)
        write(folder / run / "rank-2.json.gz", 2, cut=0)
    write(folder / "cpu" / "rank-0.json.gz", 0, device=False)
    WrittenRun(marked=False).write(folder / "unmarked")
    quiet(ranks=2).write(folder / "base")
    quiet(1.2, ranks=2, kernels={"gemm": [400.0]}).write(folder / "slower")
    return folder


@pytest.mark.parametrize("command", ["analyze", "bench"])
def test_the_schema_is_printed_without_a_run(typed, command):
    done = typed(command, "--json-schema")
    assert (done.returncode, done.stdout, done.stderr) == (0, schema_text(command), "")


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("analyze run", "finding"),
        ("analyze bad", "too_little"),
        ("analyze cpu", "nothing_found"),
        ("analyze run/rank-0.json.gz --parquet tables", "finding"),
        ("report slower --threshold device_busy=0.99", "finding"),
        ("compare base slower --also-base base --also-other slower", None),
        ("compare run base cpu unmarked", None),
    ],
)
def test_what_is_printed_fits_the_schema_and_says_what_could_be_judged(typed, runs, monkeypatch, line, outcome):
    monkeypatch.chdir(runs)
    command, *_ = line.split()
    document = json.loads(typed(*line.split(), "--json").stdout)
    assert problems(command, document) == []
    assert document.get("verdict", {}).get("outcome") == outcome
    if "tables" in line:
        again = json.loads(typed("analyze", "tables", "--json").stdout)
        assert again["budget"] == document["budget"]
