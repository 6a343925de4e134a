"""Two profilers record the same work."""

import pytest

from bridge_profiling.analysis.attribution.device import device_work
from tests.planted.cases import CASES
from tests.planted.witness import COMPUTE_TOLERANCE, differences

pytestmark = pytest.mark.integration  # reads 8 captures


@pytest.mark.parametrize("name", ["witness_tp2_dp2", "witness_pp2_dp2", "straggler_compute_2", "host_sync_2"])
def test_both_profilers_saw_the_same_kernels_copies_and_messages_on_every_rank(name, tables_of):
    kineto, nsys = tables_of(name), tables_of(f"{name}_nsys")
    assert sorted(kineto) == sorted(nsys) == CASES[name].captured
    for rank in kineto:
        assert list(differences(kineto[rank], nsys[rank])) == [], f"rank {rank}"
        computed = [device_work(tables[rank].device_events).compute.total_ns for tables in (kineto, nsys)]
        assert computed[0] == pytest.approx(computed[1], rel=COMPUTE_TOLERANCE), f"rank {rank}"


@pytest.mark.parametrize("name", ["witness_tp2_dp2", "witness_pp2_dp2", "straggler_compute_2", "host_sync_2"])
def test_both_profilers_say_the_same_of_each_phase(name, run_of):
    kineto, nsys = (
        {
            (row["rank"], row["name"]): row
            for row in run_of(captures).phases().to_pylist()
            if row["kind"] in ("phase", "autograd")
        }
        for captures in (name, f"{name}_nsys")
    )
    assert (
        kineto.keys() == nsys.keys() >= {(0, phase) for phase in ("forward-backward", "data-loading", "optimizer", "autograd")}
    )
    for key, row in kineto.items():
        other = nsys[key]
        assert (row["kernel_count"], row["present"]) == (other["kernel_count"], other["present"]), key
        assert row["compute_us"] == pytest.approx(other["compute_us"], rel=COMPUTE_TOLERANCE), key
