"""What captures hold of communication is what configuration and layout imply: every operation, its group and its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.planted.cases import CASES, RECIPE, Case
from tests.planted.conftest import TablesOf
from tests.planted.expected_collectives import Collective, expected_collectives, recorded_collectives

if TYPE_CHECKING:
    from recipes.config import ConfigContainer

pytestmark = pytest.mark.needs("megatron")

#: All that Kineto recorded, but for the case whose plant is another way of reducing the gradients.
CAPTURED = [
    case.name
    for case in CASES.values()
    if case.profiler == "torch" and (case.plant or {}).get("kind") != "small_messages" and case.folder.is_dir()
]


def configuration(case: Case, *more: str) -> ConfigContainer:
    """What the case trained, finalized as its ranks did."""
    from launch.pretrain import build_config
    from recipes.finalize import finalize

    config = build_config(RECIPE, overrides=[*case.settings, "model.transformer_impl=local", *more])
    finalize(config, case.ranks)
    return config


@pytest.mark.parametrize("name", CAPTURED)
def test_every_rank_communicates_exactly_what_its_configuration_implies(name: str, tables_of: TablesOf):
    case = CASES[name]
    config = configuration(case)
    tables = tables_of(name)
    assert sorted(tables) == case.captured
    for rank, captured in tables.items():
        found = recorded_collectives(captured)
        assert sorted(found) == case.iterations
        for iteration, operations in found.items():
            assert operations == expected_collectives(config, case.ranks, rank), f"rank {rank}, iteration {iteration}"


@pytest.mark.parametrize("name", CAPTURED)
def test_message_bytes_are_those_of_the_configuration(name: str, tables_of: TablesOf):
    case = CASES[name]
    expected = expected_collectives(configuration(case), case.ranks, case.captured[0])
    rows = tables_of(name)[case.captured[0]].collectives.select(["iteration", "message_bytes"]).to_pylist()
    for iteration in case.iterations:
        assert sum(row["message_bytes"] for row in rows if row["iteration"] == iteration) == sum(
            count * operation.message_bytes for operation, count in expected.items()
        )


def test_a_small_case_counted_by_hand():
    """TP=2, DP=2, one layer: the numbers of Megatron's papers, times two micro-batches of 8 x 2048 x 2048 in bf16."""
    expected = expected_collectives(configuration(CASES["witness_tp2_dp2"]), 4, rank=3)
    activations, tokens = 8 * 2048 * 2048, 8 * 2048
    # (4096 vocabulary rows + 2048 positions + 2 h^2 of attention + 8/2 h^2 of MLP, h = 2048) and biases and norms of one layer.
    gradients = (4096 + 2048) * 2048 + (4 + 8) // 2 * 2048**2 + (3 + 4) * 2048 // 2 + 2 * 2048 + 3 * 2 * 2048
    assert expected == {
        Collective("all_reduce", "TENSOR_MODEL_PARALLEL_GROUP", (2, 3), activations, activations, "BFloat16"): 2 * (4 + 2),
        Collective("all_reduce", "TENSOR_MODEL_PARALLEL_GROUP", (2, 3), tokens, tokens, "Float"): 2 * 3,
        Collective("reduce_scatter", "DATA_PARALLEL_GROUP_WITH_CP", (1, 3), gradients, gradients // 2, "Float"): 1,
        Collective("all_gather", "DATA_PARALLEL_GROUP_WITH_CP", (1, 3), gradients // 2, gradients, "BFloat16"): 1,
        Collective("all_reduce", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", (0, 1, 2, 3), 1, 1, "Float"): 1,
        Collective("all_reduce", "DATA_PARALLEL_GROUP_WITH_CP", (1, 3), 2, 2, "Double"): 1,
    }


def test_gradients_that_do_not_overlap_are_one_bucket():
    """The case whose gradients are sent in pieces: what was gathered again is one bucket of everything."""
    expected = expected_collectives(configuration(CASES["slow_link_2"]), 2, rank=0)
    gathered = [each.out_elements for each in expected if each.operation == "all_gather"]
    assert gathered == [71333888]


def test_what_no_rule_covers_is_refused():
    config = configuration(CASES["witness_tp2_dp2"], "model.sequence_parallel=true")
    with pytest.raises(NotImplementedError, match="sequence_parallel"):
        expected_collectives(config, 4, rank=0)
