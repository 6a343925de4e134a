"""Throughput of a data loader on its own, over workers, pinning and prefetching, and a recommendation.

Batches of several workers arrive in groups, so a time covers one batch of every worker, never a single batch. Batches made
before the first one arrived are not counted.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bridge_profiling.bench.conditions import conditions
from bridge_profiling.bench.results import MeasurementError, estimate
from bridge_profiling.common.errors import ProfilingConfigError, require

#: Exceptions of user code that end a measurement with a message. Scripts that parse arguments raise SystemExit.
_USER_ERRORS = (Exception, SystemExit)

#: Location of a frame in a printed traceback.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

#: Rates within this share of the best count as equal, and the cheapest setting among them is recommended.
_EQUAL = 0.05

#: Samples that suffice for an estimate.
_MAX_SAMPLES = 200

#: A worker that delivers nothing for this multiple of a cell's time, and at least this many seconds, has failed.
_PATIENCE, _MIN_PATIENCE_S = 4, 30.0

#: The fields of a row that are measured, before they are.
_UNMEASURED = {"status": "measured", "batches": 0} | dict.fromkeys(
    ("samples_per_batch", "first_batch_s", "batches_per_s", "samples_per_s")
)


def measure(
    *,
    loader: str,
    workers: Sequence[int],
    pin_memory: Sequence[bool],
    prefetch: Sequence[int],
    batch_size: int,
    seconds: float,
) -> dict[str, Any]:
    """Measure every combination of settings in turn; one that fails after the first has the status `failed: why`.

    Args:
        loader: `module:factory`, which returns a DataLoader or a dataset.
        workers: numbers of workers to try.
        pin_memory: values of pin_memory to try.
        prefetch: numbers of batches that each worker prefetches, to try.
        batch_size: of a dataset; unused if the factory returns a DataLoader.
        seconds: approximate limit for each combination.
    """
    given = _made(loader)
    if not isinstance(given, DataLoader):
        require(
            isinstance(given, Dataset) or (hasattr(given, "__getitem__") and hasattr(given, "__len__")),
            f"--loader {loader} returns {type(given).__name__}, which is not a DataLoader or a dataset",
            instead="Return a torch.utils.data.DataLoader, a torch.utils.data.Dataset or a list",
        )
        given = DataLoader(given, batch_size=batch_size)
    rows: list[dict[str, Any]] = []
    for count, pinned in itertools.product(workers, pin_memory):
        # Without workers nothing is prefetched.
        for ahead in prefetch if count else (None,):
            row = {"workers": count, "pin_memory": pinned, "prefetch": ahead} | _UNMEASURED
            rows.append(row)
            if pinned and not torch.cuda.is_available():
                row["status"] = "unavailable: pinning memory needs a CUDA device"
                continue
            try:
                row |= _counted(_rebuilt(given, count, pinned, ahead, seconds), count * (ahead or 0), max(count, 1), seconds)
            except _USER_ERRORS as error:
                # More workers can need more than there is, such as shared memory. Results of fewer workers are kept.
                if not any(row["status"] == "measured" for row in rows[:-1]):
                    raise MeasurementError(f"--loader {loader} with {_settings(row)} failed: {_described(error)}") from error
                row["status"] = f"failed: {_described(error)}"
    return conditions("data_loader", subject=loader) | {"rows": rows, "recommendation": recommendation(rows)}


def recommendation(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The cheapest of the settings that are as fast as the fastest, with the reason; None if no row was measured."""
    measured = [row for row in rows if row["status"] == "measured"]
    if not measured:
        return None
    best = max(measured, key=_rate)
    equal = [row for row in measured if _rate(row) >= (1 - _EQUAL) * _rate(best)]
    chosen = min(equal, key=lambda row: (*_effort(row), row["pin_memory"]))
    reason = f"{_rate(chosen):.4g} batches/s"
    if chosen is not best:
        reason += f"; the fastest, {_settings(best)}, gives {_rate(best):.4g}: less than {_EQUAL:.0%} more"
    cheaper = [row for row in measured if _effort(row) < _effort(chosen)]
    if cheaper:
        nearest = max(cheaper, key=_rate)
        reason += f"; {_settings(nearest)} gives {_rate(nearest):.4g}"
    if torch.cuda.is_available() and not chosen["pin_memory"]:
        reason += "; pin_memory=True does not make batches arrive faster, but lets copies to the device overlap with compute"
    return {name: chosen[name] for name in ("workers", "pin_memory", "prefetch")} | {"reason": reason}


