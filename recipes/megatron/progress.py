"""What a run says while it trains: one line an iteration from the rank that has the loss, and a file for comparing runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch


class Progress:
    """Prints progress and keeps the losses. Only the speaking rank prints and writes; every rank may call it.

    Args:
        train_iters: iterations of the whole training.
        tokens: tokens an iteration consumes over all ranks.
        log_interval: iterations between two lines.
        loss_file: where to write JSON lines, or None.
        speaks: whether this rank prints: one rank of the last pipeline stage, where the loss is.
        append: go on in `loss_file` (a run that starts later), instead of starting it anew.
    """

    def __init__(
        self, *, train_iters: int, tokens: int, log_interval: int, loss_file: str | None, speaks: bool, append: bool
    ) -> None:
        self._train_iters, self._tokens, self._log_interval = train_iters, tokens, log_interval
        self._path, self._speaks, self._mode = loss_file, speaks, "a" if append else "w"
        self._file: TextIO | None = None
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self._seconds: list[float] = []
        self.losses: list[float] = []

    def __enter__(self) -> Progress:
        if self._speaks and self._path is not None:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, self._mode, encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._read()
        if self._file is not None:
            self._file.close()

    def iteration(self, iteration: int, loss: torch.Tensor | None, seconds: float) -> None:
        """Note an iteration's loss (None on ranks that have none) and its duration; print when a line is due.

        The loss is read from the device only then, so iterations between two lines do not wait for it.
        """
        self._seconds.append(seconds)
        if loss is not None:
            self._waiting.append((iteration, loss))
        if (iteration + 1) % self._log_interval and iteration + 1 < self._train_iters:
            return
        self._read()
        if self._speaks:
            mean = sum(self._seconds) / len(self._seconds)
            width = len(str(self._train_iters))
            print(
                f"iteration {iteration:{width}d}/{self._train_iters} | loss {self.losses[-1]:.6f}"
                f" | {mean * 1e3:.1f} ms/step | {self._tokens / mean:,.0f} tokens/s",
                flush=True,
            )
        self._seconds.clear()

    def evaluation(self, iteration: int, loss: torch.Tensor | None) -> None:
        """Print the loss of an evaluation that followed `iteration`."""
        if loss is not None and self._speaks:
            value = loss.item()
            print(f"evaluation after iteration {iteration} | loss {value:.6f}", flush=True)
            self._write(iteration, "evaluation", value)

    def _read(self) -> None:
        for iteration, loss in self._waiting:
            self.losses.append(loss.item())
            self._write(iteration, "train", self.losses[-1])
        self._waiting.clear()

    def _write(self, iteration: int, split: str, loss: float) -> None:
        if self._file is not None:
            record = {"iteration": iteration, "split": split, "loss": loss, "hex": loss.hex()}
            print(json.dumps(record), file=self._file, flush=True)
