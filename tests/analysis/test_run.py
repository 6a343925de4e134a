"""The facade: one run, whatever its ranks look like, asked as a user asks."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from subprocess import run as run_process

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.errors import ProfilingConfigError, TraceError
from bridge_profiling.layout import name_ranks
from bridge_profiling.traces import cache
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import call, complete, kernel

OpenRun = Callable[..., Run]

PER_RANK = ("breakdown", "iterations", "idle_gaps", "copies", "kernels", "operators", "typical_iteration")


def _steps(*lengths: float) -> list[dict]:
    """Iterations of 900 µs, each with a kernel of some length."""
    events = []
    for place, length in enumerate(lengths):
        begin = 1000 * place
        events += [
            complete("user_annotation", f"ProfilerStep#{place}", begin, 900),
            complete("cpu_op", "aten::mm", begin + 5, 20),
            call("cudaLaunchKernel", begin + 10, 2, place + 1),
            kernel("gemm", begin + 100, length, correlation=place + 1),
        ]
    return events


def _write_ranks(write_trace: WriteTrace, count: int, suffix: str = ".json.gz") -> None:
    for rank in range(count):
        job = {"rank": rank, "world_size": count}
        write_trace(_steps(100 + rank, 200 + rank), f"rank-{rank}{suffix}", distributedInfo=job)


def test_every_rank_is_answered_for_in_order(write_trace: WriteTrace, run_of: OpenRun) -> None:
    _write_ranks(write_trace, 3)
    run = run_of(workers=2)
    assert [info.rank for info in run.infos] == [0, 1, 2]
    assert run.breakdown()["compute_us"].to_pylist() == [300, 302, 304]
    assert run.iterations().select(["rank", "iteration", "compute_us"]).to_pylist()[2:4] == [
        {"rank": 1, "iteration": 0, "compute_us": 101},
        {"rank": 1, "iteration": 1, "compute_us": 201},
    ]
    assert run.operators()["count"].to_pylist() == [2, 2, 2]
    assert run.kernels(by_rank=False).to_pylist()[0]["count"] == 6
    assert run.errors == []


@pytest.mark.parametrize("question", PER_RANK)
def test_units_are_in_the_column_names(write_trace: WriteTrace, run_of: OpenRun, question: str) -> None:
    _write_ranks(write_trace, 1)
    table = getattr(run_of(), question)()
    assert isinstance(table, pa.Table)
    assert table.column_names[:2] == ["rank", "source"]
    counts = {"rank", "iteration", "iterations", "count", "kernel_count", "communication_kernel_count", "bytes"}
    units = ("_us", "_ns", "_gbs", "_bytes")
    for column in table.schema:
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            assert column.name in counts or column.name.endswith(units), column.name


def test_a_second_run_reads_only_parquet(write_trace: WriteTrace, run_of: OpenRun, tmp_path: Path) -> None:
    _write_ranks(write_trace, 2, suffix=".json")
    kept = tmp_path / "kept"
    first = run_of(parquet=kept)
    expected = {question: getattr(first, question)().to_pylist() for question in PER_RANK}
    for path in tmp_path.glob("rank-*.json"):
        # As large and as old as before, with the same rank in its head, and no trace any more.
        stat = path.stat()
        path.write_bytes(path.read_bytes()[:100].ljust(stat.st_size, b"?"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = run_of(parquet=kept)
    assert {question: getattr(again, question)().to_pylist() for question in PER_RANK} == expected
    assert again.errors == []


def test_parquet_alone_is_a_run(write_trace: WriteTrace, run_of: OpenRun, tmp_path: Path) -> None:
    _write_ranks(write_trace, 2)
    kept = tmp_path / "kept"
    first = run_of(parquet=kept)
    expected = {question: getattr(first, question)().to_pylist() for question in PER_RANK}
    limitations = first.limitations
    moved = tmp_path / "elsewhere"
    shutil.move(kept, moved)
    alone = run_of(moved)
    # The question across ranks first: nothing was loaded for it.
    assert alone.kernels().to_pylist() == expected["kernels"]
    assert {question: getattr(alone, question)().to_pylist() for question in PER_RANK} == expected
    assert alone.limitations == limitations


def test_tables_kept_among_the_captures_do_not_hide_them(write_trace: WriteTrace, run_of: OpenRun, tmp_path: Path) -> None:
    _write_ranks(write_trace, 1)
    assert run_of(parquet=tmp_path).breakdown()["rank"].to_pylist() == [0]
    _write_ranks(write_trace, 2)
    assert run_of(parquet=tmp_path).breakdown()["rank"].to_pylist() == [0, 1]


def test_where_nothing_can_be_kept_everything_is_answered(write_trace: WriteTrace, run_of: OpenRun, tmp_path: Path) -> None:
    _write_ranks(write_trace, 2)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    run = run_of(parquet=blocked)
    for question in PER_RANK:
        assert set(getattr(run, question)()["rank"].to_pylist()) == ({0, 1} if question != "copies" else set())
    scratch = run.entries()[0][1]
    assert scratch.is_dir()
    run.close()
    assert not scratch.exists()


def test_one_good_rank_among_junk_is_analysed_and_each_bad_file_named(write_trace: WriteTrace, run_of: OpenRun) -> None:
    good = write_trace(_steps(100, 200), "rank-0.json.gz", distributedInfo={"rank": 0})
    folder = good.parent
    whole = write_trace(_steps(100, 200), "rank-1.json.gz", distributedInfo={"rank": 1}).read_bytes()
    bad = {
        "rank-1.json.gz": whole[: len(whole) // 2],
        "rank-2.json.gz": b"",
        "rank-3.json.gz": b"\x1f\x8b" + b"no gzip at all",
        "rank-4.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "na',
        "rank-5.sqlite": b"this is no database",
        "snapshot_6.pickle": b"cos\nsystem\n(S'touch /tmp/never'\ntR.",
        "rank-7.json": b'{"traceEvents": []}',
    }
    junk = {"notes.txt": b"hello", "config.json": b'{"a": 1}', "core.12": bytes(9), "image.png": b"\x89PNG"}
    for name, content in (bad | junk).items():
        (folder / name).write_bytes(content)
    run = run_of()
    assert {row["rank"]: row["compute_us"] for row in run.breakdown().to_pylist()}[0] == 300
    assert len(run.errors) == len(bad)
    for name in bad:
        (error,) = (error for error in run.errors if str(folder / name) in error)
        assert "Traceback" not in error
        assert "\n" not in error
    assert run.kernels().num_rows >= 1


def test_only_junk_leaves_empty_answers_and_errors(write_trace: WriteTrace, run_of: OpenRun) -> None:
    write_trace(b"", "rank-0.json.gz")
    run = run_of()
    for question in PER_RANK:
        assert getattr(run, question)().num_rows == 0
    assert len(run.errors) == 1
    assert run.infos == []


@pytest.mark.parametrize(("make", "said"), [(lambda path: path / "no", "does not exist"), (Path, "holds no capture")])
def test_no_run_is_an_error_that_names_the_path(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(TraceError, match=said) as raised:
        Run(make(tmp_path))
    assert str(tmp_path) in str(raised.value)


def test_of_two_files_that_claim_one_rank_the_whole_one_counts(
    write_trace: WriteTrace, run_of: OpenRun, tmp_path: Path
) -> None:
    """Parquet of a rank and of a damaged copy of its file, side by side."""
    for folder in ("good", "damaged"):
        (tmp_path / folder).mkdir()
    good = write_trace(_steps(100, 200), "good/rank-0.json.gz", distributedInfo={"rank": 0})
    damaged = write_trace([*_steps(100), kernel("bad", 5, -1)], "damaged/rank-0.json.gz", distributedInfo={"rank": 0})
    for path in (damaged, good):
        run_of(path, parquet=tmp_path / "kept").breakdown()
    run = run_of(tmp_path / "kept")
    assert run.breakdown()["compute_us"].to_pylist() == [300]
    assert run.kernels()["count"].to_pylist() == [2]
    assert [str(damaged) in error for error in run.errors] == [True]
    assert any(str(damaged) in sentence and "left out" in sentence for sentence in run.limitations)


def test_fewer_than_three_iterations_are_a_limitation_said_once(write_trace: WriteTrace, run_of: OpenRun) -> None:
    _write_ranks(write_trace, 3)
    run = run_of()
    assert [caveat.ranks for caveat in run.caveats() if caveat.code == "few_iterations"] == [(0, 1, 2)]
    assert len([sentence for sentence in run.limitations if sentence.startswith("ranks 0-2: only 2 iterations")]) == 1


def test_caveats_do_not_depend_on_the_questions_asked_before(captures: Path, run_of: OpenRun) -> None:
    first, second = (run_of(captures / "kineto" / "tp2_dp2") for _ in range(2))
    before = first.limitations
    second.communication(by_rank=True)
    second.start_skew()
    second.operators()
    assert second.limitations == before == second.limitations
    assert {caveat.code for caveat in second.caveats("idle_gaps")} == {"stream_waits_unrecorded"}


def test_an_unknown_option_is_refused(write_trace: WriteTrace, run_of: OpenRun) -> None:
    with pytest.raises(TypeError, match="breakdown has no option by_rank"):
        run_of(write_trace(_steps(1))).ask("breakdown", by_rank=True)


def test_three_iterations_are_enough(write_trace: WriteTrace, run_of: OpenRun) -> None:
    run = run_of(write_trace(_steps(100, 200, 300)))
    assert run.caveats("typical_iteration") == []
    assert run.typical_iteration()["compute_us"].to_pylist() == [200]


@pytest.mark.parametrize(("ranks", "words"), [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 3, 9], "ranks 0, 2-3, 9")])
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


def test_progress_counts_every_capture(write_trace: WriteTrace, run_of: OpenRun) -> None:
    _write_ranks(write_trace, 3)
    seen: list[tuple[int, int]] = []
    run_of(on_progress=lambda done, total: seen.append((done, total))).breakdown()
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_engine_of_ones_own_can_do_the_work(write_trace: WriteTrace, run_of: OpenRun) -> None:
    from bridge_profiling.analysis.workers import Outcome

    class InThisProcess:
        def map(self, function: Callable, tasks: list) -> list:
            return [Outcome(place, function(task)) for place, task in enumerate(tasks)]

    _write_ranks(write_trace, 2)
    assert run_of(engine=InThisProcess()).breakdown()["rank"].to_pylist() == [0, 1]


def test_an_unknown_engine_is_refused(write_trace: WriteTrace) -> None:
    with pytest.raises(ProfilingConfigError, match="engine 'dask'"):
        Run(write_trace(_steps(1)), engine="dask")


def test_kineto_and_nsys_captures_of_a_rank_are_of_one_rank(captures: Path, tmp_path: Path, run_of: OpenRun) -> None:
    shutil.copy(captures / "kineto" / "pp2_dp2" / "rank-0.json.gz", tmp_path)
    shutil.copy(captures / "kineto" / "pp2_dp2" / "rank-1.json.gz", tmp_path)
    shutil.copy(captures / "nsys" / "tp2_dp2" / "rank0.sqlite.xz", tmp_path)
    run = run_of()
    assert [(row["rank"], row["source"]) for row in run.breakdown().to_pylist()] == [(0, "kineto"), (0, "nsys"), (1, "kineto")]
    assert set(zip(*(run.kernels()[name].to_pylist() for name in ("rank", "source")), strict=True)) == {
        (0, "kineto"),
        (0, "nsys"),
        (1, "kineto"),
    }
    assert [info.source for info, _ in run.entries()] == ["kineto", "kineto"]
    assert "there are Kineto and nsys captures: answers across ranks are from the kineto ones" in run.limitations


def test_a_script_asks_a_run_without_a_main_guard(write_trace: WriteTrace, tmp_path: Path) -> None:
    _write_ranks(write_trace, 2)
    script = tmp_path / "ask.py"
    script.write_text(
        textwrap.dedent(f"""
            from bridge_profiling.analysis import Run
            print(Run({str(tmp_path)!r}).breakdown()["compute_us"].to_pylist())
        """)
    )
    done = run_process([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[300.0, 302.0]", done.stderr


def test_the_parent_holds_answers_and_no_rows_of_a_rank(captures: Path, run_of: OpenRun) -> None:
    """The known tool's parent keeps every rank's events: 245 MB a rank."""
    run = run_of(captures / "kineto" / "tp2_dp2")
    run.breakdown()
    held = sum(table.nbytes for table in [answer.table for answer in run._session._answers.values()])
    tables = [entry / f"{name}.parquet" for _, entry in run.entries() for name in ("host_events", "device_events")]
    rows = sum(pq.read_metadata(table).num_rows for table in tables)
    assert rows > 200_000
    assert held < 20_000


def test_importing_the_facade_loads_neither_torch_nor_a_database() -> None:
    heavy = {"torch", "duckdb", "ray", "rich", "pandas", "nemo_run"}
    code = f"import sys, bridge_profiling.analysis; print({heavy} & set(sys.modules))"
    done = run_process([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_entries_of_the_cache_are_readable_by_anyone(write_trace: WriteTrace, run_of: OpenRun, tmp_path: Path) -> None:
    _write_ranks(write_trace, 2)
    run_of(parquet=tmp_path / "kept").breakdown()
    (*entries,) = (tmp_path / "kept").glob(f"*/{cache.INFO}")
    assert len(entries) == 2
    assert pq.read_table(entries[0].parent / "device_events.parquet").num_rows == 2
