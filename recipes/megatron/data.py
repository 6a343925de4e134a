"""Batches by the number of samples consumed, so that iteration k sees the same data wherever a run starts.

Samples are megatron-core's: mock ones, or those of indexed token files. Reads token files, and never writes them.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import MegatronTokenizerBase

from bridge_profiling.errors import ProfilingConfigError
from recipes.config import ConfigContainer, DatasetConfig

Batch = dict[str, torch.Tensor]

#: Tokens at the beginning of a data set that are compared with the vocabulary before the training starts.
_TOKENS_LOOKED_AT = 1_000_000

# It warns of every mock data set that it cannot save its index, which takes a tenth of a second to make.
logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)


class TokenIds(MegatronTokenizerBase):
    """What megatron-core's data sets ask of a tokenizer, for data that are token ids already.

    megatron-core has one for that too. It comes with those for text, and makes each rank load `transformers` where that is
    installed.

    Args:
        vocab_size: distinct tokens; the id after them ends a document.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__("", {})
        self.eod = vocab_size
        #: Goes into the names under which megatron-core keeps sample indices.
        self.unique_identifiers = {"class": f"{type(self).__module__}.{type(self).__qualname__}", "eod": vocab_size}

    @property
    def vocab_size(self) -> int:
        """Distinct tokens, the one that ends a document among them."""
        return self.eod + 1

    @property
    def vocab(self) -> NoReturn:
        """There are no texts."""
        raise NotImplementedError("the data are token ids, and have no vocabulary")

    tokenize = detokenize = apply_chat_template = vocab


@dataclass(frozen=True)
class Data:
    """The training and evaluation samples of a run, and how they are dealt out to data-parallel ranks."""

    train: torch.utils.data.Dataset
    evaluation: torch.utils.data.Dataset | None
    global_batch_size: int
    micro_batch_size: int
    settings: DatasetConfig
    workers_ignore: signal.Signals | None = None

    def train_batches(self, start_iteration: int) -> Iterator[Batch]:
        """This rank's microbatches from the first of `start_iteration` on."""
        return self._batches(self.train, consumed=start_iteration * self.global_batch_size)

    def evaluation_batches(self) -> Iterator[Batch]:
        """This rank's microbatches of an evaluation: the same samples every time."""
        return self._batches(self.evaluation, consumed=0)

    def _batches(self, dataset: torch.utils.data.Dataset, consumed: int) -> Iterator[Batch]:
        sampler = ConsumedSampler(
            total=len(dataset),
            consumed=consumed,
            micro_batch_size=self.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            ranks=parallel_state.get_data_parallel_world_size(),
        )
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=self.settings.num_workers,
            prefetch_factor=self.settings.prefetch_factor,
            worker_init_fn=None if self.workers_ignore is None else partial(_ignore, self.workers_ignore),
            pin_memory=self.settings.pin_memory and torch.cuda.is_available(),
            # A generator of its own: the loader would draw a seed from the one that dropout uses.
            generator=torch.Generator(),
        )
        return iter(loader)


def _ignore(number: signal.Signals, worker: int) -> None:
    signal.signal(number, signal.SIG_IGN)


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
    """GPT samples for the whole training and for one evaluation.

    Every rank calls it; for indexed data, global rank 0 builds the sample indices while the others wait.
    """
    train, dataset = config.train, config.dataset
    # A blend with weights cannot be asked for as many samples as there are, which is what None means.
    kind, unused = (MockGPTDataset, None) if dataset.blend is None else (GPTDataset, 1)
    evaluated = train.eval_iters * train.global_batch_size if train.eval_interval is not None else unused
    sizes = [train.train_iters * train.global_batch_size, evaluated, unused]
    samples, evaluation, _ = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, _megatron_settings(config)).build()
    ignored = signal.Signals[train.exit_signal] if train.exit_signal_handler_for_dataloader else None
    return Data(samples, evaluation, train.global_batch_size, train.micro_batch_size, dataset, ignored)


