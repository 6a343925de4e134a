"""A request to profile a job that is running, as it is written down and read back: nothing missing, nothing unknown.

Written at the desk, read by rank 0. Imports no torch, and decides nothing that depends on the job (`admission.py` does).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from bridge_profiling.config import check_exclusive
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.layout import normalize_ranks

#: What can be asked for on demand.
PROFILERS = ("torch", "memory", "nsys")

#: Who may ask: a person or a program, or a rank that has seen a slow iteration.
KINDS = ("request", "slow_iteration")

#: More than this in one capture is a mistake: a trace of as many iterations fills disks and no program opens it.
MAX_ITERATIONS = 1000

_RANKS = 'Type --ranks 0,1, --ranks all or --ranks pp; in a file "ranks": [0, 1], "all" or "pp"'
_EXAMPLE = 'Write for example {"iterations": 3, "start": 120, "ranks": [0, 1], "profilers": ["torch"]}'
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def new_id() -> str:
    """A name for a request: when, and a few letters that keep two of one second apart."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def now() -> str:
    """The time, as it stands in requests and manifests."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """What is asked of a running job.

    Attributes:
        iterations: how many to capture.
        start: the first of them; None for the nearest that every rank can hear of in time.
        ranks: global ranks, `all` or `pp`; None for the job's own `profile_ranks`.
        profilers: of PROFILERS; None for those the job was launched with, else torch.
        shapes: record tensor shapes.
        stacks: record Python stacks.
        kind: of KINDS.
        reason: why, for the manifest.
        requested_at: when, in UTC.
        requested_by: by whom.
        run: the one run it is meant for; None for whichever reads it.
        id: its name.
    """

    iterations: int
    start: int | None = None
    ranks: list[int] | str | None = None
    profilers: list[str] | None = None
    shapes: bool = False
    stacks: bool = False
    kind: str = "request"
    reason: str | None = None
    requested_at: str = field(default_factory=now)
    requested_by: str | None = None
    run: str | None = None
    id: str = field(default_factory=new_id)

    def as_json(self) -> dict[str, object]:
        """What is written down."""
        return asdict(self)


_FIELDS = tuple(one.name for one in fields(CaptureRequest))


def parse_request(text: str) -> CaptureRequest:
    """Read a request back.

    Raises:
        ProfilingConfigError: it is no JSON, cut off, or asks for something that does not exist.
    """
    if not text.strip():
        raise ProfilingConfigError("the request is empty, or no plain file of text of at most 64 KiB", instead=_EXAMPLE)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfilingConfigError("the request is no JSON, or was cut off", why=str(error), instead=_EXAMPLE) from error
    if not isinstance(given, dict) or "iterations" not in given:
        raise ProfilingConfigError("the request does not say how many iterations", instead=_EXAMPLE)
    unknown = sorted(given.keys() - set(_FIELDS))
    if unknown:
        raise ProfilingConfigError(
            f"the request holds {unknown[0]!r}", why=f"its keys are {', '.join(_FIELDS)}", instead=_EXAMPLE
        )
    return check_request(CaptureRequest(**given))


def check_request(request: CaptureRequest) -> CaptureRequest:
    """Refuse what no job could do; the request with its ranks and profilers in their one form.

    Raises:
        ProfilingConfigError: a value that is none.
    """
    if not _is_count(request.iterations) or not 1 <= request.iterations <= MAX_ITERATIONS:
        raise ProfilingConfigError(
            f"iterations={request.iterations!r} cannot be captured",
            why=f"a capture has 1 to {MAX_ITERATIONS} iterations",
            instead="Type a small number, for example --iterations 3",
        )
    if request.start is not None and not _is_count(request.start):
        raise ProfilingConfigError(
            f"start={request.start!r} is not an iteration",
            why="iterations are whole numbers, counted from 0",
            instead="Leave it out, and the job takes the nearest it can",
        )
    for name, kind in (("shapes", bool), ("stacks", bool)):
        if not isinstance(getattr(request, name), kind):
            raise ProfilingConfigError(f"{name}={getattr(request, name)!r} is neither true nor false", instead=_EXAMPLE)
    for name in ("reason", "requested_by", "run"):
        text = getattr(request, name)
        if text is not None and (not isinstance(text, str) or len(text) > 1000):
            raise ProfilingConfigError(f"{name} is not a text of at most 1000 characters", instead=_EXAMPLE)
    if not isinstance(request.id, str) or not _NAME.fullmatch(request.id) or not isinstance(request.requested_at, str):
        raise ProfilingConfigError(f"id={request.id!r} is no name for a request", instead="Leave id and requested_at out")
    if request.kind not in KINDS:
        raise ProfilingConfigError(f"kind={request.kind!r} is not known", instead="Leave it out")
    changed: dict[str, Any] = {}
    if request.ranks is not None:
        try:
            changed["ranks"] = normalize_ranks(request.ranks, name="ranks")
        except ProfilingConfigError as error:
            raise ProfilingConfigError(error.what, why=error.why, instead=_RANKS) from error
    if request.profilers is not None:
        changed["profilers"] = check_profilers(request.profilers)
    return CaptureRequest(**(request.as_json() | changed))  # type: ignore[arg-type]


def check_profilers(profilers: object) -> list[str]:
    """Profilers that can be asked for together, in the order of PROFILERS.

    Raises:
        ProfilingConfigError: none, one that is not known, or nsys and torch.
    """
    listed = profilers if isinstance(profilers, Sequence) and not isinstance(profilers, str) else [profilers]
    unknown = [one for one in listed if one not in PROFILERS]
    if unknown or not listed:
        raise ProfilingConfigError(
            f"{unknown[0]!r} is no profiler" if unknown else "no profiler is named",
            why=f"those that can be started on demand are {', '.join(PROFILERS)}",
            instead="Type --profiler torch",
        )
    check_exclusive(use_nsys_profiler="nsys" in listed, use_pytorch_profiler="torch" in listed)
    return [one for one in PROFILERS if one in listed]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60
