"""Which samples a rank sees in which iteration."""

from __future__ import annotations

import itertools

import pytest

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from recipes.megatron.data import ConsumedSampler  # noqa: E402


def batches(consumed: int = 0, rank: int = 0, ranks: int = 1, total: int = 24) -> list[list[int]]:
    return list(ConsumedSampler(total=total, consumed=consumed, micro_batch_size=2, rank=rank, ranks=ranks))


def test_samples_come_in_order_and_only_in_whole_microbatches():
    assert batches(total=5) == [[0, 1], [2, 3]]


def test_a_run_that_starts_later_sees_what_one_from_the_start_would():
    assert batches(consumed=8) == batches()[4:]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_iteration_uses_the_same_samples_however_many_ranks_there_are(ranks):
    per_rank = [batches(rank=rank, ranks=ranks) for rank in range(ranks)]
    rounds = [list(itertools.chain(*shares)) for shares in zip(*per_rank, strict=True)]
    assert list(itertools.chain(*rounds)) == list(range(24))
