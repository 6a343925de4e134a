"""Whatever strikes a profiled training: what was captured is kept, the manifest is true, and no loss changes.

The table in docs/concepts/faults.md says what each fault leaves, and every row of it is run here.
"""

import json
from pathlib import Path

import pytest

from tests.capture.conftest import Run
from tests.forked_ranks import run_ranks

pytest.importorskip("megatron.core")

from tests.faults import run_faults

pytestmark = [pytest.mark.integration, pytest.mark.needs("megatron", "mount"), pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]

PAGE = (ROOT / "docs" / "concepts" / "faults.md").read_text(encoding="utf-8")

#: fault, profiler, how the training ends, iterations in the trace, status of the manifest, losses
ROWS = [tuple(line.strip("| ").split(" | ")) for line in PAGE.splitlines() if line.startswith("| ")][1:]
OF_ONE_RANK = [row for row in ROWS if row[2] != "the job fails"]
OF_TWO_RANKS = [row for row in ROWS if row[2] == "the job fails"]


def shown(captured: list[int] | None) -> str:
    return "nothing" if captured is None else ", ".join(map(str, captured))


@pytest.fixture(scope="module")
def struck(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("faults")
    run_ranks(run_faults.strike_one_after_the_other, folder, [row[:2] for row in OF_ONE_RANK], folder=folder, check=True)
    return json.loads((folder / "results.json").read_text())


def test_the_table_has_every_fault():
    by_profiler = {profiler: [row[0] for row in OF_ONE_RANK if row[1] == profiler] for profiler in run_faults.SETTINGS}
    assert by_profiler["torch"] == list(run_faults.faults(Path()))
    # Without a GPU neither can record, whatever strikes.
    assert by_profiler["nsys"] == by_profiler["memory"] == ["none", "an exception"]
    assert [row[0] for row in OF_TWO_RANKS] == list(run_faults.RANK_FAULTS)


@pytest.mark.parametrize("row", OF_ONE_RANK, ids=lambda row: f"{row[0]}, {row[1]}")
def test_a_fault_leaves_what_was_captured_and_the_truth_about_it(struck, row):
    fault, profiler, ended, captured, status, losses = row
    found, plain = struck[f"{fault}, {profiler}"], struck["unprofiled"]["losses"]
    assert found["ended"] == ended
    if status == "none, a line on stderr":
        assert found["outcome"] is None
    else:
        assert (found["outcome"][0], shown(found["outcome"][1])) == (status, captured)
        assert bool(found["reason"]) == (status != "complete")
    assert losses == "identical"
    assert found["losses"] == plain[: len(found["losses"])]
    assert len(found["losses"]) == (6 if ended == "goes on" else 5 if status == "complete" else 3)
    assert found["half_written"] == []


@pytest.mark.parametrize("row", OF_TWO_RANKS, ids=lambda row: row[0])
def test_a_rank_that_fails_leaves_the_others_their_capture(tmp_path, row):
    """The rank that is left is stopped with SIGTERM, as torchrun does it."""
    done = run_ranks(run_faults.strike_a_rank, tmp_path, row[0], folder=tmp_path, ranks=2)
    assert all(done.exit_codes), done.stdout + done.stderr
    run = Run(tmp_path / "profiles")
    outcomes = [run.outcome("iter-2-5", rank) for rank in (0, 1)]
    assert "; ".join(f"rank {rank}: {shown(captured)}" for rank, (_, captured) in enumerate(outcomes)) == row[3]
    assert "; ".join(f"rank {rank}: {status}" for rank, (status, _) in enumerate(outcomes)) == row[4]
    assert all(run.manifest("iter-2-5", rank)["reason"] for rank in (0, 1))
