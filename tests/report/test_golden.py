"""What `analyze --json` says about stored captures: a number that changes without a reason shows here, a wrong one elsewhere.

`python -m tests.report.test_golden` stores what is said now. Read the difference before you commit it.
"""

import json
import math
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from bridge_profiling.run import Run
from tests.findings.simulated_jobs import Here
from tests.planted.cases import CASES

STORED = Path(__file__).with_name("golden.json")

#: One of each recorder, and what only some captures hold: waiting ranks, a pipeline, memory, exposed communication.
NAMES = ("data_loading_2_nsys", "memory_leak_2", "pipeline_uneven_2", "slow_link_2", "straggler_compute_4")

_TEXTS = ("findings.id", "findings.title", "findings.confidence", "verdict.headline", "verdict.sentences", "caveats.code")


def leaves(node, path=""):
    """Every value with the keys that lead to it, without the numbers of rows."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if not key.isdigit() else path)
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value, path)
    else:
        yield path.removeprefix("."), node


def said(run):
    """Sums of numbers by key, which their order is part of; sentences as they are."""
    numbers, texts = defaultdict(list), defaultdict(list)
    for path, value in leaves(json.loads(run.to_json())):
        if isinstance(value, int | float):
            numbers[path].append(value * (1 + len(numbers[path]) % 7))
        elif path in _TEXTS:
            texts[path].append(str(value))
    return {"numbers": {path: float(f"{math.fsum(values):.9g}") for path, values in numbers.items()}, "texts": texts}


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_the_stored_one(planted, name):
    stored, now = json.loads(STORED.read_text())[name], said(planted(name))
    assert now["texts"] == stored["texts"]
    assert now["numbers"] == pytest.approx(stored["numbers"], rel=1e-6)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        runs = {name: Run(CASES[name].folder, engine=Here(), parquet=Path(scratch, name)) for name in NAMES}
        STORED.write_text(json.dumps({name: said(run) for name, run in runs.items()}, indent=0) + "\n")
