"""Reports that only nsys itself can read, with it and without it."""

import os
from pathlib import Path

import pytest

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces import nsys
from tests.system.nsys_install import working_nsys
from tests.traces.conftest import values


def test_a_report_without_nsys_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "rank-0.nsys-rep").write_bytes(b"a report")
    with pytest.raises(TraceError, match=r"rank-0.nsys-rep .*install Nsight Systems.*export_sqlite=True"):
        nsys.read(tmp_path / "rank-0.nsys-rep")


@pytest.mark.system
@pytest.mark.needs("nsys")
def test_a_report_is_exported_by_the_nsys_of_this_machine_and_a_cut_one_is_an_error(captures, monkeypatch, tmp_path):
    program = working_nsys(Path(__file__).parents[2] / ".cache" / "nsys")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    whole, report = (captures / "nsys" / "single_gpu.nsys-rep").read_bytes(), tmp_path / "rank-3.nsys-rep"
    report.write_bytes(whole)
    tables = nsys.read(report)
    assert tables.info.files == [str(report)]
    assert values(tables["iterations"], "iteration") == [8, 9]
    assert tables["device_events"].num_rows == 3856 + 164 + 172
    assert list(tmp_path.iterdir()) == [report]
    report.write_bytes(whole[:200_000])
    with pytest.raises(TraceError, match=r"rank-3.nsys-rep cannot be exported by nsys: "):
        nsys.read(report)
