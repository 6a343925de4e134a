"""Whatever strikes a profiled training: what was captured is kept, the manifest is true, and no loss changes.

The table in docs/concepts/faults.md is made here; UPDATE_DOCS=1 writes it, and otherwise it must be what the runs show.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_ranks import LAUNCHER_VARIABLES, run_ranks

pytest.importorskip("megatron.core")

from tests.faults import run_faults

pytestmark = [pytest.mark.needs("megatron", "mount"), pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "faults.md"
BEGIN, END = "<!-- made by tests/faults/test_fault_table.py -->", "<!-- end -->"

WHOLE, BEFORE = [2, 3, 4], [2]

#: fault: how the training ends, iterations in the trace (None: no trace), status (None: no manifest could be written).
TORCH = {
    "none": ("trained", WHOLE, "complete"),
    "a second run into the same directory": ("trained", WHOLE, "complete"),
    "an exception": ("ValueError", BEFORE, "partial"),
    "out of memory (simulated)": ("OutOfMemoryError", BEFORE, "partial"),
    "SIGTERM": ("SystemExit", BEFORE, "partial"),
    "SIGTERM while the trace is written": ("SystemExit", WHOLE, "complete"),
    "Ctrl-C": ("KeyboardInterrupt", BEFORE, "partial"),
    "the profiler fails to start": ("trained", None, "failed"),
    "the profiler fails to stop": ("trained", None, "failed"),
    "the output directory is read-only": ("trained", None, None),
    "the disk is full": ("trained", None, "failed"),
    "the output directory is replaced": ("trained", None, "failed"),
}

#: On a machine without a GPU neither can record, whatever strikes; both must say so and stay out of the way.
WITHOUT_GPU = {"none": ("trained", None, "failed"), "an exception": ("ValueError", None, "failed")}

#: Of rank 0 and rank 1.
RANKS = {
    "an exception on rank 1 only": ((BEFORE, "partial"), (BEFORE, "partial")),
    "rank 1 is killed (SIGKILL)": ((BEFORE, "partial"), (None, "failed")),
}


class Struck:
    """The runs of one profiler."""

    def __init__(self, folder: Path, profiler: str) -> None:
        self.folder, self.results = folder / profiler, json.loads((folder / profiler / "results.json").read_text())

    def losses(self, name: str) -> list[str]:
        return (self.folder / f"{name}.jsonl").read_text().splitlines()

    def trace(self, name: str) -> list[int] | None:
        again = name == "a second run into the same directory"
        attempt = self.folder / ("none" if again else name) / "torch" / ("iter-2-5.1" if again else "iter-2-5")
        return iterations(attempt / "rank-0.pt.trace.json.gz")

    def status(self, name: str) -> str | None:
        manifest = self.results[name]["manifest"]
        return manifest and manifest["status"]


def iterations(trace: Path) -> list[int] | None:
    """The whole iterations in a trace, or None where there is no file."""
    try:
        with gzip.open(trace, "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


@pytest.fixture(scope="module")
def struck(tmp_path_factory) -> dict[str, Struck]:
    folder = tmp_path_factory.mktemp("faults")
    for profiler, names in {"torch": [], "nsys": list(WITHOUT_GPU), "memory": list(WITHOUT_GPU)}.items():
        (folder / profiler).mkdir()
        done = run_ranks(run_faults.strike_one_after_the_other, folder / profiler, profiler, names, folder=folder)
        assert done.exit_codes == [0], done.stdout + done.stderr
    return {profiler: Struck(folder, profiler) for profiler in ("torch", "nsys", "memory")}


@pytest.fixture(scope="module")
def struck_ranks(tmp_path_factory) -> dict[str, Path]:
    """Two ranks; the one that is left is told to stop with SIGTERM, as torchrun does it."""
    folders = {}
    for name in RANKS:
        folders[name] = tmp_path_factory.mktemp("ranks")
        done = run_ranks(run_faults.strike_a_rank, folders[name], name, folder=folders[name], ranks=2)
        assert all(done.exit_codes), done.stdout + done.stderr
    return folders


CASES = [("torch", name, *row) for name, row in TORCH.items()] + [
    (profiler, name, *row) for profiler in ("nsys", "memory") for name, row in WITHOUT_GPU.items()
]


@pytest.mark.parametrize(("profiler", "name", "ended", "captured", "status"), CASES)
def test_a_fault_leaves_what_was_captured_and_the_truth_about_it(struck, profiler, name, ended, captured, status):
    runs = struck[profiler]
    assert runs.results[name]["ended"] == ended
    assert runs.trace(name) == captured
    assert runs.status(name) == status
    manifest = runs.results[name]["manifest"]
    if manifest is not None:
        assert (manifest["captured"] or {"iterations": None})["iterations"] == captured
        assert bool(manifest["reason"]) == (status != "complete")


@pytest.mark.parametrize(("profiler", "name"), [case[:2] for case in CASES])
def test_no_fault_changes_a_loss_or_leaves_half_a_file(struck, profiler, name):
    runs = struck[profiler]
    plain, losses = runs.losses("unprofiled"), runs.losses(name)
    assert losses == plain[: len(losses)]
    assert len(losses) == (6 if runs.results[name]["ended"] == "trained" else 3 if runs.trace(name) != WHOLE else 5)
    assert not [path for path in runs.results[name]["left"] if ".tmp" in path or Path(path).name.startswith(".")]


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_that_fails_leaves_the_others_their_capture(struck_ranks, name):
    _check_ranks(struck_ranks[name] / "profiles", name)


@pytest.mark.system
def test_so_it_is_under_torchrun(tmp_path):
    [*_, name] = RANKS
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    command = [sys.executable, *torchrun, "localhost:0", run_faults.__file__, str(tmp_path), name]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    _check_ranks(tmp_path / "profiles", name)


def _check_ranks(profiles: Path, name: str) -> None:
    for rank, (captured, status) in enumerate(RANKS[name]):
        manifest = json.loads((profiles / "manifest" / "iter-2-5" / f"rank-{rank}.json").read_text())
        assert (rank, iterations(profiles / "torch" / "iter-2-5" / f"rank-{rank}.pt.trace.json.gz")) == (rank, captured)
        assert (rank, manifest["status"]) == (rank, status)
        assert manifest["reason"]


def test_the_table_in_the_docs_is_what_the_runs_show(struck, struck_ranks):
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    made = f"{before}\n{table(struck, struck_ranks)}\n{after}"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(made, encoding="utf-8")
    assert made == PAGE.read_text(encoding="utf-8")


def table(struck: dict[str, Struck], struck_ranks: dict[str, Path]) -> str:
    rows = ["| fault | profiler | training | captured of 2, 3, 4 | manifest | losses |", "|---|---|---|---|---|---|"]
    for profiler, name, *_ in CASES:
        runs = struck[profiler]
        plain, losses = runs.losses("unprofiled"), runs.losses(name)
        ended = runs.results[name]["ended"]
        rows.append(
            f"| {name} | {profiler} | {'goes on' if ended == 'trained' else ended} | {shown(runs.trace(name))}"
            f" | {runs.status(name) or 'none, a line on stderr'}"
            f" | {'identical' if losses == plain[: len(losses)] else 'CHANGED'} |"
        )
    for name, folder in struck_ranks.items():
        captured, statuses = [], []
        for rank in (0, 1):
            profiles = folder / "profiles"
            captured.append(shown(iterations(profiles / "torch" / "iter-2-5" / f"rank-{rank}.pt.trace.json.gz")))
            statuses.append(json.loads((profiles / "manifest" / "iter-2-5" / f"rank-{rank}.json").read_text())["status"])
        cells = [f"rank 0: {one}; rank 1: {other}" for one, other in (captured, statuses)]
        rows.append(f"| {name} | torch | the job fails | {cells[0]} | {cells[1]} | not compared |")
    return "\n".join(rows)


def shown(captured: list[int] | None) -> str:
    return "nothing" if captured is None else ", ".join(map(str, captured))