def _rate(row: dict[str, Any]) -> float:
    # The mean covers all the time together, as a training experiences it in the long run.
    return row["batches_per_s"]["mean"]


def _effort(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["prefetch"] or 0


def _settings(row: dict[str, Any]) -> str:
    ahead = f", prefetch_factor={row['prefetch']}" if row["prefetch"] else ""
    return f"num_workers={row['workers']}, pin_memory={row['pin_memory']}{ahead}"


def _rebuilt(given: DataLoader, workers: int, pin_memory: bool, prefetch: int | None, seconds: float) -> DataLoader:
    """The same loader with other settings: the same data, order and collation."""
    kept: dict[str, Any] = {name: getattr(given, name) for name in ("collate_fn", "worker_init_fn", "generator")}
    # These three apply to workers only.
    if workers:
        kept |= {name: getattr(given, name) for name in ("multiprocessing_context", "persistent_workers")}
        kept["timeout"] = given.timeout or max(_MIN_PATIENCE_S, _PATIENCE * seconds)
    if isinstance(given.dataset, IterableDataset):
        kept |= {"batch_size": given.batch_size, "drop_last": given.drop_last}
    elif given.batch_sampler is not None:
        kept["batch_sampler"] = given.batch_sampler
    else:
        kept |= {"batch_size": None, "sampler": given.sampler}
    # A subclass may have another constructor.
    same = inspect.signature(type(given)) == inspect.signature(DataLoader)
    make = type(given) if same else DataLoader
    return make(given.dataset, num_workers=workers, pin_memory=pin_memory, prefetch_factor=prefetch, **kept)


def _counted(loader: DataLoader, prefetched: int, group: int, seconds: float) -> dict[str, Any]:
    """Count the batches of a loader, epoch after epoch, until the time is over."""
    started = time.perf_counter()
    batches = _endless(loader)
    first = next(batches)
    first_s = time.perf_counter() - started
    # The workers made these while the first one was awaited.
    for _ in range(prefetched):
        next(batches)
    samples: list[float] = []
    began = before = time.perf_counter()
    while not samples or (before - began < seconds and len(samples) < _MAX_SAMPLES):
        for _ in range(group):
            next(batches)
        now = time.perf_counter()
        samples.append((now - before) / group)
        before = now
    rate, size = estimate(samples).inverted(), _samples_in(first)
    return {
        "batches": 1 + prefetched + group * len(samples),
        "samples_per_batch": size,
        "first_batch_s": float(f"{first_s:.4g}"),
        "batches_per_s": rate.as_json(),
        "samples_per_s": None if size is None else rate.scaled(size).as_json(),
    }


def _endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise MeasurementError("the loader returns no batch, or can be iterated over only once")


def _samples_in(batch: Any) -> int | None:
    """Number of samples in a batch: the first dimension of its first tensor, else its length; None if it has neither."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        counts = map(_samples_in, batch)
        return next((count for count in counts if count is not None), len(batch) or None)
    return None


def _made(text: str) -> Any:
    """What the user's `module:factory` returns, imported from the working directory too."""
    module, _, name = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except _USER_ERRORS as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            why, instead = f"module {missing} not found", "Start in the module's directory, or put that on PYTHONPATH"
        else:
            why, instead = f"importing {module} fails: {_described(error)}", ""
        raise ProfilingConfigError(f"--loader {text}: {why}", instead=instead) from error
    factory: Any = getattr(found, name, None)
    require(callable(factory), f"--loader {text}: {module} has no function {name}", instead="Type --loader module:factory")
    try:
        return factory()
    except _USER_ERRORS as error:
        raise MeasurementError(f"--loader {text}: the factory failed: {_described(error)}") from error


def _described(error: BaseException) -> str:
    """An error of user code in one line: its type, message, and where it was raised, in a worker too."""
    if isinstance(error, MeasurementError):
        return str(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"{text.splitlines()[-1]} ({':'.join(_FRAME.findall(text)[-1])})"
