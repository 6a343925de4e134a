"""What captures hold of communication is what the configuration implies, and two profilers record the same work."""

import pytest

from bridge_profiling.analysis.attribution.device import device_work
from tests.planted.cases import CASES, RECIPE, Case
from tests.planted.conftest import TablesOf
from tests.planted.expected_collectives import expected_collectives, recorded_collectives
from tests.planted.witness import COMPUTE_TOLERANCE, differences

pytestmark = pytest.mark.integration  # reads 13 captures

#: All that Kineto recorded, but for the case whose cause is another way of reducing the gradients.
CAPTURED = [
    case.name for case in CASES.values() if case.profiler == "torch" and (case.plant or {}).get("kind") != "small_messages"
]


def expected(case: Case, rank: int):
    """What a rank of a case communicates, whose configuration is finalized as its ranks did."""
    from launch.pretrain import build_config
    from recipes.finalize import finalize

    config = build_config(RECIPE, overrides=[*case.settings, "model.transformer_impl=local"])
    finalize(config, case.ranks)
    return expected_collectives(config, case.ranks, rank)


@pytest.mark.needs("megatron")
@pytest.mark.parametrize("name", CAPTURED)
def test_every_rank_communicates_exactly_what_its_configuration_implies(name: str, tables_of: TablesOf) -> None:
    case, tables = CASES[name], tables_of(name)
    assert sorted(tables) == case.captured
    for rank, captured in tables.items():
        implied = expected(case, rank)
        assert recorded_collectives(captured) == dict.fromkeys(case.iterations, implied)
        rows = captured.collectives.select(["iteration", "message_bytes"]).to_pylist()
        recorded_bytes = sum(row["message_bytes"] for row in rows if row["iteration"] is not None)
        implied_bytes = sum(count * operation.message_bytes for operation, count in implied.items())
        assert recorded_bytes == implied_bytes * len(case.iterations)


@pytest.mark.parametrize("name", ["witness_tp2_dp2", "witness_pp2_dp2", "straggler_compute_2", "host_sync_2"])
def test_both_profilers_saw_the_same_kernels_copies_and_messages_on_every_rank(name: str, tables_of: TablesOf) -> None:
    kineto, nsys = tables_of(name), tables_of(f"{name}_nsys")
    assert sorted(kineto) == sorted(nsys) == CASES[name].captured
    for rank in kineto:
        assert list(differences(kineto[rank], nsys[rank])) == [], f"rank {rank}"
        computed = [device_work(tables[rank].device_events).compute.total_ns for tables in (kineto, nsys)]
        assert computed[0] == pytest.approx(computed[1], rel=COMPUTE_TOLERANCE), f"rank {rank}"
