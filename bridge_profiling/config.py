"""What a user asks of a profile, and the arithmetic of its window.

Building a config validates nothing, so that overrides may arrive in any order; `finalize()` does. No torch and no
nemo_run here: the same classes serve the submit host and the ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.nsys.options import check_extra_args, check_trace

#: The words `profile_ranks` accepts beside a list: every rank, or one rank per pipeline stage.
RANK_WORDS = ("all", "pp")

#: Set by the plugins in the job's environment, so that a loop which knows nothing of them finds the place too.
OUTPUT_DIR_VARIABLE = "BRIDGE_PROFILING_DIR"

DEFAULT_OUTPUT_DIR = "profiles"

#: More windows of one run are a mistake: each is a trace.
MAX_WINDOWS = 1000

#: `memory_snapshot_path` as Megatron Bridge sets it when the user does not; then our own folder layout is used.
DEFAULT_MEMORY_SNAPSHOT_PATH = "snapshot.pickle"


@dataclass(frozen=True)
class Window:
    """The iterations a profile covers: `start <= i < end`, 0-based and global, so a resume does not shift it."""

    start: int
    end: int

    def __contains__(self, iteration: int) -> bool:
        return self.start <= iteration < self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    @property
    def last(self) -> int:
        """The last iteration inside the window."""
        return self.end - 1


@dataclass(kw_only=True)
class ProfilingConfig:
    """The `profiling` section of a ConfigContainer. Field names and defaults are Megatron Bridge's, ours come last."""

    use_nsys_profiler: bool = False
    """Mark the window for nsys, which must be running around the process."""

    use_pytorch_profiler: bool = False
    """Record the window with torch.profiler, one trace per profiled rank."""

    profile_step_start: int = 10
    """First iteration captured: 0-based, counted over the whole training, resumes included."""

    profile_step_end: int = 12
    """First iteration not captured any more: a window 10-12 captures iterations 10 and 11."""

    profile_ranks: list[int] | str = field(default_factory=lambda: [0])
    """Global ranks to profile, or `all`, or `pp` (one rank per pipeline stage)."""

    record_memory_history: bool = False
    """Record every CUDA allocation from the hook's opening to the window's end, then write a snapshot."""

    memory_snapshot_path: str = DEFAULT_MEMORY_SNAPSHOT_PATH
    """Where the snapshot goes, as `<stem>_<rank><suffix>`; left alone, `<output_dir>/memory/iter-S-E/rank-R.pickle`."""

    record_shapes: bool = False
    """Record tensor shapes: in the torch profiler's trace, and as NVTX payloads under nsys."""

    nvtx_ranges: bool = False
    """Emit phase ranges in every iteration, not only inside the window, and switch on megatron-core's own NVTX ranges."""

    pytorch_profiler_collect_shapes: bool = False
    """The same as `record_shapes`, for the torch profiler alone."""

    pytorch_profiler_collect_callstack: bool = False
    """Record Python call stacks in the torch profiler's trace (several times the file size)."""

    pytorch_profiler_collect_chakra: bool = False
    """Write a Chakra execution trace beside the torch profiler's trace."""

    output_dir: str | None = None
    """Root of everything a capture writes. Unset: the variable BRIDGE_PROFILING_DIR, else `profiles` where the job runs."""

    pytorch_profiler_profile_memory: bool = False
    """Record allocations and frees as events in the torch profiler's trace."""

    nsys_trace: list[str] | None = None
    """APIs that nsys traces, where a rank starts its own; null is nvtx and cuda."""

    nsys_extra_args: list[str] = field(default_factory=list)
    """Options of `nsys profile` over the ones chosen here (`nsys_options.py`), by option name."""

    nsys_gpu_metrics: bool = False
    """Sample the GPU's metrics as well, each rank its own GPU."""

    nsys_export_sqlite: bool = False
    """Write an SQLite file beside the report."""

    nsys_captures: int = 1
    """How many windows nsys may capture in one run, those of `profile_every` and of requests together; more than one has it
    write all of its reports at the end."""

    peak_tflops: float | None = None
    """Dense peak of one device in TFLOP/s, for MFU; null is what its data sheet says, where the device is known."""

    profile_every: int | None = None
    """Capture a window of the same length again every so many iterations, counted from start to start."""

    profile_at_most: int = 10
    """How many windows are captured with `profile_every`, the first one counted."""

    on_demand: bool | None = None
    """Listen for `bridge-profiling trigger` in training; null is where a profiler is on or an output directory was chosen."""

    on_demand_seconds: float = 1.0
    """How often a rank looks for a request. A request is carried out four times as long after it, at the earliest."""

    slow_iteration_factor: float | None = None
    """Capture by itself, once an iteration took longer than the recent median by this factor; 2.0 is a good one."""

    slow_iteration_captures: int = 1
    """How often that may happen in one run of the job."""

    @property
    def window(self) -> Window:
        """The iterations asked for; with `profile_every`, the first ones."""
        return Window(self.profile_step_start, self.profile_step_end)

    @property
    def windows(self) -> list[Window]:
        """Every window that the config asks for, in order; none without a profiler."""
        if not self.enabled:
            return []
        count, step = (self.profile_at_most, self.profile_every) if self.profile_every is not None else (1, 0)
        return [Window(self.window.start + step * number, self.window.end + step * number) for number in range(count)]

    @property
    def nsys_capture_count(self) -> int:
        """How many captures an nsys is told to make at its start."""
        return max(self.nsys_captures, len(self.windows)) if self.use_nsys_profiler else 0

    @property
    def enabled(self) -> bool:
        """Whether any profiler is asked for."""
        return self.use_nsys_profiler or self.use_pytorch_profiler or self.record_memory_history

    @property
    def wants_shapes(self) -> bool:
        """Whether the torch profiler records shapes."""
        return self.record_shapes or self.pytorch_profiler_collect_shapes

    def finalize(self, *, train_iters: int | None = None, world_size: int | None = None) -> None:
        """Check the request, and bring `profile_ranks` into its one form (a list of int, or a word).

        Args:
            train_iters: iterations the training runs, when known; a window must end within them.
            world_size: number of ranks, when known; listed ranks must be below it.

        Raises:
            ProfilingConfigError: both profilers, a negative step, an empty window, a window past the end of training,
                ranks outside the world, an empty or malformed list of ranks. Bounds that depend on the run are checked
                only when a profiler is on, so a short run without profiling may keep the default window.
        """
        check_exclusive(use_nsys_profiler=self.use_nsys_profiler, use_pytorch_profiler=self.use_pytorch_profiler)
        check_window(self.profile_step_start, self.profile_step_end)
        self.profile_ranks = normalize_ranks(self.profile_ranks)
        if self.nsys_trace is not None:
            check_trace(self.nsys_trace, name="profiling.nsys_trace")
        check_extra_args(self.nsys_extra_args, name="profiling.nsys_extra_args")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ProfilingConfigError(
                f"profiling.peak_tflops={self.peak_tflops} is no peak",
                instead="Type the TFLOP/s of one device in the precision trained in, for example profiling.peak_tflops=989",
            )
        self._check_repeats()
        self._check_on_demand()
        if not self.enabled:
            return
        if train_iters is not None and self.profile_step_end > train_iters:
            raise ProfilingConfigError(
                f"profiling.profile_step_end={self.profile_step_end} lies past train.train_iters={train_iters}",
                why=f"the run's last iteration is {train_iters - 1}, so the window {self.window} would not be captured whole",
                instead=f"Set profiling.profile_step_end to at most {train_iters}, or raise train.train_iters",
            )
        if world_size is not None and isinstance(self.profile_ranks, list):
            outside = [rank for rank in self.profile_ranks if rank >= world_size]
            if outside:
                raise ProfilingConfigError(
                    f"profiling.profile_ranks names {_listing(outside)}, but the job has {world_size} ranks",
                    why=f"ranks run from 0 to {world_size - 1}",
                    instead="List ranks of this job, or type profiling.profile_ranks=all",
                )

    def _check_repeats(self) -> None:
        length = self.profile_step_end - self.profile_step_start
        if self.profile_every is not None and (not _is_whole(self.profile_every) or self.profile_every < length):
            raise ProfilingConfigError(
                f"profiling.profile_every={self.profile_every} lets windows overlap"
                if _is_whole(self.profile_every)
                else f"profiling.profile_every={self.profile_every!r} is not an integer",
                why=f"each is {length} iterations long, and the next one begins profile_every iterations after it",
                instead=f"Type profiling.profile_every={max(100, 10 * length)}, or any number from {length} on",
            )
        if not _is_whole(self.profile_at_most) or not 1 <= self.profile_at_most <= MAX_WINDOWS:
            raise ProfilingConfigError(
                f"profiling.profile_at_most={self.profile_at_most!r} windows cannot be captured",
                why=f"every one costs room and time; 1 to {MAX_WINDOWS} are possible",
                instead="Type a small number, for example profiling.profile_at_most=10",
            )

        if not _is_whole(self.nsys_captures) or not 1 <= self.nsys_captures <= MAX_WINDOWS:
            raise ProfilingConfigError(
                f"profiling.nsys_captures={self.nsys_captures!r} captures cannot be made",
                why=f"it is how many windows nsys may capture, 1 to {MAX_WINDOWS}",
                instead="Leave it out for one",
            )

    def _check_on_demand(self) -> None:
        if not _is_number(self.on_demand_seconds) or not 0.01 <= self.on_demand_seconds <= 3600:
            raise ProfilingConfigError(
                f"profiling.on_demand_seconds={self.on_demand_seconds!r} is no time between two looks",
                why="it may be from 0.01 seconds to an hour",
                instead="Leave it out for a look a second",
            )
        factor = self.slow_iteration_factor
        if factor is not None and (not _is_number(factor) or not factor > 1):
            raise ProfilingConfigError(
                f"profiling.slow_iteration_factor={factor!r} would call every iteration slow",
                why="an iteration is slow when it takes longer than the recent median by this factor",
                instead="Type a number above 1, for example profiling.slow_iteration_factor=2",
            )
        if not _is_whole(self.slow_iteration_captures) or self.slow_iteration_captures < 1:
            raise ProfilingConfigError(
                f"profiling.slow_iteration_captures={self.slow_iteration_captures!r} is no number of captures",
                instead="Type 1 or more; to capture none, leave profiling.slow_iteration_factor out",
            )
        if factor is not None and self.on_demand is False:
            raise ProfilingConfigError(
                "profiling.slow_iteration_factor is set, and profiling.on_demand is false",
                why="a rank that sees a slow iteration asks the others for a capture as anybody else does",
                instead="Leave profiling.on_demand out",
            )


