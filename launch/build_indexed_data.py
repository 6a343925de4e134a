"""Makes a small indexed data set: from a text, one token per byte, or from made-up token ids.

    python launch/build_indexed_data.py --text README.md --output .runs/data/readme
    python launch/build_indexed_data.py --documents 200 --vocab-size 127 --output .runs/data/made_up

Writes OUTPUT.bin and OUTPUT.idx, and prints what to type to train on them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Started by its path, Python looks for modules in launch/ only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the data set that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make a small indexed data set.", allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="a text; its paragraphs are the documents, its bytes the tokens")
    source.add_argument("--documents", type=int, metavar="N", help="make up this many documents")
    parser.add_argument("--vocab-size", type=int, default=127, help="distinct made-up tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of made-up tokens (default: %(default)s)")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the files without .bin and .idx")
    options = parser.parse_args(arguments)
    if options.documents is not None and (options.documents < 1 or options.vocab_size < 1):
        parser.error("--documents and --vocab-size must be at least 1")
    if options.text is not None and not Path(options.text).is_file():
        parser.error(f"{options.text} is not a file")

    # Imported late: a wrong option is answered at once.
    from recipes.megatron import indexed

    if options.text is not None:
        kinds, documents = indexed.BYTES, indexed.paragraphs(options.text)
    else:
        kinds, documents = options.vocab_size, indexed.made_up(options.documents, options.vocab_size, options.seed)
    count, tokens = indexed.write(documents, options.output, end_of_document=kinds)
    print(f"{options.output}.bin and .idx: {count} documents, {tokens} tokens of {kinds} kinds and an end of document")
    print(
        f"Type: python launch/pretrain.py --recipe gpt_tiny dataset.blend=[{options.output}]"
        f" tokenizer.vocab_size={kinds} model.vocab_size={kinds + 1}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
