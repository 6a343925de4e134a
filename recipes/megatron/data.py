"""Batches by the number of samples consumed, so that iteration k sees the same data wherever a run starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers import MegatronTokenizer

from recipes.config import ConfigContainer

Batch = dict[str, torch.Tensor]

# It warns of every mock data set that it cannot save its index, which takes a tenth of a second to make.
logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Data:
    """The training and evaluation samples of a run, and how they are dealt out to data-parallel ranks."""

    train: MockGPTDataset
    evaluation: MockGPTDataset | None
    global_batch_size: int
    micro_batch_size: int

    def train_batches(self, start_iteration: int) -> Iterator[Batch]:
        """This rank's microbatches from the first of `start_iteration` on."""
        return self._batches(self.train, consumed=start_iteration * self.global_batch_size)

    def evaluation_batches(self) -> Iterator[Batch]:
        """This rank's microbatches of an evaluation: the same samples every time."""
        return self._batches(self.evaluation, consumed=0)

    def _batches(self, dataset: MockGPTDataset, consumed: int) -> Iterator[Batch]:
        sampler = ConsumedSampler(
            total=len(dataset),
            consumed=consumed,
            micro_batch_size=self.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            ranks=parallel_state.get_data_parallel_world_size(),
        )
        # A generator of its own: the loader would draw a seed from the one that dropout uses.
        loader = torch.utils.data.DataLoader(
            dataset, batch_sampler=sampler, pin_memory=torch.cuda.is_available(), generator=torch.Generator()
        )
        return iter(loader)


@dataclass(frozen=True)
class ConsumedSampler:
    """Yields one microbatch of sample numbers after another, starting behind the samples consumed.

    Each round takes `micro_batch_size * ranks` consecutive samples, of which rank r gets the r-th share. So an iteration
    uses the same samples however many ranks there are.
    """

    total: int
    consumed: int
    micro_batch_size: int
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[list[int]]:
        """From the first sample not consumed to the last whole round."""
        share = self.micro_batch_size
        for first in range(self.consumed + self.rank * share, self.total - share + 1, share * self.ranks):
            yield list(range(first, first + share))


def build_data(config: ConfigContainer) -> Data:
    """Mock GPT samples for the whole training and for one evaluation."""
    train, dataset = config.train, config.dataset
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=config.tokenizer.vocab_size)
    settings = GPTDatasetConfig(
        random_seed=dataset.random_seed,
        sequence_length=config.model.seq_length,
        reset_position_ids=dataset.reset_position_ids,
        reset_attention_mask=dataset.reset_attention_mask,
        eod_mask_loss=dataset.eod_mask_loss,
        # Causal attention needs no mask of its own, and at 2,048 tokens one would be 4 MB a sample.
        create_attention_mask=dataset.reset_attention_mask,
        tokenizer=tokenizer,
    )
    evaluated = train.eval_iters * train.global_batch_size if train.eval_interval is not None else None
    sizes = [train.train_iters * train.global_batch_size, evaluated, None]
    samples, evaluation, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, settings).build()
    return Data(samples, evaluation, train.global_batch_size, train.micro_batch_size)
