"""Messages between `bridge-profiling trigger` and a running job: small JSON files (`directory`). Imports no torch."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal

from bridge_profiling.capture.files import folder_name
from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean, require
from bridge_profiling.common.typed_json import read_typed
from bridge_profiling.settings.profiling import PROFILERS, ProfilingConfig, Window, check_exclusive
from bridge_profiling.settings.window import OPTIONS, check_ranks

#: Settings that a request may change.
SETTINGS = (
    *("record_shapes", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack", "nvtx_ranges"),
    *("pytorch_profiler_collect_chakra", "pytorch_profiler_profile_memory", "pytorch_profiler_device_only"),
    "pytorch_profiler_warmup",
)

#: A longer trace fills disks, and no viewer opens it.
MAX_ITERATIONS = 1000

#: Accepted requests that are open at a time: a rank reads all of them at each poll.
MAX_OPEN = 16

_EXAMPLE = 'Write for example {"iterations": 3, "start": 120, "ranks": [0, 1], "profilers": ["torch"]}'
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def new_id() -> str:
    """A name for a request or a run: the time, and random digits that distinguish two in the same second."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """A capture requested from a running job. Values that no job can satisfy are refused on construction.

    Raises:
        ProfilingConfigError: a value is out of bounds, or the profilers exclude each other.
    """

    iterations: int  # how many to capture
    start: int | None = None  # the first one; None for the nearest that every rank can receive in time
    ranks: list[int] | str | None = None  # global ranks, `all` or `pp`; None for the job's own `profile_ranks`
    profilers: list[str] | None = None  # from PROFILERS; None for those the job was launched with, or torch
    # Fields of the section `profiling`, from SETTINGS, over those of the job.
    settings: dict[str, Any] = field(default_factory=dict)
    kind: Literal["request", "slow_iteration"] = "request"  # `slow_iteration` if a rank requests it by itself
    reason: str | None = None  # why, for the manifest
    requested_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # UTC, ISO 8601
    requested_by: str | None = None  # user and host
    run: str | None = None  # the run of the job that it is meant for; None for any
    id: str = field(default_factory=new_id)  # its name

    def __post_init__(self) -> None:
        require(
            1 <= self.iterations <= MAX_ITERATIONS,
            f"iterations={self.iterations} is not a number from 1 to {MAX_ITERATIONS}",
            instead="Type a small number, for example --iterations 3",
        )
        require(
            self.start is None or 0 <= self.start < 1 << 60,
            f"start={self.start} is not an iteration: they are counted from 0",
            instead="Leave it out to capture the nearest iterations possible",
        )
        for name in ("reason", "requested_by", "run"):
            require(len(getattr(self, name) or "") <= 1000, f"{name} is longer than 1000 characters")
        require(_NAME.fullmatch(self.id), f"id={self.id!r} is not a valid name", instead="Leave id out")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", check_ranks(self.ranks, OPTIONS))
        if self.profilers is not None:
            require(
                self.profilers and PROFILERS.keys() >= set(self.profilers),
                f"profilers={self.profilers} cannot start on demand",
                instead=did_you_mean(next((name for name in self.profilers if name not in PROFILERS), ""), PROFILERS),
            )
            check_exclusive(use_nsys_profiler="nsys" in self.profilers, use_pytorch_profiler="torch" in self.profilers)
            object.__setattr__(self, "profilers", [name for name in PROFILERS if name in self.profilers])
        for name in self.settings:
            require(
                name in SETTINGS,
                f"the setting {name!r} cannot be changed by a request",
                why="a running job takes over its other settings only when it starts",
                instead=did_you_mean(name, SETTINGS),
            )
        # All but the window, which the job decides.
        ProfilingConfig(**self.settings).finalize()


@dataclass(frozen=True, kw_only=True)
class AcceptedCapture(CaptureRequest):
    """A request that rank 0 accepted, with everything decided; every listed rank captures iterations `start <= i < end`.

    `launch` identifies the ranks of one launch, `run` this run of the job unlike its restarts, and `attempt` is the folder's
    number.
    """

    start: int = field()
    end: int
    ranks: list[int] = field()
    profilers: list[str] = field()
    launch: str
    run: str = field()
    attempt: int
    accepted_at_iteration: int

    @property
    def window(self) -> Window:
        """The iterations to capture."""
        return Window(self.start, self.end)

    @property
    def folder(self) -> str:
        """Name of the capture's folder."""
        return folder_name(self.window, self.attempt)


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """One rank's answer to an accepted capture, with the iteration it was in; `reason` is why it refuses."""

    rank: int
    status: Literal["armed", "refused"]
    reason: str | None = None
    iteration: int | None = None