@dataclass(kw_only=True)
class FaultToleranceConfig:
    """The `ft` section: what the job tells NVIDIA's resiliency extension. Names are Megatron Bridge's."""

    enable_ft_package: bool = False
    """Connect the ranks to the fault-tolerance launcher's monitor."""

    calc_ft_timeouts: bool = False
    """Let it derive its time-outs from what it observes."""


def resolve_output_dir(config: ProfilingConfig, output_dir: str | os.PathLike[str] | None = None) -> Path:
    """The root of a capture's files: the caller's, else the config's, else BRIDGE_PROFILING_DIR, else ./profiles."""
    chosen = output_dir or config.output_dir or os.environ.get(OUTPUT_DIR_VARIABLE) or DEFAULT_OUTPUT_DIR
    return Path(chosen).expanduser().absolute()


def check_exclusive(*, use_nsys_profiler: bool, use_pytorch_profiler: bool) -> None:
    """Refuse nsys and the torch profiler in one job: both subscribe to CUPTI, which serves one."""
    if use_nsys_profiler and use_pytorch_profiler:
        raise ProfilingConfigError(
            "use_nsys_profiler and use_pytorch_profiler are both on",
            why="nsys and the torch profiler both need CUPTI, and only one of them gets it",
            instead="Keep one of them: NsysPlugin or PyTorchProfilerPlugin,"
            " profiling.use_nsys_profiler=true or profiling.use_pytorch_profiler=true",
        )


