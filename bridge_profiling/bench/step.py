"""Duration of a training step, warmed up, repeated and with bounds; and the user's code that provides one.

On a GPU the host may run ahead, as in training.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bridge_profiling.bench.ranks import conditions
from bridge_profiling.bench.requests import StepRequest, module_and_name
from bridge_profiling.bench.results import MeasurementError
from bridge_profiling.bench.statistics import Estimate, estimate
from bridge_profiling.errors import ProfilingConfigError, require

#: Exceptions of user code that end a measurement with a message. Scripts that parse arguments raise SystemExit.
USER_ERRORS = (Exception, SystemExit)

#: Location of a frame in a printed traceback.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class StepTiming:
    """Timing of a step; printed on one line.

    Args:
        warmup: iterations before the first that counts.
        seconds: duration of one iteration.
        device: device whose clock was used, `cuda` or `cpu`.
        samples_per_iteration: samples processed by one iteration; None if unknown.
    """

    warmup: int
    seconds: Estimate
    device: str
    samples_per_iteration: int | None = None

    @property
    def iterations(self) -> int:
        """Number of iterations that counted."""
        return self.seconds.count

    @property
    def iterations_per_s(self) -> Estimate:
        """Iterations per second."""
        return self.seconds.inverted()

    @property
    def samples_per_s(self) -> Estimate | None:
        """Samples per second; None if the number of samples per iteration is unknown."""
        return None if self.samples_per_iteration is None else self.seconds.inverted(self.samples_per_iteration)

    def __str__(self) -> str:
        rate, unit = (self.samples_per_s, "samples") if self.samples_per_s else (self.iterations_per_s, "iterations")
        known = rate.low is not None and rate.high is not None
        bounds = f"{rate.low:,.1f} to {rate.high:,.1f} at 95%" if known else "too few iterations for bounds"
        return (
            f"{rate.median:,.1f} {unit}/s ({bounds}), {self.seconds.scaled(1e3).median:.3f} ms per iteration;"
            f" {self.iterations} iterations on {self.device} after {self.warmup} to warm up"
        )


def measure_step(
    step: Callable[[], object],
    *,
    warmup: int = 5,
    iterations: int = 30,
    max_seconds: float | None = None,
    samples_per_iteration: int | None = None,
) -> StepTiming:
    """Call a step repeatedly and time each call.

    If CUDA is in use after the warm-up, events on the current stream mark the end of each iteration, and nothing waits for them
    before the last: an iteration then takes as long as on the device, or on the host if that is slower. Otherwise the host's
    clock is read between calls.

    Args:
        step: one iteration; its return value is ignored.
        warmup: calls before the first that counts, at least 0: they compile, allocate and tune.
        iterations: calls that count, at least 1; fewer than 6 give no bounds.
        max_seconds: stop early once the calls that count have taken this long; at least one counts.
        samples_per_iteration: samples processed by one call.
    """
    for _ in range(warmup):
        step()
    cuda = torch.cuda.is_initialized()
    if cuda:
        torch.cuda.synchronize()
    mark: Callable[[], Any] = _event if cuda else time.perf_counter
    started, marks = time.perf_counter(), [mark()]
    while len(marks) <= iterations:
        step()
        marks.append(mark())
        if max_seconds is not None and time.perf_counter() - started > max_seconds:
            break
    if cuda:
        torch.cuda.synchronize()
    pairs = itertools.pairwise(marks)
    samples = [before.elapsed_time(after) / 1e3 if cuda else after - before for before, after in pairs]
    return StepTiming(warmup, estimate(samples), "cuda" if cuda else "cpu", samples_per_iteration)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure(request: StepRequest) -> dict[str, Any]:
    """Measure a user's step.

    Raises:
        ProfilingConfigError: the factory does not exist, or returns something that cannot be called.
        MeasurementError: the factory or the step failed.
    """
    step = call_factory(load_factory(request.step, "--step"), "--step")
    require(
        callable(step),
        f"--step {request.step} returns {type(step).__name__}, which cannot be called",
        instead="Return a function without arguments that runs one iteration",
    )
    try:
        timing = measure_step(
            step,
            warmup=request.warmup,
            iterations=request.iterations,
            max_seconds=request.seconds,
            samples_per_iteration=request.samples,
        )
    except USER_ERRORS as error:
        raise MeasurementError(f"--step {request.step}: the step failed: {describe(error)}") from error
    device = torch.device("cuda", torch.cuda.current_device()) if timing.device == "cuda" else torch.device("cpu")
    row = {
        "warmup": timing.warmup,
        "iterations": timing.iterations,
        "time_us": timing.seconds.scaled(1e6).as_json(),
        "iterations_per_s": timing.iterations_per_s.as_json(),
        "samples_per_iteration": request.samples,
        "samples_per_s": None if timing.samples_per_s is None else timing.samples_per_s.as_json(),
    }
    return conditions("step", device, subject=request.step) | {"rows": [row]}


def load_factory(text: str, option: str) -> Callable[..., Any]:
    """Import the function that a user names.

    Args:
        text: `module:factory`, importable from the working directory.
        option: the command line option, for error messages.

    Raises:
        ProfilingConfigError: the module or function does not exist, or the import fails.
    """
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
    """Call a factory.

    Raises:
        ProfilingConfigError: it requires other arguments.
        MeasurementError: it failed.
    """
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
