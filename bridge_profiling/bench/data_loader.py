"""How many batches a data loader gives when nobody trains: over workers, pinning and prefetching; and which to take.

Batches of several workers come in bunches, so a time is that of one batch of every worker, never of one batch. What was made
ahead before the first batch came is not counted.
"""

from __future__ import annotations

import inspect
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bridge_profiling.bench.factories import called, factory_of, takes
from bridge_profiling.bench.failures import THEIR_ERRORS, MeasurementError, UnavailableError, told
from bridge_profiling.bench.requests import DataLoaderRequest
from bridge_profiling.bench.samples import estimate
from bridge_profiling.bench.world import circumstances, plain
from bridge_profiling.errors import ProfilingConfigError

#: A rate within this of the best is as good, and the cheaper setting is taken.
_AS_GOOD = 0.05

#: Times that make an estimate; more are not waited for.
_MOST_SAMPLES = 200

#: How long workers may take to start and give their first batch, as a multiple of a cell's time, and at least.
_START, _LEAST_START_S = 4, 30.0

_SETTINGS = ("num_workers", "pin_memory", "prefetch_factor")


def measure(request: DataLoaderRequest) -> dict[str, Any]:
    """Measure every cell of the grid, one after the other.

    Args:
        request: what is measured.

    Raises:
        ProfilingConfigError: there is no such factory, or it gives nothing that can be iterated over.
        MeasurementError: the factory failed, or a cell before any was measured; a later one has the status `failed: why`.
    """
    factory = factory_of(request.loader, "--loader")
    make = _maker(factory, request)
    result = circumstances("data_loader", torch.device("cpu"), subject=request.loader)
    if make is None:
        result["limitations"].append(
            f"{request.loader} gives something that is no DataLoader and no dataset, and takes no {', '.join(_SETTINGS)}: "
            "it is measured as it is"
        )
        return result | {"rows": [_row(lambda: _made(factory, {}), {}, request)], "recommendation": None}
    rows: list[dict[str, Any]] = []
    for cell in _cells(request):
        try:
            rows.append(_row(lambda cell=cell: make(cell), cell, request))  # type: ignore[misc]
        except MeasurementError as error:
            # More workers can need more than there is, as shared memory: what fewer gave stays an answer.
            if not any(row["status"] == "measured" for row in rows):
                raise
            rows.append(_unmeasured(cell) | {"status": f"failed: {told(error.__cause__ or error)}"})
    return result | {"rows": rows, "recommendation": recommendation(rows)}


