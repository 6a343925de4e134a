"""`bridge-profiling analyze` as it is typed: what it prints, where, and the exit code."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.traces.conftest import captures
from tests.traces.kineto_files import call, complete, document, kernel

__all__ = ["captures"]

Analyze = Callable[..., subprocess.CompletedProcess]

_COMMAND = [sys.executable, "-m", "bridge_profiling.cli", "analyze"]


@pytest.fixture
def analyze(tmp_path: Path) -> Analyze:
    """Runs the command in a fresh process, in a directory with one good rank."""
    write(tmp_path / "run" / "rank-0.json.gz", 0)

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*_COMMAND, *arguments], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120
        )

    return run


def write(path: Path, rank: int, cut: int | None = None, *, device: bool = True) -> None:
    """A trace of two iterations, cut off after some bytes; with a kernel in each, or on a CPU alone."""
    events = []
    for place in (0, 1):
        begin = 1000 * place
        events.append(complete("user_annotation", f"ProfilerStep#{place}", begin, 900))
        if device:
            events += [
                call("cudaLaunchKernel", begin + 10, 2, place + 1),
                kernel("my_gemm_kernel", begin + 100, 250, correlation=place + 1),
            ]
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(json.dumps(document(events, distributedInfo={"rank": rank})).encode())
    path.write_bytes(packed[:cut])


def test_piped_it_is_plain_text_with_every_number_in_its_place(analyze: Analyze) -> None:
    done = analyze("run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert not set("│┃━─") & set(done.stdout)
    lines = done.stdout.splitlines()
    device = lines.index("Device time over the whole capture, ms")
    assert lines[device + 1].split()[:5] == ["rank", "span", "busy", "idle", "compute"]
    assert lines[device + 2].split()[:5] == ["0", "1.25", "0.50", "0.75", "0.50"]
    (gemm,) = (line for line in lines if line.endswith("my_gemm_kernel"))
    assert gemm.split() == ["compute", "2", "0.50", "100%", "250.0", "250.0", "250.0", "my_gemm_kernel"]
    assert any("only 2 iterations were captured" in line for line in lines)


def test_a_rank_on_a_cpu_has_iterations_and_no_device_that_was_idle(analyze: Analyze, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank-1.json.gz", 1, device=False)
    done = analyze("run")
    lines = done.stdout.splitlines()
    typical = lines.index("A typical iteration, ms")
    on_device, on_cpu = (line.split() for line in lines[typical + 2 : typical + 4])
    assert on_device[:3] == ["0", "0.90", "0.25"]
    assert on_cpu[:8] == ["1", "0.90", *"––––––"]
    assert any("rank 1: no work on a device was recorded: not compared" in line for line in lines)


def test_json_is_all_there_is_on_standard_output(analyze: Analyze) -> None:
    done = analyze("run", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["schema_version"] == 1
    assert found["ranks"][0]["device"]["compute_us"] == 500


def test_a_bad_rank_is_named_once_and_the_others_are_analysed(analyze: Analyze, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank-1.json.gz", 1, cut=60)
    write(tmp_path / "run" / "rank-2.json.gz", 2)
    (tmp_path / "run" / "rank-3.json.gz").write_bytes(b"")
    (tmp_path / "run" / "notes.txt").write_text("no capture")
    done = analyze("run", "--json")
    assert done.returncode == 1
    ranks = {rank["rank"]: rank["device"]["compute_us"] for rank in json.loads(done.stdout)["ranks"]}
    assert ranks[0] == ranks[2] == 500
    errors = done.stderr.splitlines()
    assert len(errors) == 2
    assert all(error.startswith("error: ") for error in errors)
    assert [sum(name in error for error in errors) for name in ("rank-1.json.gz", "rank-3.json.gz")] == [1, 1]


def test_only_bad_ranks_are_an_error_and_an_empty_answer(analyze: Analyze, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank-0.json.gz").write_bytes(b"")
    done = analyze("bad", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ranks"] == []
    assert done.stderr.count("error: ") == 1


def test_a_directory_without_captures_is_one_error(analyze: Analyze, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no capture")
    done = analyze("empty")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: empty holds no capture: no Kineto trace, nsys report or memory snapshot is under it"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "does not exist"),
        ([], "RUN"),
        (["run", "--workers", "0"], "--workers"),
        (["run", "--engine", "dask"], "--engine"),
        (["run", "--parquet", "run/rank-0.json.gz"], "is a file"),
        (["run", "--ray-address", "auto"], "--engine ray"),
        (["run", "--no-such-option"], "--no-such-option"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(analyze: Analyze, arguments: list[str], said: str) -> None:
    done = analyze(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_tables_are_kept_where_asked_and_are_a_run_themselves(analyze: Analyze, tmp_path: Path) -> None:
    first = analyze("run", "--json", "--parquet", "tables")
    assert first.returncode == 0, first.stderr
    assert len(list((tmp_path / "tables").glob("*/device_events.parquet"))) == 1
    assert not (tmp_path / "run" / ".bridge_profiling").exists()
    again = analyze("tables", "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)


def test_by_default_the_tables_are_kept_beside_the_captures(analyze: Analyze, tmp_path: Path) -> None:
    environment = {"BRIDGE_PROFILING_CACHE": ""}
    assert analyze("run", **environment).returncode == 0
    (entry,) = (tmp_path / "run" / ".bridge_profiling").glob("*/device_events.parquet")
    written = entry.stat().st_mtime_ns
    assert analyze("run", **environment).returncode == 0
    assert entry.stat().st_mtime_ns == written


def test_one_file_is_a_run(analyze: Analyze) -> None:
    done = analyze("run/rank-0.json.gz", "--json", "--workers", "1")
    assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [0]


def test_a_pipe_that_closes_early_is_no_error_to_look_at(analyze: Analyze, tmp_path: Path) -> None:
    line = " ".join(["set -o pipefail;", *_COMMAND, "run", "|", "true"])
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr


def on_a_terminal(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and what a terminal of 200 columns shows."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "60"}
    process = subprocess.Popen(
        [*_COMMAND[:-1], *arguments], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 120)[0]:
        try:
            more = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not more:
            break
        shown += more
    os.close(ours)
    return process.wait(timeout=60), shown.decode()


def teston_a_terminal_it_is_tables(analyze: Analyze, tmp_path: Path) -> None:
    code, shown = on_a_terminal(["analyze", "run"], tmp_path)
    assert code == 0
    assert "│" in shown
    assert "my_gemm_kernel" in shown


def test_work_of_more_than_a_second_shows_its_progress(captures: Path, tmp_path: Path) -> None:
    """On a terminal, and gone when the answer is there; four ranks take some seconds to be read for the first time."""
    run = captures / "kineto" / "tp2_dp2"
    code, shown = on_a_terminal(["analyze", str(run), "--workers", "1", "--parquet", str(tmp_path / "tables")], tmp_path)
    assert code == 0
    counts = re.findall(r"(\d)/4", shown)
    assert {"1", "2", "3"} & set(counts)
    assert "captures" in shown
    # The bar's line is erased before the first table.
    assert shown.index("\x1b[2K", shown.rindex("captures")) < shown.index("Device time")


@pytest.mark.system
def test_the_whole_of_the_real_captures_can_be_shown(captures: Path, tmp_path: Path) -> None:
    for folder in ("kineto/pp2_dp2", "nsys/tp2_dp2", "memory/tp2_dp2"):
        done = subprocess.run(
            [*_COMMAND, str(captures / folder), "--parquet", str(tmp_path / "tables" / folder)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        expected = "Device memory" if folder.startswith("memory") else "Kernels of all ranks"
        assert expected in done.stdout
