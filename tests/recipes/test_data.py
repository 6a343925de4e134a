"""Which samples a rank sees in which iteration, mock ones and those of indexed data alike."""

from __future__ import annotations

import itertools

import pytest

from bridge_profiling import ProfilingConfigError

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from bridge_profiling.overrides import apply_overrides  # noqa: E402
from launch import build_indexed_data  # noqa: E402
from recipes.finalize import finalize  # noqa: E402
from recipes.megatron import indexed  # noqa: E402
from recipes.megatron.data import ConsumedSampler, check_data  # noqa: E402
from recipes.models import gpt_tiny  # noqa: E402

#: A learning rate so small that no weight changes: what is left of a loss is its data.
FROZEN = ["optimizer.lr=1e-30", "optimizer.weight_decay=0"]


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two indexed data sets of made-up documents, `long` and `short`."""
    folder = tmp_path_factory.mktemp("indexed")
    for name, documents in (("long", 120), ("short", 30)):
        indexed.write(indexed.made_up(documents, 127, seed=documents), f"{folder}/{name}", end_of_document=127)
    return folder


@pytest.fixture(scope="module")
def losses(folder, run_cases):
    long, short = f"{folder}/long", f"{folder}/short"
    workers = ["dataset.num_workers=2", "dataset.prefetch_factor=3"]
    return run_cases(
        folder,
        {
            "mock": FROZEN,
            "indexed": [*FROZEN, f"dataset.blend=[{long}]"],
            "from_3": [*FROZEN, f"dataset.blend=[{long}]", "train.start_iteration=3"],
            "workers_from_3": [*FROZEN, f"dataset.blend=[{long}]", "train.start_iteration=3", *workers],
            # 48 samples of 64 tokens are more than the short set's 4,600 tokens hold once, after its split.
            "short": [*FROZEN, f"dataset.blend=[{short}]", "train.train_iters=12"],
            "blend": [*FROZEN, f"dataset.blend=[{long},{short}]", "train.eval_interval=3"],
            "weighted": [*FROZEN, f"dataset.blend=[{long},{short}]", "dataset.blend_weights=[1,9]"],
            "learnt": [f"dataset.blend=[{long}]", f"dataset.path_to_cache={folder}/cache"],
        },
    )[0]


def test_indexed_data_is_what_the_model_learns_from(losses):
    assert losses["indexed"].train != losses["mock"].train
    assert losses["learnt"].values[-1] < losses["learnt"].values[0] - 0.05


def test_indices_are_kept_beside_the_data_or_where_they_are_asked_for(losses, folder):
    assert list(folder.glob("long/cache/GPTDataset_indices/*.npy"))
    assert list(folder.glob("cache/*.npy"))


def test_iteration_3_sees_the_same_indexed_data_wherever_a_run_starts(losses):
    later = {iteration: loss for iteration, loss in losses["indexed"].train.items() if iteration >= 3}
    assert losses["from_3"].train == later
    assert len(set(losses["indexed"].train.values())) == 6


def test_worker_processes_change_nothing_of_what_is_seen(losses):
    assert losses["workers_from_3"].train == losses["from_3"].train


def test_a_training_may_be_longer_than_its_data(losses):
    assert list(losses["short"].train) == list(range(12))


def test_data_sets_are_blended_by_their_sizes_or_by_weights(losses):
    assert len({str(losses[name].train) for name in ("indexed", "blend", "weighted")}) == 3
    assert list(losses["blend"].evaluation) == [2, 5]


def test_two_ranks_share_one_index_and_see_what_one_rank_sees(losses, folder, run_cases):
    two = {"two_ranks": [*FROZEN, f"dataset.blend=[{folder}/long]", f"dataset.path_to_cache={folder}/cache_of_two"]}
    assert run_cases(folder, two, ranks=2)[0]["two_ranks"].values == pytest.approx(losses["indexed"].values, abs=5e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.blend=[{folder}/none]"], r"none\.bin and .*/none\.idx cannot be found.*--output .*/none"),
        (["dataset.blend=[{folder}/long]", "model.vocab_size=100"], "long holds token 127.*model.vocab_size=128"),
        (["dataset.blend=[{folder}/long]", "dataset.split=999,1,0"], "gives a part of .*long no document; it has 120"),
        (["dataset.blend=[{folder}/long]", "dataset.split=1", "train.eval_interval=2"], "leaves nothing for evaluation"),
        (["dataset.blend=[{folder}/long]", "dataset.split=0,1,1"], "leaves nothing for training"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_before_anything_starts(folder, overrides, message):
    config = gpt_tiny()
    apply_overrides(config, [override.format(folder=folder) for override in overrides])
    finalize(config, 1)
    with pytest.raises(ProfilingConfigError, match=message):
        check_data(config)


def test_a_text_becomes_documents_of_bytes_that_can_be_trained_on(tmp_path, capsys):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tmp_path / "text").write_text("Two lines\nof one.\n\n\n\nAnother: é")
    assert build_indexed_data.main(["--text", f"{tmp_path}/text", "--output", f"{tmp_path}/new/set"]) == 0
    typed = capsys.readouterr().out.splitlines()[-1].split()
    documents = IndexedDataset(f"{tmp_path}/new/set")
    assert [bytes(document[:-1].astype("uint8")).decode() for document in documents] == ["Two lines\nof one.", "Another: é"]
    assert {int(document[-1]) for document in documents} == {256}
    config = gpt_tiny()
    apply_overrides(config, [word for word in typed if "." in word and "=" in word])
    finalize(config, 1)
    assert config.dataset.blend == [f"{tmp_path}/new/set"]
    assert config.tokenizer.vocab_size == 256
