"""The facade: one run, whatever its ranks, their numbering and their blocks look like, asked as a user asks."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bridge_profiling.facts import captures, store
from bridge_profiling.facts.names import VARIABLE
from bridge_profiling.traces import cache, kineto
from bridge_profiling.traces.discover import find_run
from bridge_profiling.traces.types import Caveat
from tests.facts.ranks_in_hand import facts, values, work, write_rank
from tests.findings.simulated_jobs import Here
from tests.planted.cases import CASES
from tests.traces.kineto_files import kernel, steps

PER_RANK = ("breakdown", "iterations", "idle_gaps", "copies", "kernels_by_rank", "operators", "typical_iteration")


@pytest.fixture
def write_ranks(write_trace):
    """Writes ranks of two iterations."""

    def write(count, suffix=".json.gz"):
        for rank in range(count):
            write_trace(steps(100 + rank, 200 + rank, operators=True), f"rank-{rank}{suffix}", distributedInfo={"rank": rank})

    return write


def answers(run):
    return {question: getattr(run.facts, question).to_pylist() for question in PER_RANK}


class _Elsewhere(Here):
    """Does the work in this process, as if another machine kept the tables of rank 1."""

    def map(self, function, tasks):
        there = Path("elsewhere")
        tasks = [replace(task, source=self.kept) if task.source == there else task for task in tasks]
        for outcome in super().map(function, tasks):
            if outcome.answer.info.rank == 1:
                self.kept = outcome.answer.entry
                outcome = replace(outcome, answer=replace(outcome.answer, entry=there))
            yield outcome


def test_a_rank_whose_tables_are_elsewhere_is_in_all_facts(write_ranks, run_of, tmp_path):
    write_ranks(3)
    run = run_of(parquet=tmp_path / "tables", engine=_Elsewhere())
    assert set(run.facts.ranks["rank"].to_pylist()) == set(run.facts.iterations["rank"].to_pylist()) == {0, 1, 2}
    assert any("1 captures are not accessible from this machine" in text for text in run.facts.limitations)


def test_a_kernels_launch_is_the_most_frequent_and_others_are_counted(write_trace, run_of):
    for rank, grids in enumerate(([8, 8, 16], [16, 16, 16], [None])):
        shape = {"block": [64, 1, 1], "registers per thread": 32, "shared memory": 0}
        launches = [shape | {"grid": [grid, 4, 1]} if grid else {} for grid in grids]
        events = [kernel("gemm", 10 * place, 5, **each) for place, each in enumerate(launches)]
        write_trace(events, f"rank-{rank}.json.gz", distributedInfo={"rank": rank})
    names = ("grid", "block", "registers_per_thread", "shared_memory_bytes", "configurations", "count")
    of_ranks = [("16x4x1", "64x1x1", 32, 0, 1, 3), ("8x4x1", "64x1x1", 32, 0, 2, 3), (None, None, None, None, 0, 1)]
    assert sorted(values(run_of().facts.kernels_by_rank, *names), key=str) == sorted(of_ranks, key=str)
    assert values(run_of().facts.kernels, *names) == [("16x4x1", "64x1x1", 32, 0, 2, 7)]


def test_every_rank_is_answered_for_in_order(write_ranks, run_of):
    write_ranks(3)
    seen = []
    run = run_of(on_progress=lambda *done: seen.append(done))
    assert run.facts.breakdown["compute_ns"].to_pylist() == [300_000, 302_000, 304_000]
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [info.rank for info in run.facts.every_info] == [0, 1, 2]
    expected = [(rank, place, 1000 * (100 * (place + 1) + rank)) for rank in range(3) for place in range(2)]
    assert values(run.facts.iterations, "rank", "iteration", "compute_ns") == expected
    assert run.facts.operators["count"].to_pylist() == [2, 2, 2]
    assert run.facts.kernels["count"].to_pylist() == [6]
    # Said once, though it is so for each rank.
    assert [caveat.ranks for caveat in run.caveats if caveat.code == "few_iterations"] == [(0, 1, 2)]
    assert len([sentence for sentence in run.facts.limitations if sentence.startswith("ranks 0-2: only 2 iterations")]) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, folder: patch.setattr(store, "_code", lambda: "another release"),
        lambda patch, folder: patch.setenv(VARIABLE, str(Path(__file__))),
        lambda patch, folder: (folder / "rank-1.json.gz").write_bytes((folder / "rank-0.json.gz").read_bytes()),
    ],
    ids=["code", "patterns of names", "capture"],
)
def test_answers_are_kept_until_something_that_they_depend_on_changes(write_ranks, run_of, tmp_path, monkeypatch, change):
    write_ranks(2)
    with run_of() as run:
        expected = answers(run)
    monkeypatch.setattr(captures, "connect", None)
    with run_of() as again:
        assert answers(again) == expected
    change(monkeypatch, tmp_path)
    with run_of() as changed, pytest.raises(TypeError):
        _ = changed.facts.kernels_by_rank


def test_kept_tables_begin_where_arrow_wants_them(write_ranks, run_of):
    write_ranks(2)
    for _ in range(2):
        with run_of() as run:
            tables = [run.facts.iterations, run.facts.kernels_by_rank]
    chunks = [chunk for table in tables for column in table.columns for chunk in column.chunks]
    assert {buffer.address % 8 for chunk in chunks for buffer in chunk.buffers() if buffer is not None} == {0}


def test_a_second_run_reads_only_parquet_which_alone_is_a_run_too(write_ranks, run_of, tmp_path, monkeypatch):
    write_ranks(2, suffix=".json")
    kept, moved = tmp_path / "kept", tmp_path / "elsewhere"
    first = run_of(parquet=kept)
    expected, limitations = answers(first), first.facts.limitations
    monkeypatch.setattr(kineto, "read", None)
    again = run_of(parquet=kept)
    assert answers(again) == expected
    shutil.move(kept, moved)
    alone = run_of(moved)
    # The question across ranks first: nothing was loaded for it.
    assert alone.facts.kernels_by_rank.to_pylist() == expected["kernels_by_rank"]
    assert answers(alone) == expected
    assert alone.facts.limitations == limitations


def test_where_nothing_can_be_kept_everything_is_answered(write_ranks, run_of, tmp_path):
    write_ranks(2)
    (tmp_path / "blocked").write_text("a file where a folder should be")
    run = run_of(parquet=tmp_path / "blocked")
    ranks = {question: {row["rank"] for row in rows} for question, rows in answers(run).items()}
    assert ranks == {question: set() if question == "copies" else {0, 1} for question in PER_RANK}
    scratch = run.facts.captures.entries()[0][1]
    assert scratch.is_dir()
    run.close()
    assert not scratch.exists()


def test_of_two_files_of_one_rank_the_whole_one_counts(write_trace, run_of, tmp_path):
    """Parquet of a rank and of a damaged copy of its file, in one folder."""
    for folder, events in (("damaged", [*steps(100), kernel("bad", 5, -1)]), ("good", steps(100, 200))):
        path = write_trace(events, f"{folder}/rank-0.json.gz", distributedInfo={"rank": 0})
        run_of(path, parquet=tmp_path / "kept").facts.captures.entries()
    run, damaged = run_of(tmp_path / "kept"), str(tmp_path / "damaged" / "rank-0.json.gz")
    assert run.facts.breakdown["compute_ns"].to_pylist() == [300_000]
    assert run.facts.kernels_by_rank["count"].to_pylist() == [2]
    assert [damaged in error for error in run.facts.errors] == [True]
    assert any(damaged in sentence and "left out" in sentence for sentence in run.facts.limitations)


def test_kineto_and_nsys_captures_of_a_rank_are_of_one_rank(planted, tmp_path, run_of):
    for name, count in (("data_loading_2", 2), ("data_loading_2_nsys", 1)):
        for _, entry in planted(name).facts.captures.entries()[:count]:
            (tmp_path / f"{name}-{entry.name}").symlink_to(entry)
    run = run_of()
    assert sorted(set(values(run.facts.kernels_by_rank, "rank", "source"))) == [(0, "kineto"), (0, "nsys"), (1, "kineto")]
    assert [info.source for info, _ in run.facts.captures.entries()] == ["kineto", "kineto"]
    assert "there are Kineto and nsys captures: answers across ranks are from the kineto ones" in run.facts.limitations


_MS = 1_000_000


def _write_iterations(folder, rank, first, count, code="iterations_inferred", late_ns=0):
    """A rank's iterations of 10 ms, numbered from the first that it captured."""
    begins = [(first + place) * 10 * _MS + late_ns for place in range(count)]
    rows = {
        "iterations": [
            {"iteration": number, "start_ns": begin, "end_ns": begin + 9 * _MS, "boundary": False}
            for number, begin in enumerate(begins)
        ],
        "device_events": [
            work("compute", begin + _MS, begin + 9 * _MS, begin + 1000, iteration=number) for number, begin in enumerate(begins)
        ],
    }
    return write_rank(folder, rank, rows, caveats=[Caveat(code, "")])


