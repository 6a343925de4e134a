"""Reports of nsys and traces of Kineto from real H200s."""

import os
from pathlib import Path

import pytest

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces import kineto, nsys
from tests.system.nsys_install import working_nsys
from tests.traces.conftest import values


def test_the_job_and_its_iterations_are_known_and_no_iteration_is_at_the_boundary(captures):
    """In nsys' report the flush comes after them, and the initialization is another process'."""
    for rank in (0, 1):
        # Its own rank is not the one that the reader is given.
        report = nsys.read(captures / "nsys" / "tp2_dp2" / f"rank{rank}.sqlite.xz", rank=9)
        info = report.info
        assert (info.rank, info.rank_source, info.world_size, info.devices) == (rank, "trace", 4, {rank: "NVIDIA H200"})
        assert info.files[0].endswith(f"rank{rank}.sqlite.xz")
        for tables in (kineto.read(captures / "kineto" / "tp2_dp2" / f"rank-{rank}.json.gz"), report):
            assert values(tables["iterations"], "iteration", "boundary") == [(9, False), (10, False)]


def test_a_report_without_nsys_says_what_to_install(captures, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TraceError, match=r"single_gpu.nsys-rep .*install Nsight Systems.*export_sqlite=True"):
        nsys.read(captures / "nsys" / "single_gpu.nsys-rep")


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
