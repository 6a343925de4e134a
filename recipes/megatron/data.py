"""Batches selected by the number of samples consumed, so iteration k sees the same data wherever a run starts.

Samples come from megatron-core: mock samples, or those of indexed token files, which are never written here.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bridge_profiling.common.errors import require
from recipes.config import ConfigContainer

Batch = dict[str, torch.Tensor]

#: Number of tokens at the beginning of a data set that are checked against the vocabulary before training.
_TOKENS_CHECKED = 1_000_000

# It warns for every mock data set that it cannot save the index, which takes a tenth of a second to build.
logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)


@dataclass(frozen=True)
class TokenIds:
    """The tokenizer that megatron-core's data sets require, for data that already consist of token ids.

    megatron-core's own is in a module with tokenizers for text, which makes each rank import `transformers` if installed.

    Args:
        eod: the id that ends a document, and the number of distinct tokens besides it.
    """

    eod: int

    @property
    def vocab_size(self) -> int:
        """Distinct tokens, including the one that ends a document."""
        return self.eod + 1

    @property
    def unique_identifiers(self) -> dict[str, object]:
        """Part of the names of the sample indices that megatron-core saves."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}", "eod": self.eod}


@dataclass(frozen=True)
class Data:
    """The training and evaluation samples of a run, and their division among data-parallel ranks."""

    train: torch.utils.data.Dataset
    evaluation: torch.utils.data.Dataset | None
    config: ConfigContainer

    def train_batches(self, start_iteration: int) -> Iterator[Batch]:
        """This rank's microbatches, starting with the first of `start_iteration`."""
        return self._batches(self.train, consumed=start_iteration * self.config.train.global_batch_size)

    def evaluation_batches(self) -> Iterator[Batch]:
        """This rank's microbatches of an evaluation: the same samples every time."""
        return self._batches(self.evaluation, consumed=0)

    def _batches(self, dataset: torch.utils.data.Dataset, consumed: int) -> Iterator[Batch]:
        train, settings = self.config.train, self.config.dataset
        batch_sampler = microbatches(
            len(dataset),
            consumed,
            size=train.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            ranks=parallel_state.get_data_parallel_world_size(),
        )
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            worker_init_fn=partial(_ignore, train.exit_signal) if train.exit_signal_handler else None,
            pin_memory=settings.pin_memory and torch.cuda.is_available(),
            # With a separate generator, since the loader would draw its seed from the one that dropout uses.
            generator=torch.Generator(),
        )
        if settings.num_workers:
            # Workers are forked. A collection in one of them would destroy this process's garbage, and some torch objects crash
            # when they are destroyed in a process that lacks their threads.
            gc.collect()
        return iter(loader)


def _ignore(name: str, worker: int) -> None:
    """torchrun and Slurm signal every process, and a training that lost a worker would fail before its checkpoint."""
    signal.signal(signal.Signals[name], signal.SIG_IGN)


def microbatches(total: int, consumed: int, *, size: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """The sample numbers of one microbatch after another, from the first sample not consumed to the last complete round.

    Each round takes `size * ranks` consecutive samples, and rank r gets the r-th share, so an iteration uses the same samples
    for any number of ranks.
    """
    for first in range(consumed + rank * size, total - size + 1, size * ranks):
        yield list(range(first, first + size))


def build_data(config: ConfigContainer) -> Data:
    """GPT samples for the whole training and for one evaluation.

    Every rank calls it; for indexed data, global rank 0 builds the sample indices while the others wait.
    """
    train = config.train
    # None requests all samples, which a blend with weights does not support.
    kind, unused = (MockGPTDataset, None) if config.dataset.blend is None else (GPTDataset, 1)
    evaluated = train.eval_iters * train.global_batch_size if train.eval_interval is not None else unused
    sizes = [train.train_iters * train.global_batch_size, evaluated, unused]
    samples, evaluation, _ = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, _megatron_settings(config)).build()
    return Data(samples, evaluation, config)


def _megatron_settings(config: ConfigContainer) -> GPTDatasetConfig:
    dataset, blend = config.dataset, None
    if dataset.blend is not None:
        # Without weights, megatron-core ends a blend of several after one pass over it, even if the training is longer.
        sizes = [float(os.path.getsize(f"{prefix}.bin")) for prefix in dataset.blend] if len(dataset.blend) > 1 else None
        blend = (dataset.blend, dataset.blend_weights or sizes)
    return GPTDatasetConfig(
        random_seed=dataset.random_seed,
        sequence_length=config.model.seq_length,
        blend=blend,
        split=None if dataset.blend is None else dataset.split,
        path_to_cache=dataset.path_to_cache,
        reset_position_ids=dataset.reset_position_ids,
        reset_attention_mask=dataset.reset_attention_mask,
        eod_mask_loss=dataset.eod_mask_loss,
        # Causal attention needs no mask of its own, and at 2,048 tokens one would be 4 MB a sample.
        create_attention_mask=dataset.reset_attention_mask,
        tokenizer=TokenIds(config.tokenizer.vocab_size),
    )


def check_data(config: ConfigContainer) -> None:
    """Refuse indexed data that are not on this machine, or whose tokens the model does not know.

    Raises:
        ProfilingConfigError: names the data set and says what to type.
    """
    dataset, rows = config.dataset, config.model.vocab_size
    if dataset.blend is None:
        return
    # Where training, evaluation and test begin and end in the documents, as shares of them; None for a share of 0.
    parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(dataset.split))
    for name, part in zip(("training", "evaluation"), parts, strict=False):
        require(
            part is not None or (name == "evaluation" and config.train.eval_interval is None),
            f"dataset.split={dataset.split} leaves nothing for {name}",
            why="it gives the shares of training, evaluation and test in the documents",
            instead="Type dataset.split=90,10,0",
        )
    for prefix in dataset.blend:
        missing = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if not os.path.isfile(name)]
        require(
            not missing,
            f"dataset.blend names {prefix}, and {' and '.join(missing)} cannot be found",
            why="an indexed data set is a .bin and an .idx file, and dataset.blend their path without the ending",
            instead="Make them with Megatron-LM's tools/preprocess_data.py, or type dataset.blend=null for mock data",
        )
        sequences = IndexedDataset(prefix)
        for part in parts:
            # megatron-core rounds like this, and searches forever for samples in a part without documents.
            require(
                part is None or round(part[0] * len(sequences)) != round(part[1] * len(sequences)),
                f"dataset.split={dataset.split} gives a part of {prefix} no document",
                why=f"it has {len(sequences)}",
                instead="Type dataset.split=100,0,0 to train on all of them, without evaluation",
            )
        tokens = numpy.memmap(f"{prefix}.bin", sequences.index.dtype, mode="r") if len(sequences) else numpy.zeros(1)
        highest = int(tokens[:_TOKENS_CHECKED].max())
        require(
            highest < rows,
            f"{prefix} holds token {highest}, and model.vocab_size={rows}",
            why="every token needs a row of the embedding",
            instead=f"Type model.vocab_size={highest + 1} or more",
        )
