"""What the training loop needs besides the step: early exits, garbage collection, progress lines and the monitor."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import TextIO

import torch
from megatron.core import parallel_state

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.monitor import Monitor
from bridge_profiling.settings.profiling import resolve_output_dir
from recipes.config import ConfigContainer, TrainConfig
from recipes.megatron.setup import rank_device


@contextmanager
def early_exits(train: TrainConfig, device: torch.device, started: float) -> Iterator[Callable[[], str | None]]:
    """Watch for a reason to end the training early: a signal or a time.

    Without `train.exit_signal_handler` no signal's handler is changed.

    Args:
        train: the `train` section.
        device: where ranks exchange what they have seen.
        started: `time.monotonic()` of the moment from which `exit_duration_in_mins` counts.

    Yields:
        A function that all ranks call after each iteration. It returns the reason to stop
        or None, the same on all ranks. If a signal or the clock may end the training, ranks exchange 8 bytes and wait for
        the device, since they may see the signal, or the time, in different iterations. Otherwise it costs nothing.
    """
    limit, arrived = train.exit_duration_in_mins, False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True

    def reason() -> str | None:
        if not train.exit_signal_handler and limit is None:
            return None
        late = limit is not None and monotonic() - started >= 60 * limit
        seen = torch.tensor([arrived, late], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        any_arrived, any_late = seen.tolist()
        if any_arrived:
            return f"{train.exit_signal} was received"
        return f"train.exit_duration_in_mins={limit:g} is over" if any_late else None

    number = signal.Signals[train.exit_signal]
    previous = signal.signal(number, remember) if train.exit_signal_handler else None
    try:
        yield reason
    finally:
        if previous is not None:
            signal.signal(number, previous)


@contextmanager
def manual_gc(train: TrainConfig) -> Iterator[Callable[[int], None]]:
    """Collect garbage at `train.manual_gc_interval` only, if `train.manual_gc` is on.

    Yields:
        A function to call with each iteration that is complete.
    """

    def collect(iteration: int) -> None:
        if train.manual_gc and train.manual_gc_interval and (iteration + 1) % train.manual_gc_interval == 0:
            gc.collect()

    if train.manual_gc:
        gc.disable()
        # Garbage of the setup would otherwise stay for the whole training.
        gc.collect()
    try:
        yield collect
    finally:
        if train.manual_gc:
            gc.enable()


class Progress:
    """Keeps the losses, and prints them on one rank of the last pipeline stage, which has them. Every rank may call it.

    Args:
        config: a finalized configuration; from `train.start_iteration` above 0 on, `logger.loss_file` is appended to.
    """

    def __init__(self, config: ConfigContainer) -> None:
        self._logger, self._train = config.logger, config.train
        self._tokens = config.train.global_batch_size * config.model.seq_length
        self._prints = (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        )
        self._file: TextIO | None = None
        self._unread: list[tuple[int, torch.Tensor]] = []
        self._seconds: list[float] = []
        self.losses: list[float] = []

    def __enter__(self) -> Progress:
        if self._prints and self._logger.loss_file is not None:
            path = Path(self._logger.loss_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if self._train.start_iteration > 0 else "w", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._read()
        if self._file is not None:
            self._file.close()

    def iteration(self, iteration: int, loss: torch.Tensor | None, seconds: float) -> None:
        """Record an iteration's loss (None on ranks that have none) and its duration; print when a line is due.

        The loss is read from the device only then, so iterations between two lines do not wait for it.
        """
        self._seconds.append(seconds)
        if loss is not None:
            self._unread.append((iteration, loss))
        last = self._train.train_iters
        if (iteration + 1) % self._logger.log_interval and iteration + 1 < last:
            return
        self._read()
        if self._prints:
            mean = sum(self._seconds) / len(self._seconds)
            print(
                f"iteration {iteration:{len(str(last))}d}/{last} | loss {self.losses[-1]:.6f}"
                f" | {mean * 1e3:.1f} ms/step | {self._tokens / mean:,.0f} tokens/s",
                flush=True,
            )
        self._seconds.clear()

    def evaluation(self, iteration: int, loss: torch.Tensor | None) -> None:
        """Print the loss of an evaluation that followed `iteration`."""
        if loss is not None and self._prints:
            value = loss.item()
            print(f"evaluation after iteration {iteration} | loss {value:.6f}", flush=True)
            self._write(iteration, "evaluation", value)

    def _read(self) -> None:
        for iteration, loss in self._unread:
            self.losses.append(loss.item())
            self._write(iteration, "train", self.losses[-1])
        self._unread.clear()

    def _write(self, iteration: int, split: str, loss: float) -> None:
        if self._file is not None:
            record = {"iteration": iteration, "split": split, "loss": loss, "hex": loss.hex()}
            print(json.dumps(record), file=self._file, flush=True)


def monitored(config: ConfigContainer, env: LaunchEnv, hook: ProfilingHook) -> AbstractContextManager[Monitor | None]:
    """A block in which this rank is monitored as the `monitor` section says; yields None if everything in it is off.

    Args:
        config: a finalized configuration.
        env: this rank's place in the job.
        hook: times the iterations.
    """
    settings, device = config.monitor, rank_device(env)
    if not (settings.jsonl or settings.port is not None):
        return nullcontext()
    gpus: list[int | str] | None = None
    if device.type == "cuda":
        # By UUID, since the driver numbers GPUs in its own way.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        gpus = [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"]
    folder = resolve_output_dir(config.profiling) / "monitor"
    return Monitor(
        hook=hook,
        tokens_per_iteration=config.train.global_batch_size * config.model.seq_length,
        jsonl=folder / f"rank-{env.rank}.jsonl" if settings.jsonl else None,
        port=settings.port + env.device_index if settings.port is not None else None,
        bind=settings.bind,
        interval=settings.interval,
        gpus=gpus,
        rank=env.rank,
    )