def _by_rank(run):
    found = values(run.facts.iterations, "rank", "iteration")
    return [[number for rank, number in found if rank == mine] for mine in (0, 1)]


def test_inferred_iterations_that_end_together_have_the_same_number(tmp_path, run_of):
    _write_iterations(tmp_path, 0, 1, 4)
    _write_iterations(tmp_path, 1, 3, 3, late_ns=_MS)
    run = run_of(tmp_path)
    assert _by_rank(run) == [[0, 1, 2, 3], [2, 3, 4]]
    assert run.events(1, iterations=[3, 4])["iteration"].to_pylist() == [3, 4]


@pytest.mark.parametrize("known", [{"code": "else"}, {"late_ns": 4 * _MS}])
def test_numbers_stay_where_ranges_give_them_or_where_no_iterations_end_together(tmp_path, run_of, known):
    _write_iterations(tmp_path, 0, 1, 4)
    _write_iterations(tmp_path, 1, 3, 3, **known)
    assert _by_rank(run_of(tmp_path)) == [[0, 1, 2, 3], [0, 1, 2]]


def all_facts(tables):
    return {name: fact.table.to_pylist() for name, fact in facts(tables).items()}


@pytest.mark.parametrize("capture", ["host_sync_2_nsys", "checkpoint_2"])
def test_answers_do_not_depend_on_blocks(tmp_path, monkeypatch, capture):
    tables = cache.load(find_run(CASES[capture].folder).captures[0], cached=False)
    whole = all_facts(tables)
    monkeypatch.setattr(cache, "ROW_GROUP_ROWS", 97)
    cache.write(tables, tmp_path / "entry")
    assert len(list(cache.open_entry(tmp_path / "entry").blocks("host_events"))) > 10
    assert all_facts(cache.open_entry(tmp_path / "entry")) == whole