def check_window(start: object, end: object, *, name: str = "profiling.profile_step") -> None:
    """Refuse steps that are no integers, negative, or leave the window empty.

    Args:
        start: first iteration captured.
        end: first iteration not captured.
        name: how the user knows the pair, without `_start` and `_end`.
    """
    for label, step in ((f"{name}_start", start), (f"{name}_end", end)):
        if isinstance(step, bool) or not isinstance(step, int):
            raise ProfilingConfigError(
                f"{label}={step!r} is not an integer",
                why="it is the number of an iteration",
                instead=f"Type a whole number, for example {label}=10",
            )
        if step < 0:
            raise ProfilingConfigError(
                f"{label}={step} is negative",
                why="iterations are counted from 0",
                instead=f"Type {label}=0 or more",
            )
    assert isinstance(start, int)
    assert isinstance(end, int)
    if start == end:
        raise ProfilingConfigError(
            f"the window is empty: {name}_start and {name}_end are both {start}",
            why="the window is start <= iteration < end, so nothing would be captured",
            instead=f"Type {name}_end={start + 1} to capture iteration {start} alone",
        )
    if start > end:
        raise ProfilingConfigError(
            f"the window is empty: {name}_start={start} lies after {name}_end={end}",
            why="the window is start <= iteration < end",
            instead=f"Swap them: {name}_start={end} {name}_end={start}",
        )