@dataclass(frozen=True, kw_only=True)
class RefusedRequest:
    """A request that rank 0 refused, as far as it could be read, and why."""

    refused: str
    request: CaptureRequest | str


@dataclass(frozen=True, kw_only=True)
class DoneCapture(AcceptedCapture):
    """An accepted capture that is over: how it ended, and the answers by rank."""

    ended: str
    answers: dict[str, RankAnswer]
    withdrawn: bool = False  # before its window began: ranks drop it


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of a running job, published by rank 0."""

    run: str  # identifies this run of the job, unlike its restarts
    launch: str  # identifies the ranks of one launch
    job_id: str | None  # the launcher's job id
    host: str  # rank 0's host
    pid: int  # rank 0's process id
    pid_space: str | None  # the machine and container in which `pid` is valid; None if unknown
    poll_seconds: float  # how often ranks look for messages
    world_size: int  # number of ranks
    pipeline_ranks: list[int]  # one rank per pipeline stage
    profile_ranks: list[int] | str  # ranks captured unless a request names others
    profilers: list[str]  # profilers used unless a request names others
    train_iters: int | None  # iterations the training runs, if known
    warm_up: int = 1  # iterations before a window in which the torch profiler warms up, unless a request says otherwise
    iteration: int | None = None  # the iteration that rank 0 is in; None before its first
    completed: int = 0  # number of iterations timed
    fastest_ns: int | None = None  # the shortest of the last ten iterations, the loop's waits between them included
    median_ns: int | None = None  # the median of the last fifty, likewise
    # `[start, end]` of the windows it was launched with that are not over.
    windows: list[list[int]] = field(default_factory=list)
    records_memory: bool = False  # whether a memory history is being recorded for one of them
    cuda: bool = False  # whether rank 0 uses a CUDA device
    under_nsys: bool = False  # whether nsys runs around the ranks, or should
    nsys_captures_left: int = 0  # how many more captures that nsys can make
    slow_captures_left: int = 0  # how many more slow iterations the job captures
    open: list[AcceptedCapture] = field(default_factory=list)  # the accepted captures that are not over
    ended: str | None = None  # how the training ended


def parse_request(text: str) -> CaptureRequest:
    """Read a request; raises ProfilingConfigError unless it is a complete JSON object with known keys and valid values."""
    require(text.strip(), "the request is empty, or not a regular text file of at most 64 KiB", instead=_EXAMPLE)
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            known = [each.name for each in fields(CaptureRequest)]
            unknown = [key for key in content if key not in known]
            why = f"its keys are {', '.join(known)}"
            instead = did_you_mean(unknown[0], known) if unknown else ""
            require(not unknown, f"the request has unknown keys {unknown}", why=why, instead=instead)
            for name, item in (("ranks", int), ("profilers", str)):
                if type(content.get(name)) is item:  # a single one needs no list
                    content[name] = [content[name]]
        return read_typed(content, CaptureRequest, "request")
    except (ValueError, RecursionError) as error:
        if isinstance(error, ProfilingConfigError):
            raise
        raise ProfilingConfigError("the request cannot be read", why=str(error), instead=_EXAMPLE) from error
