"""Throughput of a data loader on its own, over workers, pinning and prefetching, and a recommendation.

Batches of several workers arrive in groups, so a time covers one batch of every worker, never a single batch. Batches made
before the first one arrived are not counted.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bridge_profiling.bench.ranks import conditions
from bridge_profiling.bench.requests import DataLoaderRequest, module_and_name
from bridge_profiling.bench.results import MeasurementError, estimate
from bridge_profiling.common.errors import ProfilingConfigError, require

#: Exceptions of user code that end a measurement with a message. Scripts that parse arguments raise SystemExit.
USER_ERRORS = (Exception, SystemExit)

#: Location of a frame in a printed traceback.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

#: Rates within this share of the best count as equal, and the cheapest setting among them is recommended.
_EQUAL = 0.05

#: Samples that suffice for an estimate.
_MAX_SAMPLES = 200

#: Time for workers to start and deliver their first batch: a multiple of the time of a cell, and a minimum.
_START, _MIN_START_S = 4, 30.0

#: Arguments of a DataLoader that vary, and their names in the result.
_ARGUMENTS = {"num_workers": "workers", "pin_memory": "pin_memory", "prefetch_factor": "prefetch"}

#: The other fields of a row, before it is measured.
_UNMEASURED = {"status": "measured", "batches": 0} | dict.fromkeys(
    ("samples_per_batch", "first_batch_s", "batches_per_s", "samples_per_s")
)


def measure(request: DataLoaderRequest) -> dict[str, Any]:
    """Measure every combination of settings in turn; one that fails after the first has the status `failed: why`."""
    factory = load_factory(request.loader, "--loader")
    make = _maker(factory, request)
    result = conditions("data_loader", torch.device("cpu"), subject=request.loader)
    if make is None:
        result["limitations"].append(
            f"{request.loader} returns neither a DataLoader nor a dataset, and does not accept {', '.join(_ARGUMENTS)}: "
            "it is measured as it is"
        )
        settings = {"workers": 0, "pin_memory": False, "prefetch": None}
        row = _row(partial(call_factory, factory, "--loader"), settings, request)
        return result | {"rows": [row], "recommendation": None}
    rows: list[dict[str, Any]] = []
    for workers, pin_memory in itertools.product(request.workers, request.pin_memory):
        # Without workers nothing is prefetched.
        for prefetch in request.prefetch if workers else (None,):
            settings = {"workers": workers, "pin_memory": pin_memory, "prefetch": prefetch}
            arguments = {argument: settings[name] for argument, name in _ARGUMENTS.items()}
            try:
                rows.append(_row(partial(make, **arguments), settings, request))
            except MeasurementError as error:
                # More workers can need more than there is, such as shared memory. Results of fewer workers are kept.
                if not any(row["status"] == "measured" for row in rows):
                    raise
                rows.append(settings | _UNMEASURED | {"status": f"failed: {describe(error.__cause__ or error)}"})
    return result | {"rows": rows, "recommendation": recommendation(rows)}


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
    return {name: chosen[name] for name in _ARGUMENTS.values()} | {"reason": reason}


def _rate(row: dict[str, Any]) -> float:
    # The mean covers all the time together, as a training experiences it in the long run.
    return row["batches_per_s"]["mean"]


def _effort(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["prefetch"] or 0


def _settings(row: dict[str, Any]) -> str:
    ahead = f", prefetch_factor={row['prefetch']}" if row["prefetch"] else ""
    return f"num_workers={row['workers']}, pin_memory={row['pin_memory']}{ahead}"


def _maker(factory: Callable[..., Any], request: DataLoaderRequest) -> Callable[..., Any] | None:
    """A function that makes a loader from other arguments; None if that is impossible."""
    with suppress(TypeError, ValueError):
        inspect.signature(factory).bind_partial(**_ARGUMENTS)
        # It accepts all of them.
        return partial(call_factory, factory, "--loader")
    given = call_factory(factory, "--loader")
    if isinstance(given, DataLoader):
        return partial(_rebuilt, given)
    if isinstance(given, Dataset) or (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        return partial(DataLoader, given, batch_size=request.batch_size)
    require(
        isinstance(given, Iterable),
        f"--loader {request.loader} returns {type(given).__name__}, which cannot be iterated over",
        instead="Return a DataLoader or a dataset",
    )
    return None


def _rebuilt(given: DataLoader, **arguments: Any) -> DataLoader:
    """The same loader with other arguments: the same data, order and collation."""
    kept: dict[str, Any] = {name: getattr(given, name) for name in ("collate_fn", "worker_init_fn", "generator")}
    # These three apply to workers only.
    if arguments["num_workers"]:
        kept |= {name: getattr(given, name) for name in ("multiprocessing_context", "timeout", "persistent_workers")}
    if isinstance(given.dataset, IterableDataset):
        kept |= {"batch_size": given.batch_size, "drop_last": given.drop_last}
    elif given.batch_sampler is not None:
        kept["batch_sampler"] = given.batch_sampler
    else:
        kept |= {"batch_size": None, "sampler": given.sampler}
    # A subclass may have another constructor.
    same = inspect.signature(type(given)) == inspect.signature(DataLoader)
    return (type(given) if same else DataLoader)(given.dataset, **kept, **arguments)


def _row(make: Callable[[], Any], settings: dict[str, Any], request: DataLoaderRequest) -> dict[str, Any]:
    row = settings | _UNMEASURED
    if row["pin_memory"] and not torch.cuda.is_available():
        return row | {"status": "unavailable: pinning memory needs a CUDA device"}
    limit_s = max(_MIN_START_S, _START * request.seconds) + request.seconds
    try:
        with _time_limit(limit_s):
            return row | _counted(make(), row["workers"], row["prefetch"] or 0, request.seconds)
    except _TooSlow:
        return row | {"status": f"too slow: not enough batches within {limit_s:g} s"}
    except MeasurementError:
        raise
    except USER_ERRORS as error:
        raise MeasurementError(f"--loader {request.loader} with {_settings(row)} failed: {describe(error)}") from error


def _counted(loader: Any, workers: int, prefetch: int, seconds: float) -> dict[str, Any]:
    """Count the batches of a loader, epoch after epoch, until the time is over."""
    started = time.perf_counter()
    batches = _endless(loader)
    first = next(batches)
    first_s = time.perf_counter() - started
    # The workers made these while the first one was awaited.
    prefetched, group = workers * prefetch, max(workers, 1)
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
    rate, size = estimate(samples).inverted(), samples_in(first)
    return {
        "batches": 1 + prefetched + group * len(samples),
        "samples_per_batch": size,
        "first_batch_s": float(f"{first_s:.4g}"),
        "batches_per_s": rate.as_json(),
        "samples_per_s": None if size is None else rate.scaled(size).as_json(),
    }


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise MeasurementError("--loader: the loader returns no batch, or can be iterated over only once")


def samples_in(batch: Any) -> int | None:
    """Number of samples in a batch: the first dimension of its first tensor, else its length; None if it has neither."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        counts = (samples_in(part) for part in batch)
        return next((count for count in counts if count is not None), len(batch) or None)
    return None


