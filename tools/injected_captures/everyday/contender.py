"""Another process on a GPU: it multiplies matrices while a file asks it to, about half of the time.

python tools/injected_captures/everyday/contender.py --gpu 0 --folder DIR
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from tools.injected_captures.everyday.plants import CONTEND, READY

_SIZE = 4096
_PRODUCTS = 12
_IDLE_SECONDS = 0.003


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    request, answer = (options.folder / name.format(gpu=options.gpu) for name in (CONTEND, READY))
    cuda = torch.cuda.is_available()
    matrix = None
    while True:
        if not request.exists():
            answer.unlink(missing_ok=True)
            time.sleep(0.002)
            continue
        if matrix is None:
            device = torch.device("cuda", options.gpu) if cuda else torch.device("cpu")
            matrix = torch.randn(_SIZE if cuda else 64, _SIZE if cuda else 64, device=device, dtype=torch.bfloat16)
        for _ in range(_PRODUCTS):
            product = matrix @ matrix
        product[0, 0].item()
        answer.touch()
        time.sleep(_IDLE_SECONDS)


if __name__ == "__main__":
    main()
