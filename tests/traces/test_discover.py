"""RUN can be any directory or file: captures of any origin are found, and each says where its rank comes from."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import WHICH_WINDOW, find_run
from tests.traces.kineto_files import document, kernel


def _trace(path: Path, rank: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = document([kernel("k", 1, 1)], distributedInfo={} if rank is None else {"backend": "nccl", "rank": rank})
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def _manifest(root: Path, folder: str, rank: int, artifact: Path, **keys: object) -> None:
    path = root / "manifest" / folder / f"rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts = [{"path": str(artifact.relative_to(root)), "bytes": 1}]
    content = {"rank": rank, "profilers": [{"name": "torch", "artifacts": artifacts}], "status": "complete", **keys}
    path.write_text(json.dumps(content))


def test_discovery_imports_no_pyarrow() -> None:
    code = "import sys, bridge_profiling.traces.discover, bridge_profiling.traces.types; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _found(root: Path) -> list[tuple[str, int, str, str]]:
    captures = find_run(root).captures
    return [(capture.source, capture.rank, capture.rank_source, capture.path.name) for capture in captures]


def test_ranks_come_from_the_trace_then_the_manifest_then_the_name(tmp_path: Path) -> None:
    """Every file says rank 9 by its name; two manifests and one trace know better."""
    folder = tmp_path / "torch" / "iter-2-4"
    for sub, rank in (("a", 5), ("b", None), ("c", None)):
        _trace(folder / sub / "rank-9.pt.trace.json.gz", rank)
    _manifest(tmp_path, "iter-2-4", 6, folder / "a" / "rank-9.pt.trace.json.gz")
    _manifest(tmp_path, "iter-2-4", 7, folder / "b" / "rank-9.pt.trace.json.gz")
    assert [(rank, source) for _, rank, source, _ in _found(tmp_path)] == [(5, "trace"), (7, "manifest"), (9, "file name")]


def test_the_manifest_adds_what_the_trace_does_not_say(tmp_path: Path) -> None:
    path = _trace(tmp_path / "torch" / "iter-2-4" / "rank-1.pt.trace.json.gz")
    keys = {
        "coordinates": {"tp": [1, 2], "dp": [0, 4]},
        "host": "node-7",
        "world_size": 8,
        "versions": {"torch": "2.11.0+cu130"},
    }
    _manifest(tmp_path, "iter-2-4", 1, path, **keys | {"status": "partial", "reason": "SIGTERM"})
    for run in (tmp_path, path):
        info = load(find_run(run).captures[0], cached=False).info
        assert (info.rank, info.rank_source) == (1, "manifest")
        assert info.coordinates == {"tp": (1, 2), "dp": (0, 4)}
        assert (info.host, info.world_size, info.versions["torch"], info.partial) == ("node-7", 8, "2.11.0+cu130", True)
        assert "the capture is partial: SIGTERM" in [each.text for each in info.caveats]


def test_captures_of_any_origin_are_found(tmp_path: Path) -> None:
    _trace(tmp_path / "tensorboard" / "node1_4711.1712345678.pt.trace.json.gz", 2)
    _trace(tmp_path / "plain" / "trace_rank3.json.gz")
    for name in (
        "nsys/rank-0.nsys-rep",
        "nsys/rank-0.sqlite",
        "nsys/rank-1.nsys-rep",
        "memory/snapshot_0.pickle",
        "oom/rank_1.pkl",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert _found(tmp_path) == [
        ("memory", 0, "file name", "snapshot_0.pickle"),
        ("nsys", 0, "file name", "rank-0.sqlite"),
        ("memory", 1, "file name", "rank_1.pkl"),
        ("nsys", 1, "file name", "rank-1.nsys-rep"),
        ("kineto", 2, "trace", "node1_4711.1712345678.pt.trace.json.gz"),
        ("kineto", 3, "file name", "trace_rank3.json.gz"),
    ]


def test_a_rank_can_be_a_folders_name(tmp_path: Path) -> None:
    for rank in (0, 1):
        _trace(tmp_path / f"rank_{rank}" / "trace.json.gz")
    assert [(rank, source) for _, rank, source, _ in _found(tmp_path)] == [(0, "file name"), (1, "file name")]


def test_files_that_nothing_names_are_numbered_in_order_and_that_is_said(tmp_path: Path) -> None:
    for name in ("decode.json.gz", "prefill.json.gz", "train.json.gz"):
        _trace(tmp_path / name)
    run = find_run(tmp_path)
    assert [(capture.rank, capture.rank_source) for capture in run.captures] == [(0, "order"), (1, "order"), (2, "order")]
    assert [each.code for each in run.caveats] == ["ranks_guessed"]


def test_other_json_is_no_capture(tmp_path: Path) -> None:
    _trace(tmp_path / "rank-0.json.gz", 0)
    (tmp_path / "rank-0.chakra.json").write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": []}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("rank-1")
    (tmp_path / ".hidden").mkdir()
    _trace(tmp_path / ".hidden" / "rank-1.json.gz", 1)
    assert [name for *_, name in _found(tmp_path)] == ["rank-0.json.gz"]


def test_a_damaged_file_named_like_a_capture_is_one_whose_error_is_shown(tmp_path: Path) -> None:
    _trace(tmp_path / "rank-0.json.gz", 0)
    (tmp_path / "rank-1.json.gz").write_bytes(b"")
    (tmp_path / "rank-2.json").write_bytes(b"")
    (tmp_path / "rank-3.pt.trace.json.xz").write_bytes(b"not compressed")
    captures = find_run(tmp_path).captures
    assert [capture.rank for capture in captures] == [0, 1, 2, 3]
    for capture in captures[1:]:
        with pytest.raises(TraceError, match=str(capture.path)):
            load(capture, cached=False)


def test_of_several_attempts_the_one_written_last_counts_and_that_is_said(tmp_path: Path) -> None:
    for attempt, time in (("iter-2-4", 200), ("iter-2-4.1", 300), ("iter-8-9", 100)):
        for rank in (0, 1):
            path = _trace(tmp_path / "torch" / attempt / f"rank-{rank}.pt.trace.json.gz", rank)
            os.utime(path, (time, time))
    run = find_run(tmp_path)
    assert {capture.path.parent.name for capture in run.captures} == {"iter-2-4.1"}
    [caveat] = run.caveats
    assert caveat.code in WHICH_WINDOW
    assert "showing torch/iter-2-4.1, the newest; 4 older kineto captures skipped" in caveat.text
    assert {capture.path.parent.name for capture in find_run(tmp_path / "torch" / "iter-8-9").captures} == {"iter-8-9"}


def test_two_runs_with_the_same_window_are_not_shown_as_one(tmp_path: Path) -> None:
    for rank, name in enumerate(("first", "second")):
        path = _trace(tmp_path / name / "torch" / "iter-2-4" / f"rank-{rank}.pt.trace.json.gz", rank)
        _manifest(tmp_path / name, "iter-2-4", rank, path)
        os.utime(path, (rank + 1, rank + 1))
    run = find_run(tmp_path)
    assert [capture.rank for capture in run.captures] == [1]
    assert "showing second/torch/iter-2-4" in run.caveats[0].text
    snapshot = tmp_path / "first" / "memory" / "rank-1.pickle"
    snapshot.parent.mkdir()
    snapshot.write_bytes(b"x")
    _manifest(tmp_path / "first", "iter-2-4", 1, snapshot)
    assert [caveat.code for caveat in find_run(tmp_path).caveats] == ["captures_skipped", "several_windows"]


def test_several_cycles_of_one_rank_give_the_last(tmp_path: Path) -> None:
    for cycle in (1, 2):
        path = _trace(tmp_path / f"node1_4711.{cycle}.pt.trace.json.gz", 0)
        os.utime(path, (cycle, cycle))
    assert [name for *_, name in _found(tmp_path)] == ["node1_4711.2.pt.trace.json.gz"]


@pytest.mark.parametrize("content", [{}, {"junk.txt": b"x", "data.json": b"{}", "blob.bin": b"\x00"}])
def test_a_directory_of_junk_is_one_error_that_names_it(tmp_path: Path, content: dict[str, bytes]) -> None:
    for name, raw in content.items():
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(TraceError, match=f"{tmp_path} holds no capture"):
        find_run(tmp_path)


def test_a_run_that_does_not_exist_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"{tmp_path / 'no'} does not exist"):
        find_run(tmp_path / "no")


def test_the_real_captures_are_found_with_the_ranks_they_name(captures: Path, tmp_path: Path) -> None:
    found = find_run(captures / "kineto" / "pp2_dp2").captures
    assert [(capture.rank, capture.rank_source) for capture in found] == [(rank, "trace") for rank in range(4)]
    shutil.copy(captures / "kineto" / "pp2_dp2" / "rank-2.json.gz", tmp_path / "rank-7.json.gz")
    assert [(rank, source) for _, rank, source, _ in _found(tmp_path / "rank-7.json.gz")] == [(2, "trace")]


def test_a_copy_named_after_another_rank_does_not_replace_the_rank_it_claims(tmp_path: Path) -> None:
    whole = _trace(tmp_path / "rank-0.json.gz", 0)
    (tmp_path / "rank-1.json.gz").write_bytes(whole.read_bytes()[:-20])
    assert [name for *_, name in _found(tmp_path)] == ["rank-0.json.gz", "rank-1.json.gz"]
