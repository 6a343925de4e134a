"""nsys reports that lack names or tables, or are not complete: an error or a caveat says what is missing."""

import contextlib
import sqlite3
import subprocess
import sys

import pytest

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces import nsys
from bridge_profiling.traces.nsys import database
from bridge_profiling.traces.nsys import report as reports
from tests.traces.conftest import caveats
from tests.traces.nsys_files import KERNEL, THREAD, Report, nccl_report

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'x' AS value FROM n"
COPIED = f"CREATE TABLE old AS SELECT * FROM {KERNEL}; DROP TABLE {KERNEL}"

ITERATION = f"INSERT INTO NVTX_EVENTS (eventType, globalTid, text, start, end) VALUES (59, {THREAD}"

#: What is done to a report, and what its error says.
REFUSED = {
    "no names": ("DROP TABLE StringIds", "its table StringIds, which holds all names, is missing"),
    "names as a view": ("ALTER TABLE StringIds RENAME TO s; CREATE VIEW StringIds AS SELECT * FROM s", "StringIds is a view"),
    "kernels as a virtual table": (f"{COPIED}; CREATE VIRTUAL TABLE {KERNEL} USING fts4(start, end)", "or a virtual table"),
    "kernels without names": (f"ALTER TABLE {KERNEL} DROP COLUMN demangledName", "neither demangledName nor shortName"),
    "kernels without start": (f"ALTER TABLE {KERNEL} DROP COLUMN start", f"{KERNEL} has no column start"),
    "times far in the future": (f"UPDATE {KERNEL} SET start = {1 << 61}, end = {1 << 61} + 10", "times are not nanoseconds"),
    "iterations backwards": (f"{ITERATION}, 'iteration_3', 0, 9); {ITERATION}, 'iteration_2', 10, 19)", "do not follow"),
    "texts as times": (f"UPDATE {KERNEL} SET start = 'soon'", f"{KERNEL}.start holds something other than integers"),
}

#: What is done to a report, and how many of its 2 kernels are lost.
LOST = {
    "half of the names": ("DELETE FROM StringIds WHERE value LIKE '%SendRecv%'", 1),
    "names that are not UTF-8": ("UPDATE StringIds SET value = CAST(x'fffe41' AS TEXT)", 2),
    "no name": (f"UPDATE {KERNEL} SET demangledName = NULL WHERE correlationId = 1", 1),
    "an end before the start": (f"UPDATE {KERNEL} SET end = 0", 2),
    "one correlation for all": (f"UPDATE {KERNEL} SET correlationId = 1", 2),
}


#: What is done to its NVTX ranges, its calls and its kernels, and how many rows are then left out, of them work on a device.
LEFT_OUT = {
    "ranges without a thread": ("UPDATE NVTX_EVENTS SET globalTid = 'x' WHERE rowid = 1", 1, 0),
    "ranges that end before they start": ("UPDATE NVTX_EVENTS SET end = start - 1 WHERE rowid = 1", 1, 0),
    "kernels without a process": (f"UPDATE {KERNEL} SET globalPid = x'00' WHERE rowid = 1", 1, 1),
}


@pytest.fixture
def report(tmp_path):
    """Changes a report of two NCCL kernels with SQL, and gives its path."""

    def change(sql=""):
        (tmp_path / "rank-1.sqlite").unlink(missing_ok=True)
        path = nccl_report(blobs=True).write(tmp_path / "rank-1.sqlite")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.executescript(sql)
        return path

    return change


@pytest.mark.parametrize(("sql", "why"), REFUSED.values(), ids=REFUSED)
def test_a_report_without_what_names_its_work_is_an_error_that_says_so(report, sql, why):
    path = report(sql)
    with pytest.raises(TraceError, match=f"{path} cannot be read: .*{why}"):
        nsys.read(path)


def test_an_enormous_device_is_unknown(report):
    events = nsys.read(report(f"UPDATE {KERNEL} SET deviceId = {1 << 40}"))["device_events"]
    assert (events.num_rows, events["device"].null_count) == (2, 2)


def test_a_report_without_events_is_an_error_that_names_it(tmp_path):
    for table, why in (("users", "it is not an nsys report"), ("META_DATA_EXPORT", "nsys recorded nothing")):
        path = Report().add(table, name="x", value=None).write(tmp_path / f"{table}.sqlite")
        with pytest.raises(TraceError, match=f"{path} holds no events: {why}"):
            nsys.read(path)


@pytest.mark.parametrize(("sql", "lost"), LOST.values(), ids=LOST)
def test_kernels_without_a_name_or_a_time_are_lost(report, sql, lost):
    info = nsys.read(report(sql)).info
    assert (info.lost.device, info.lost.of_device, info.judged) == (lost, 2, False)
    assert f"{lost} of its 2 device events could not be used, so rank 0 is not judged" in info.error
    assert info.partial


@pytest.mark.parametrize(("sql", "lost", "of_device"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_rows_of_no_process_and_ranges_without_a_time_are_counted(report, sql, lost, of_device):
    found = nsys.read(report(sql))
    assert (found.info.lost.total, found.info.lost.device) == (lost, of_device)
    assert f"{lost} rows without a process" in caveats(found)["events_undecodable"]


@pytest.mark.parametrize("journal", ["-wal", "-journal"])
def test_pending_changes_are_told(report, journal):
    path = report()
    path.with_name(path.name + journal).write_bytes(b"x" * 100)
    assert f"{path} is not complete: changes are pending in rank-1.sqlite{journal}" in nsys.read(path).info.error


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who holds a lock")
def test_a_report_that_is_being_written_is_told(report):
    path = report()
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN IMMEDIATE'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=-1, stdout=-1) as writer:
        writer.stdout.readline()
        said = nsys.read(path).info.error
        writer.communicate(b"\n")
    assert said == f"{path} is not complete: process {writer.pid} is writing it"


def test_a_query_that_does_not_end_is_given_up(report, monkeypatch):
    monkeypatch.setattr(database, "_FREE_STEPS", 2_000_000)
    path = report(f"CREATE VIEW endless AS {ENDLESS}")
    said = pytest.raises(TraceError, match=r"rank-1.sqlite cannot be read: .*interrupted")
    with reports.open_report(path) as found, said:
        found.rows("SELECT max(id) FROM endless")
