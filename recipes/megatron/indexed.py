"""Small indexed data sets for Megatron: from a text, one token per byte, or from made-up token ids.

For tests and first runs; not a tokenizer for a real training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

#: Distinct tokens of a text: the values of one byte.
BYTES = 256


def paragraphs(file: str) -> Iterator[numpy.ndarray]:
    """The bytes of each paragraph of a text."""
    for paragraph in Path(file).read_bytes().split(b"\n\n"):
        if paragraph.strip():
            yield numpy.frombuffer(paragraph, dtype=numpy.uint8)


def made_up(documents: int, vocab_size: int, seed: int) -> Iterator[numpy.ndarray]:
    """Documents of 20 to 299 tokens, each an arithmetic sequence with a step of its own, which a model can learn."""
    random = numpy.random.default_rng(seed)
    for _ in range(documents):
        length, first, step = int(random.integers(20, 300)), int(random.integers(vocab_size)), int(random.integers(1, 7))
        yield (numpy.arange(length) * step + first) % vocab_size


def write(documents: Iterable[numpy.ndarray], prefix: str, *, end_of_document: int) -> tuple[int, int]:
    """Write documents as `prefix`.bin and `prefix`.idx, each followed by the end-of-document token.

    Args:
        documents: token ids below `end_of_document`.
        prefix: path without an ending; missing directories are created.
        end_of_document: the token id that ends a document; `tokenizer.vocab_size` in a training.

    Returns:
        The number of documents and of tokens.
    """
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(end_of_document + 1))
    count = tokens = 0
    for document in documents:
        # A text's bytes end at 255, so its end-of-document token is 256.
        builder.add_document(numpy.append(document.astype(numpy.int64), end_of_document), [len(document) + 1])
        count, tokens = count + 1, tokens + len(document) + 1
    builder.finalize(f"{prefix}.idx")
    return count, tokens