def recommendation(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the settings that are as fast as the fastest the cheapest, and why.

    Args:
        rows: of a result.
    """
    measured = [row for row in rows if row["status"] == "measured"]
    if not measured:
        return None
    best = max(measured, key=_rate)
    as_good = [row for row in measured if _rate(row) >= (1 - _AS_GOOD) * _rate(best)]
    chosen = min(as_good, key=lambda row: (row["workers"], row["prefetch"] or 0, row["pin_memory"]))
    reason = f"{_rate(chosen):.4g} batches/s"
    if chosen is not best:
        reason += f"; the fastest, {_words(best)}, gives {_rate(best):.4g}: less than {_AS_GOOD:.0%} more"
    slower = [row for row in measured if (row["workers"], row["prefetch"] or 0) < (chosen["workers"], chosen["prefetch"] or 0)]
    if slower:
        nearest = max(slower, key=_rate)
        reason += f"; {_words(nearest)} gives {_rate(nearest):.4g}"
    if torch.cuda.is_available() and not chosen["pin_memory"]:
        reason += "; pin_memory=True does not make batches come faster, but lets copies to the device run beside compute"
    return {"workers": chosen["workers"], "pin_memory": chosen["pin_memory"], "prefetch": chosen["prefetch"], "reason": reason}


def _cells(request: DataLoaderRequest) -> Iterator[dict[str, Any]]:
    for workers, pin in itertools.product(request.workers, request.pin_memory):
        # Without workers nothing is made ahead.
        for prefetch in request.prefetch if workers else (None,):
            yield {"num_workers": workers, "pin_memory": pin, "prefetch_factor": prefetch}


def _maker(factory: Callable[..., Any], request: DataLoaderRequest) -> Callable[[dict[str, Any]], Any] | None:
    """How a loader of other settings is made; None when it cannot be."""
    if takes(factory, *_SETTINGS):
        return lambda cell: _made(factory, cell)
    given = _made(factory, {})
    if isinstance(given, DataLoader):
        return lambda cell: _like(given, cell)
    if isinstance(given, Dataset) or (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        return lambda cell: DataLoader(given, batch_size=request.batch_size, **cell)
    if not isinstance(given, Iterable):
        raise ProfilingConfigError(
            f"--loader {request.loader} gives {type(given).__name__}, which cannot be iterated over",
            instead="Return a DataLoader or a dataset",
        )
    return None


def _made(factory: Callable[..., Any], cell: dict[str, Any]) -> Any:
    return called(factory, "--loader", **cell)


def _like(given: DataLoader, cell: dict[str, Any]) -> DataLoader:
    """The same loader with other settings: what is read, in which order and how it is put together stays."""
    kept: dict[str, Any] = {name: getattr(given, name) for name in ("collate_fn", "worker_init_fn", "generator")}
    # Without workers there is no context, nothing to wait for, and nobody to keep from one epoch to the next.
    if cell["num_workers"]:
        kept |= {name: getattr(given, name) for name in ("multiprocessing_context", "timeout", "persistent_workers")}
    if isinstance(given.dataset, IterableDataset):
        kept |= {"batch_size": given.batch_size, "drop_last": given.drop_last}
    elif given.batch_sampler is not None:
        kept["batch_sampler"] = given.batch_sampler
    else:
        kept |= {"batch_size": None, "sampler": given.sampler}
    # A kind of loader of somebody's own may be made in other ways.
    same = inspect.signature(type(given)) == inspect.signature(DataLoader)
    return (type(given) if same else DataLoader)(given.dataset, **kept, **cell)


def _unmeasured(cell: dict[str, Any]) -> dict[str, Any]:
    return {
        "workers": cell.get("num_workers", 0),
        "pin_memory": cell.get("pin_memory", False),
        "prefetch": cell.get("prefetch_factor"),
        "status": "measured",
        "batches": 0,
        "samples_per_batch": None,
        "first_batch_s": None,
        "batches_per_s": None,
        "samples_per_s": None,
    }


def _row(make: Callable[[], Any], cell: dict[str, Any], request: DataLoaderRequest) -> dict[str, Any]:
    row = _unmeasured(cell)
    if row["pin_memory"] and not torch.cuda.is_available():
        return row | {"status": "unavailable: pinning memory takes a CUDA device"}
    limit_s = max(_LEAST_START_S, _START * request.seconds)
    try:
        with _at_most(limit_s + request.seconds):
            return row | _counted(make(), row["workers"], row["prefetch"] or 0, request.seconds)
    except _TooSlow:
        return row | {"status": f"too slow: not enough batches within {limit_s + request.seconds:g} s"}
    except (UnavailableError, MeasurementError):
        raise
    except THEIR_ERRORS as error:
        raise MeasurementError(f"--loader {request.loader} with {_words(row)} failed: {told(error)}") from error


def _counted(loader: Any, workers: int, prefetch: int, seconds: float) -> dict[str, Any]:
    """Batches of one loader, epoch after epoch, until the time is over."""
    started = time.perf_counter()
    batches = _endless(loader)
    first = next(batches)
    first_s = time.perf_counter() - started
    # Of these the workers had made others while the first was waited for.
    ahead = workers * prefetch
    together = max(workers, 1)
    for _ in range(ahead):
        next(batches)
    samples: list[float] = []
    count = 1 + ahead
    began = before = time.perf_counter()
    while not samples or (before - began < seconds and len(samples) < _MOST_SAMPLES):
        for _ in range(together):
            next(batches)
        now = time.perf_counter()
        samples.append((now - before) / together)
        before, count = now, count + together
    rate = estimate(samples).inverted()
    size = samples_in(first)
    return {
        "batches": count,
        "samples_per_batch": size,
        "first_batch_s": float(f"{first_s:.4g}"),
        "batches_per_s": plain(rate),
        "samples_per_s": None if size is None else plain(rate.scaled(size)),
    }


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise MeasurementError(
                "--loader: the loader gives no batch, or only once; give one that can be iterated over again"
            )


def samples_in(batch: Any) -> int | None:
    """How many samples a batch has: the first dimension of the first tensor in it, else its length; None for neither.

    Args:
        batch: as a loader gives it.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        counts = (samples_in(part) for part in batch)
        return next((count for count in counts if count is not None), len(batch) or None)
    return None


class _TooSlow(BaseException):
    """A cell's time is over. No Exception: a dataset that tries again after any of those must not catch it."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer, be it a batch that never comes."""

    def over(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _rate(row: dict[str, Any]) -> float:
    # The mean is that of all the time together: what a training gets in the long run.
    return row["batches_per_s"]["mean"]


def _words(row: dict[str, Any]) -> str:
    ahead = f", prefetch_factor={row['prefetch']}" if row["prefetch"] else ""
    return f"num_workers={row['workers']}, pin_memory={row['pin_memory']}{ahead}"