def normalize_ranks(ranks: object, *, name: str = "profiling.profile_ranks") -> list[int] | str:
    """The one form of `profile_ranks`: a list of distinct ranks in the order given, or a word of RANK_WORDS.

    Args:
        ranks: a list of integers, one integer, `all` or `pp`.
        name: how the user knows the setting.

    Raises:
        ProfilingConfigError: nothing listed, a negative rank, or something that is no rank.
    """
    either = f"Type {name}=[0] for rank 0, {name}=all for every rank, or {name}=pp for one rank per pipeline stage"
    if isinstance(ranks, str):
        if ranks in RANK_WORDS:
            return ranks
        raise ProfilingConfigError(f"{name}={ranks!r} is not known", why="the words are 'all' and 'pp'", instead=either)
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        ranks = [ranks]
    if not isinstance(ranks, Sequence):
        raise ProfilingConfigError(f"{name}={ranks!r} is not a list of ranks", instead=either)
    if not ranks:
        raise ProfilingConfigError(f"{name}=[] names no rank", why="an empty list could mean all or none", instead=either)
    wrong = [rank for rank in ranks if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0]
    if wrong:
        raise ProfilingConfigError(f"{name} holds {_listing(wrong)}", why="a rank is an integer from 0 upwards", instead=either)
    return list(dict.fromkeys(ranks))


def parse_steps(text: str) -> tuple[int, int]:
    """`10:12` as (10, 12).

    Raises:
        ProfilingConfigError: it is not two whole numbers.
    """
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError(text)
        return int(first), int(last)
    except ValueError:
        raise ProfilingConfigError(
            f"--steps {text} is not a window",
            why="a window is its first iteration and the first one after it",
            instead="Type --steps 10:12 to capture iterations 10 and 11",
        ) from None


def parse_ranks(text: str, words: tuple[str, ...] = RANK_WORDS) -> list[int] | str:
    """`0,1` as [0, 1]; a word as it is.

    Args:
        text: what was typed.
        words: those that are known where it was typed.

    Raises:
        ProfilingConfigError: something else.
    """
    if text in words:
        return text
    try:
        return [int(rank) for rank in text.strip("[]").split(",")]
    except ValueError:
        known = f"one of the words {' and '.join(words)}" if len(words) > 1 else f"the word {words[0]}"
        raise ProfilingConfigError(
            f"--ranks {text} is not a list of ranks",
            why=f"ranks are whole numbers with commas between them, or {known}",
            instead="Type --ranks 0,1 or --ranks all",
        ) from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _listing(values: Sequence[object]) -> str:
    return ", ".join(repr(value) for value in values)