def _megatron_settings(config: ConfigContainer) -> GPTDatasetConfig:
    dataset = config.dataset
    return GPTDatasetConfig(
        random_seed=dataset.random_seed,
        sequence_length=config.model.seq_length,
        blend=None if dataset.blend is None else (dataset.blend, _weights(dataset)),
        split=None if dataset.blend is None else dataset.split,
        path_to_cache=dataset.path_to_cache,
        reset_position_ids=dataset.reset_position_ids,
        reset_attention_mask=dataset.reset_attention_mask,
        eod_mask_loss=dataset.eod_mask_loss,
        # Causal attention needs no mask of its own, and at 2,048 tokens one would be 4 MB a sample.
        create_attention_mask=dataset.reset_attention_mask,
        tokenizer=TokenIds(config.tokenizer.vocab_size),
    )


def _weights(dataset: DatasetConfig) -> list[float] | None:
    assert dataset.blend is not None
    if dataset.blend_weights is not None or len(dataset.blend) == 1:
        return dataset.blend_weights
    # Without weights, megatron-core ends a blend after one pass over it, however long the training.
    return [float(os.path.getsize(f"{prefix}.bin")) for prefix in dataset.blend]


def check_data(config: ConfigContainer) -> None:
    """Refuse indexed data that this machine does not have, or whose tokens the model does not know.

    Raises:
        ProfilingConfigError: says which data set, and what to type.
    """
    rows, parts = config.model.vocab_size, _parts(config)
    for prefix in config.dataset.blend or ():
        missing = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if not os.path.isfile(name)]
        if missing:
            raise ProfilingConfigError(
                f"dataset.blend names {prefix}, and there is no {' and no '.join(missing)}",
                why="an indexed data set is a .bin and an .idx file, and dataset.blend their path without the ending",
                instead=f"Type python launch/build_indexed_data.py --text FILE --output {prefix} to make them from a text",
            )
        sequences = IndexedDataset(prefix)
        _check_parts(config.dataset, parts, len(sequences), prefix)
        highest = _highest_token(sequences)
        if highest >= rows:
            raise ProfilingConfigError(
                f"{prefix} holds token {highest}, and model.vocab_size={rows}",
                why="every token needs a row of the embedding",
                instead=f"Type model.vocab_size={highest + 1} or more",
            )


def _parts(config: ConfigContainer) -> list[tuple[float, float] | None]:
    """Where training, evaluation and test begin and end in the documents, as shares of them; None has no share."""
    dataset = config.dataset
    parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(dataset.split))
    wanted = {"training": parts[0]} | ({"evaluation": parts[1]} if config.train.eval_interval is not None else {})
    for name, part in wanted.items():
        if dataset.blend is not None and part is None:
            raise ProfilingConfigError(
                f"dataset.split={dataset.split} leaves nothing for {name}",
                why="it gives the shares of training, evaluation and test in the documents",
                instead="Type dataset.split=90,10,0",
            )
    return parts


def _check_parts(dataset: DatasetConfig, parts: Sequence[tuple[float, float] | None], documents: int, prefix: str) -> None:
    for part in parts:
        # megatron-core rounds so, and looks for samples in a part without documents for ever.
        if part is not None and round(part[0] * documents) == round(part[1] * documents):
            raise ProfilingConfigError(
                f"dataset.split={dataset.split} gives a part of {prefix} no document",
                why=f"it has {documents}",
                instead="Type dataset.split=100,0,0 to train on all of them, without evaluation",
            )


def _highest_token(sequences: IndexedDataset) -> int:
    """The highest token id among the first ones of an indexed data set, 0 if it is empty."""
    highest, seen = 0, 0
    for index in range(len(sequences)):
        if seen >= _TOKENS_LOOKED_AT:
            break
        tokens = sequences.get(index, length=min(int(sequences.sequence_lengths[index]), _TOKENS_LOOKED_AT - seen))
        seen += len(tokens)
        highest = max(highest, int(tokens.max(initial=0)))
    return highest