class _TooSlow(BaseException):
    """The time of a cell is over. Not an Exception: a dataset that catches those and retries must not catch it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block that takes longer, even if it waits for a batch that never arrives."""

    def over(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, over)
    # Again every second: Python drops an exception that the handler raises inside a finalizer.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- the user's code ---------------------------------------------------------------------------------------------------


def load_factory(text: str, option: str) -> Callable[..., Any]:
    """Import the function that a user names as `module:factory`, from the working directory too."""
    module, name = module_and_name(text, option)
    try:
        found: Any = importlib.import_module(module)
    except USER_ERRORS as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            why, instead = f"module {missing} not found", "Start in the module's directory, or put that on PYTHONPATH"
        else:
            why, instead = f"importing {module} fails: {describe(error)}", ""
        raise ProfilingConfigError(f"{option} {text}: {why}", instead=instead) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    require(callable(found), f"{option} {text}: {module} has no function {name}")
    return found


def call_factory(factory: Callable[..., Any], option: str, **arguments: Any) -> Any:
    """Call a factory."""
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        supported = f"only {', '.join(arguments)} are supported, all optional" if arguments else "none are supported"
        raise ProfilingConfigError(f"{option}: the arguments of the factory: {error}", why=supported) from error
    except ValueError:  # a builtin without a signature
        pass
    try:
        return factory(**arguments)
    except USER_ERRORS as error:
        raise MeasurementError(f"{option}: the factory failed: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An error of user code in one line: its type, message, and where it was raised."""
    # An error from a data loader's worker has the worker's traceback as its text.
    _, _, original = str(error).partition("Original Traceback")
    if frames := _FRAME.findall(original):
        return f"{original.strip().splitlines()[-1]} ({':'.join(frames[-1])})"
    text = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    return f"{text} ({raised[0].filename}:{raised[0].lineno})" if raised else text
