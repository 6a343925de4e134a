"""Settings of a profile, their checks, and the arithmetic of the window.

Constructing a config checks nothing, so overrides may arrive in any order; `finalize()` checks. Imports neither torch nor
nemo_run: the submit host and the ranks share these classes.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from bridge_profiling.common.errors import ProfilingConfigError, TrainingLogger, require
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.plain import setting, text_of
from bridge_profiling.manifest import Window
from bridge_profiling.nsys.command import check_extra_args, check_trace
from bridge_profiling.settings.window import FIELDS, MAX_ITERATION, Ranks, Spelling, check_request

logger = TrainingLogger(__name__)

#: The plugins set this variable in the job's environment, so training loops that know nothing of plugins find the directory.
OUTPUT_DIR_VARIABLE = "BRIDGE_PROFILING_DIR"

DEFAULT_OUTPUT_DIR = "profiles"

#: Profilers by the names that commands give them, and the setting that switches each on.
PROFILERS = {"torch": "use_pytorch_profiler", "memory": "record_memory_history", "nsys": "use_nsys_profiler"}

#: Every window is a trace, so a larger number is a mistake.
MAX_WINDOWS = 1000

#: Megatron Bridge's wording, which its users search for.
NSYS_DISABLED = (
    "Nsys not supported with the FaultTolerancePlugin; nsys is off for this job, training and fault tolerance are not"
)

#: Settings of the torch profiler that record more about operators.
_OF_OPERATORS = (
    *("record_shapes", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
    *("pytorch_profiler_profile_memory", "pytorch_profiler_collect_chakra"),
)

#: Megatron Bridge's default for `memory_snapshot_path`; with it, snapshots go into our own folder layout.
DEFAULT_MEMORY_SNAPSHOT_PATH = "snapshot.pickle"


@dataclass(kw_only=True)
class ProfilingConfig:
    """The `profiling` section of a ConfigContainer. Field names and defaults are Megatron Bridge's, ours come last."""

    use_nsys_profiler: bool = False
    """Mark the window for nsys, which must be running around the process."""

    use_pytorch_profiler: bool = False
    """Record the window with torch.profiler, one trace per profiled rank."""

    profile_step_start: int = 10
    """First iteration captured: 0-based, counted over the whole training including resumes."""

    profile_step_end: int = 12
    """First iteration after the window: 10-12 captures iterations 10 and 11."""

    profile_ranks: Ranks = field(default_factory=lambda: [0])
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
    """Write a Chakra execution trace next to the torch profiler's trace."""

    output_dir: str | None = None
    """Root of everything a capture writes. Unset: the variable BRIDGE_PROFILING_DIR, else `profiles` where the job runs."""

    pytorch_profiler_profile_memory: bool = False
    """Record allocations and frees as events in the torch profiler's trace."""

    pytorch_profiler_device_only: bool = False
    """Record the device, CUDA calls and phases, but no operators: about half of the torch profiler's overhead."""

    pytorch_profiler_warmup: int = 1
    """Iterations before the window in which the torch profiler already runs and discards its records."""

    nsys_trace: list[str] | None = None
    """APIs that nsys traces where a rank starts nsys itself; null means nvtx and cuda."""

    nsys_extra_args: list[str] = field(default_factory=list)
    """Options of `nsys profile`; they override the defaults in `nsys/command.py` by option name."""

    nsys_gpu_metrics: bool = False
    """Also sample GPU metrics; each rank samples its own GPU."""

    nsys_export_sqlite: bool = False
    """Write an SQLite file next to the report."""

    nsys_captures: int = 1
    """Number of windows that nsys may capture in one run, including those of `profile_every` and of requests. With more than
    one, nsys writes all reports at the end of the run."""

    peak_tflops: float | None = None
    """Dense peak of one device in TFLOP/s, for MFU; null means the data sheet's value where the device is known."""

    profile_every: int | None = None
    """Repeat the window every N iterations, counted from start to start."""

    profile_at_most: int = 10
    """Maximum number of windows captured with `profile_every`, including the first."""

    on_demand: bool | None = None
    """Accept `bridge-profiling trigger` during training; null means yes if a profiler is on or an output directory is set."""

    on_demand_seconds: float = 1.0
    """Seconds between two polls for a request. A capture starts at the earliest four such intervals after its request."""

    slow_iteration_factor: float | None = None
    """Start a capture when an iteration takes this many times the recent median; 2.0 is a good value."""

    slow_iteration_captures: int = 1
    """Maximum number of such captures in one run of the job."""

    @property
    def window(self) -> Window:
        """The requested window; with `profile_every`, the first one."""
        return Window(self.profile_step_start, self.profile_step_end)

    @property
    def windows(self) -> list[Window]:
        """Every requested window in order; empty without a profiler."""
        if not self.enabled:
            return []
        count, step = (self.profile_at_most, self.profile_every) if self.profile_every is not None else (1, 0)
        return [Window(self.window.start + step * number, self.window.end + step * number) for number in range(count)]

    @property
    def nsys_capture_count(self) -> int:
        """Number of captures that nsys is started with."""
        return max(self.nsys_captures, len(self.windows)) if self.use_nsys_profiler else 0

    @property
    def enabled(self) -> bool:
        """Whether any profiler is on."""
        return self.use_nsys_profiler or self.use_pytorch_profiler or self.record_memory_history

    @property
    def wants_shapes(self) -> bool:
        """Whether the torch profiler records shapes."""
        return self.record_shapes or self.pytorch_profiler_collect_shapes

    @property
    def warm_up(self) -> int:
        """Iterations before the window in which profilers prepare."""
        return self.pytorch_profiler_warmup if self.use_pytorch_profiler else 1

    def finalize(self, *, train_iters: int | None = None, world_size: int | None = None, spelled: Spelling = FIELDS) -> None:
        """Check the settings, and make `profile_ranks` a list of int or a word, paths text, and NumPy's numbers Python's.

        Under ft_launcher nsys is switched off, with a warning.

        Args:
            train_iters: number of training iterations, if known; the window must end within them.
            world_size: number of ranks, if known; listed ranks must be below it.
            spelled: the caller's names for the window, the ranks and `train_iters`.

        Raises:
            ProfilingConfigError: both profilers, settings that exclude each other, a negative step, an empty window, a window
                past the end of training, ranks outside the world, an empty or malformed list of ranks. Bounds that depend on
                the run are checked only when a profiler is on, so a short run without profiling may keep the default window.
        """
        self._normalize()
        check_exclusive(use_nsys_profiler=self.use_nsys_profiler, use_pytorch_profiler=self.use_pytorch_profiler)
        if LaunchEnv.read().fault_tolerant:
            self.disable_nsys()
        limits = {"train_iters": train_iters, "world_size": world_size} if self.enabled else {}
        _, self.profile_ranks = check_request(
            self.profile_step_start, self.profile_step_end, self.profile_ranks, spelled=spelled, **limits
        )
        if self.nsys_trace is not None:
            check_trace(self.nsys_trace, name="profiling.nsys_trace")
        check_extra_args(self.nsys_extra_args, name="profiling.nsys_extra_args")
        if self.pytorch_profiler_device_only:
            for name in _OF_OPERATORS:
                require(
                    not getattr(self, name),
                    f"profiling.pytorch_profiler_device_only and profiling.{name} are both on",
                    why="without operators there is nothing to record it for",
                    instead="Leave one of them out",
                )
        self._check_numbers()
        require(
            self.slow_iteration_factor is None or self.on_demand is not False,
            "profiling.slow_iteration_factor is set, and profiling.on_demand is false",
            why="a rank that sees a slow iteration sends a request on demand",
            instead="Leave profiling.on_demand out",
        )
        if self.profile_every is not None:
            require(
                self.profile_step_end + self.profile_every * (self.profile_at_most - 1) < MAX_ITERATION,
                f"window {self.profile_at_most} of profiling.profile_every={self.profile_every} ends after iteration 2^63 - 1",
                why="iterations are counted with 64 bits",
                instead="Type a smaller profiling.profile_every",
            )

    def disable_nsys(self) -> None:
        """Switch nsys off because of fault tolerance; if it was on, rank 0 logs a warning."""
        if self.use_nsys_profiler and LaunchEnv.read().rank == 0:
            logger.warning(NSYS_DISABLED)
        self.use_nsys_profiler = False

    def _normalize(self) -> None:
        for each in fields(self):
            value, name = setting(getattr(self, each.name)), f"profiling.{each.name}"
            if isinstance(each.default, bool) or (each.name == "on_demand" and value is not None):
                value = check_flag(value, name)
            elif each.name in ("output_dir", "memory_snapshot_path") and value not in (None, ""):
                check_path(value, name)
            setattr(self, each.name, value)

    def _check_numbers(self) -> None:
        """Check integers against their least value, and other numbers against a bound that they must exceed."""
        length = self.profile_step_end - self.profile_step_start
        overlap = f"windows of {length} iterations would overlap"
        limit = "it limits the number of windows, and every window takes time and disk space"
        slow = "an iteration is slow when it takes longer than the recent median by this factor"
        for name, whole, bound, highest, why, example in (
            ("profile_every", True, length, None, overlap, max(100, 10 * length)),
            ("pytorch_profiler_warmup", True, 1, 1000, "the profiler starts slowly, and must not start inside the window", 3),
            ("profile_at_most", True, 1, MAX_WINDOWS, limit, 10),
            ("nsys_captures", True, 1, MAX_WINDOWS, limit, 1),
            ("slow_iteration_captures", True, 1, None, "leave profiling.slow_iteration_factor out to capture none", 1),
            ("slow_iteration_factor", False, 1, None, slow, 2),
            ("peak_tflops", False, 0, None, "it is the TFLOP/s of one device in the precision trained in", 989),
        ):
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            valid = (_is_integer(value) and value >= bound) if whole else (_is_number(value) and value > bound)
            expected = f"an integer of at least {bound}" if whole else f"a number above {bound}"
            require(
                valid and (highest is None or value <= highest),
                f"profiling.{name}={value!r} is not {expected}{f' and at most {highest}' if highest else ''}",
                why=why,
                instead=f"Type for example profiling.{name}={example}, or leave it out",
            )
        require(
            _is_number(self.on_demand_seconds) and 0.01 <= self.on_demand_seconds <= 3600,
            f"profiling.on_demand_seconds={self.on_demand_seconds!r} is not a number from 0.01 to 3600",
            why="it is the time between two polls for a request",
            instead="Leave it out to poll every second",
        )


