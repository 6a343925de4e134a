"""Causes between ranks: one that computes more, uneven pipeline stages, a slow link."""

from __future__ import annotations

import json
from statistics import median

import pytest

from tests.planted.answers import bus_bandwidth_gbs, kernel_counts, typical_ms, verdicts, waited_ms
from tests.planted.cases import CASES
from tests.planted.conftest import RunOf
from tests.planted.test_replay_hosts import SAME, of_kind, twin_of

DATA, TENSOR = "DATA_PARALLEL_GROUP_WITH_CP", "TENSOR_MODEL_PARALLEL_GROUP"


@of_kind("extra_compute")
def test_extra_compute_is_found_on_its_rank_with_its_length(name: str, run_of: RunOf):
    case = CASES[name]
    (late,) = case.late_ranks
    alone = json.loads((case.folder / "planted.json").read_text())["measured"]["ms_per_iteration_alone"]
    run, twin = run_of(name), run_of(twin_of(name))
    computed, usual = typical_ms(run, "compute_us"), typical_ms(twin, "compute_us")
    assert computed[late] - usual[late] == pytest.approx(alone, rel=0.1)
    for rank in set(case.captured) - {late}:
        assert computed[rank] == pytest.approx(usual[rank], rel=0.04)
    (count,) = kernel_counts(twin)[late]
    assert kernel_counts(run)[late] == {count + case.plant["products_per_microbatch"] * case.microbatches}


@of_kind("extra_compute")
def test_the_others_wait_in_their_communication(name: str, run_of: RunOf):
    case = CASES[name]
    (late,) = case.late_ranks
    exposed = typical_ms(run_of(name), "exposed_communication_us")
    assert all(exposed[rank] - exposed[late] > 10 for rank in exposed if rank != late)


@pytest.mark.parametrize("name", ["straggler_compute_2", "straggler_compute_4"])
def test_who_waits_for_whom_names_the_late_rank(name: str, run_of: RunOf):
    """Only where the profiler says which collectives belong together: this nsys does not."""
    case, run = CASES[name], run_of(name)
    (late,) = case.late_ranks
    alone = json.loads((case.folder / "planted.json").read_text())["measured"]["ms_per_iteration_alone"]
    # Rank `late - layout's tp` shares its data-parallel group: on two ranks, the other one.
    partner = late - case.layout["tp"]
    assert all(0.7 * alone < waited < 1.1 * alone for waited in waited_ms(run, partner, late).values())
    assert all(waited < 3 for waited in waited_ms(run, late, partner).values())
    assert verdicts(run) == dict.fromkeys(case.captured, "no") | {late: "stable"}
    assert run.stragglers().to_pylist()[0]["rank"] == late


def test_waiting_is_not_guessed_where_groups_are_unknown(run_of: RunOf):
    run = run_of("straggler_compute_2_nsys")
    assert run.waits().num_rows == 0
    assert any("message size" in text for text in run.limitations)


@pytest.mark.parametrize("name", ["clean_2", "pipeline_even_2", "witness_tp2_dp2", "witness_pp2_dp2"])
def test_ranks_of_clean_runs_compute_as_long_as_their_peers(name: str, run_of: RunOf):
    """Peers are ranks of one pipeline stage; the last stage has the output layer as well."""
    computed = typical_ms(run_of(name), "compute_us")
    size = len(computed) // CASES[name].layout["pp"]
    stages = [[computed[rank] for rank in list(computed)[first : first + size]] for first in range(0, len(computed), size)]
    for stage in stages:
        assert max(stage) == pytest.approx(min(stage), rel=0.04)
    assert stages[-1][0] < 1.2 * stages[0][0]


def test_uneven_stages_are_seen_as_such(run_of: RunOf):
    case = CASES["pipeline_uneven_2"]
    (late,) = case.late_ranks
    stages = {row["stage"]: row for row in run_of(case.name).pipeline().to_pylist()}
    even = {row["stage"]: row for row in run_of("pipeline_even_2").pipeline().to_pylist()}
    assert {row["microbatches"] for row in (*stages.values(), *even.values())} == {case.microbatches}
    # The same four layers in all, one instead of two in the first stage.
    total, total_even = (sum(row["compute_us"] for row in rows.values()) for rows in (stages, even))
    assert total == pytest.approx(total_even, rel=SAME)
    assert stages[0]["compute_us"] == pytest.approx(even[0]["compute_us"] / 2, rel=0.1)
    a_layer = even[0]["compute_us"] / 2
    assert stages[1]["compute_us"] - even[1]["compute_us"] == pytest.approx(a_layer, rel=0.05)
    assert stages[0]["bubble_fraction"] > 0.6 > stages[1]["bubble_fraction"] + 0.4
    assert all(waited > 2 * a_layer / 1e3 for waited in waited_ms(run_of(case.name), 0, late).values())


@pytest.mark.parametrize("name", ["pipeline_even_2", "witness_pp2_dp2"])
def test_even_stages_wait_as_long_as_their_micro_batches_imply(name: str, run_of: RunOf):
    """1F1B leaves (p - 1) of (m + p - 1) parts of the time; the output layer and the embedding's gradients a little more."""
    case = CASES[name]
    stages = case.layout["pp"]
    ideal = (stages - 1) / (case.microbatches + stages - 1)
    for row in run_of(name).pipeline().to_pylist():
        assert row["stages"] == stages
        assert row["ideal_bubble_fraction"] == pytest.approx(ideal)
        assert row["bubble_fraction"] == pytest.approx(ideal, abs=0.08)


@pytest.mark.parametrize(
    ("name", "operation", "group"), [("slow_link_2", "all_gather", DATA), ("slow_link_4", "all_reduce", TENSOR)]
)
def test_a_slow_link_shows_in_the_bus_bandwidth_and_not_as_waiting(name: str, operation: str, group: str, run_of: RunOf):
    run, twin = run_of(name), run_of(twin_of(name))
    usual = min(bus_bandwidth_gbs(twin, operation, group))
    for bandwidth in bus_bandwidth_gbs(run, operation, group):
        # PCI Express and a copy through the host's memory, where NVLink was.
        assert 15 < bandwidth < 40
        assert bandwidth < usual / 5
    assert set(verdicts(run).values()) == {"no"}
    exposed, before = typical_ms(run, "exposed_communication_us"), typical_ms(twin, "exposed_communication_us")
    for rank in exposed:
        assert exposed[rank] - before[rank] > 10
        waited = [sum(waited_ms(run, rank, other)[each] for other in exposed) for each in CASES[name].iterations]
        assert median(waited) < 0.25 * exposed[rank]


def test_messages_of_the_slow_link_are_as_small_as_planted(run_of: RunOf):
    case = CASES["slow_link_2"]
    per_iteration = json.loads((case.folder / "planted.json").read_text())["measured"]["messages_per_iteration"]
    rows = run_of(case.name).communication().to_pylist()
    (row,) = [row for row in rows if (row["operation"], row["group"]) == ("all_reduce", DATA)]
    # And one of the loss.
    assert row["count"] == (per_iteration + 1) * len(case.iterations)
    assert row["largest_message_bytes"] == 4 * case.plant["elements"]
    overlapped = typical_ms(run_of(case.name), "overlapped_communication_us")
    assert max(overlapped.values()) < 0.1
