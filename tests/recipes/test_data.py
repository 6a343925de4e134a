"""Which samples a rank sees in which iteration, mock ones and those of indexed data alike."""

import itertools

import pytest

from bridge_profiling import ProfilingConfigError

pytest.importorskip("megatron.core")

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from recipes.megatron.data import check_data, microbatches
from tests.recipes.builders import finalized
from tests.recipes.trainings import FROZEN, run_cases


def batches(consumed: int = 0, rank: int = 0, ranks: int = 1, total: int = 24) -> list[list[int]]:
    return list(microbatches(total, consumed, size=2, rank=rank, ranks=ranks))


def test_samples_come_in_order_in_whole_microbatches_wherever_a_run_starts():
    assert batches(total=5) == [[0, 1], [2, 3]]
    assert batches(consumed=8) == batches()[4:]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_iteration_uses_the_same_samples_however_many_ranks_there_are(ranks):
    per_rank = [batches(rank=rank, ranks=ranks) for rank in range(ranks)]
    rounds = [list(itertools.chain(*shares)) for shares in zip(*per_rank, strict=True)]
    assert list(itertools.chain(*rounds)) == list(range(24))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two indexed data sets of made-up documents, `long` and `short`: arithmetic sequences, which a model can learn."""
    folder = tmp_path_factory.mktemp("indexed")
    for name, documents in (("long", 120), ("short", 30)):
        random = numpy.random.default_rng(documents)
        builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=DType.optimal_dtype(128))
        for _ in range(documents):
            length, first, step = (int(random.integers(*between)) for between in ((20, 300), (0, 127), (1, 7)))
            document = (numpy.arange(length) * step + first) % 127
            builder.add_document(numpy.append(document, 127), [length + 1])
        builder.finalize(f"{folder}/{name}.idx")
    return folder


@pytest.mark.integration
def test_iteration_3_sees_the_same_indexed_data_wherever_a_run_starts_whoever_loads_it_and_on_two_ranks(folder):
    indexed, blend = f"{FROZEN} dataset.blend=[{folder}/long]", f"{FROZEN} dataset.blend=[{folder}/long,{folder}/short]"
    workers = f"dataset.num_workers=2 dataset.prefetch_factor=3 dataset.path_to_cache={folder}/cache"
    cases = {
        "mock": FROZEN,
        "indexed": indexed,
        "workers_from_3": f"{indexed} train.start_iteration=3 {workers}",
        "blend": f"{blend} train.eval_interval=3",
        "weighted": f"{blend} dataset.blend_weights=[1,9]",
    }
    losses, _ = run_cases(folder, cases)
    whole = losses["indexed"].train
    assert whole != losses["mock"].train
    assert len(set(whole.values())) == 6
    assert losses["workers_from_3"].train == {iteration: whole[iteration] for iteration in (3, 4, 5)}
    # Indices are kept next to the data, or where they are asked for.
    assert list(folder.glob("long/cache/GPTDataset_indices/*.npy"))
    assert list(folder.glob("cache/*.npy"))
    # Data sets are blended by their sizes or by weights.
    assert len({str(losses[name].train) for name in ("indexed", "blend", "weighted")}) == 3
    assert list(losses["blend"].evaluation) == [2, 5]
    # Two ranks share one index.
    settings = f"{FROZEN} dataset.blend=[{folder}/long] dataset.path_to_cache={folder}/cache_of_two"
    two_ranks = run_cases(folder, {"two_ranks": settings}, ranks=2)[0]["two_ranks"]
    assert two_ranks.values == pytest.approx(losses["indexed"].values, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("none", "", r"none\.bin and .*/none\.idx cannot be found.*preprocess_data"),
        ("long", "model.vocab_size=100", "long holds token 127.*model.vocab_size=128"),
        ("long", "dataset.split=999,1,0", "gives a part of .*long no document; it has 120"),
        ("long", "dataset.split=1 train.eval_interval=2", "leaves nothing for evaluation"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_before_anything_starts(folder, name, overrides, message):
    config = finalized("gpt_tiny", f"dataset.blend=[{folder}/{name}] {overrides}")
    with pytest.raises(ProfilingConfigError, match=message):
        check_data(config)
