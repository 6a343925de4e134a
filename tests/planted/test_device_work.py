"""Two profilers record the same work."""

import pytest

from bridge_profiling.analysis.attribution.device import device_work
from tests.planted.cases import CASES
from tests.planted.conftest import TablesOf
from tests.planted.witness import COMPUTE_TOLERANCE, differences

pytestmark = pytest.mark.integration  # reads 8 captures


@pytest.mark.parametrize("name", ["witness_tp2_dp2", "witness_pp2_dp2", "straggler_compute_2", "host_sync_2"])
def test_both_profilers_saw_the_same_kernels_copies_and_messages_on_every_rank(name: str, tables_of: TablesOf) -> None:
    kineto, nsys = tables_of(name), tables_of(f"{name}_nsys")
    assert sorted(kineto) == sorted(nsys) == CASES[name].captured
    for rank in kineto:
        assert list(differences(kineto[rank], nsys[rank])) == [], f"rank {rank}"
        computed = [device_work(tables[rank].device_events).compute.total_ns for tables in (kineto, nsys)]
        assert computed[0] == pytest.approx(computed[1], rel=COMPUTE_TOLERANCE), f"rank {rank}"