@dataclass(kw_only=True)
class FaultToleranceConfig:
    """The `ft` section: settings of NVIDIA's resiliency extension. Names are Megatron Bridge's."""

    enable_ft_package: bool = False
    """Connect the ranks to the fault-tolerance launcher's monitor."""

    calc_ft_timeouts: bool = False
    """Megatron Bridge derives the time-outs from observed heartbeats; the recipes keep the launcher's."""


def resolve_output_dir(config: ProfilingConfig, output_dir: str | os.PathLike[str] | None = None) -> Path:
    """Root directory of captures: `output_dir`, else the config's, else BRIDGE_PROFILING_DIR, else ./profiles."""
    chosen = setting(output_dir or config.output_dir or os.environ.get(OUTPUT_DIR_VARIABLE) or DEFAULT_OUTPUT_DIR)
    check_path(chosen, "the output directory")
    try:
        place = Path(str(chosen)).expanduser()
    except RuntimeError as error:
        raise ProfilingConfigError(f"the output directory {chosen} has no place", why=str(error)) from None
    # The working directory may be gone: writing there fails as in any other directory that cannot be written.
    with suppress(OSError):
        place = place.absolute()
    return place


def check_flag(value: object, name: str) -> bool:
    """A boolean setting; ProfilingConfigError for text, of which `'false'` and `'no'` would count as true."""
    require(
        isinstance(value, bool) or (type(value) is int and value in (0, 1)),
        f"{name}={text_of(value, 100)!r} is not a boolean",
        why="any text counts as true in Python, 'false' and 'no' as well",
        instead=f"Pass {name}=True or {name}=False, without quotes",
    )
    return bool(value)


def check_path(value: object, name: str) -> None:
    """Raise ProfilingConfigError for a path that no file can have."""
    require(
        isinstance(value, str) and value.strip() and "\0" not in value,
        f"{name}={text_of(value, 1000)!r} is not a path",
        instead="Pass a string or a Path",
    )


def check_exclusive(*, use_nsys_profiler: bool, use_pytorch_profiler: bool) -> None:
    """Raise ProfilingConfigError if both profilers are on: CUPTI serves one subscriber."""
    require(
        not (use_nsys_profiler and use_pytorch_profiler),
        "use_nsys_profiler and use_pytorch_profiler are both on",
        why="nsys and the torch profiler both need CUPTI, and only one of them gets it",
        instead="Keep one of them: NsysPlugin or PyTorchProfilerPlugin,"
        " profiling.use_nsys_profiler=true or profiling.use_pytorch_profiler=true",
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
