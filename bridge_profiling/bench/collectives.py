"""How fast ranks exchange messages when they do nothing else: by operation and size.

Bandwidths are those of NCCL's own benchmark, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Algorithm
bandwidth is message size over time, where the size is the larger of one rank's input and output. Bus bandwidth is that times
2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, and 1 for send and send_recv: a number that
does not depend on how many ranks there are, and that the link's own can be compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling.bench.bandwidth import bus_factor
from bridge_profiling.bench.failures import MeasurementError, told
from bridge_profiling.bench.requests import DTYPES, CollectivesRequest
from bridge_profiling.bench.samples import Estimate, estimate
from bridge_profiling.bench.world import World, circumstances_of, plain

#: One sample is so many operations, of small messages more: long enough for any clock, and few enough for a device's queue.
_SAMPLE_S, _MOST_OPERATIONS = 0.002, 50

_MOST_SAMPLES = 30

#: Operations before the first that counts: the first of a size makes connections and buffers.
_WARMUP = 3

#: Cycles for which a device is held back, so that the host has launched a whole sample before its first operation begins.
_HELD_CYCLES = 4_000_000


@dataclass(frozen=True)
class Exchange:
    """One operation of one size, ready to be repeated.

    Args:
        call: does it once; on a device it may return before it is done.
        fill: puts into the buffers what `correct` looks for.
        correct: whether what arrived at this rank is what was sent.
    """

    call: Callable[[], object]
    fill: Callable[[], object]
    correct: Callable[[], bool]


def measure(request: CollectivesRequest, world: World) -> dict[str, Any]:
    """Measure every operation at every size; all ranks call it.

    Args:
        request: what is measured.
        world: the ranks.

    Returns:
        The result, the same on every rank but for what a host says of itself.

    Raises:
        MeasurementError: an operation failed, as where a message finds no memory.
    """
    result = circumstances_of(world) | {"dtype": request.dtype}
    rows: list[dict[str, Any]] = []
    count, ranks = DTYPES[request.dtype], world.place.size
    # Each rank's part has the same number of elements, at least one. Sizes that come to the same are measured once.
    messages = dict.fromkeys(max(size // (count * ranks), 1) * ranks for size in request.sizes)
    for operation in request.operations:
        for elements in messages:
            try:
                rows.append(_row(operation, elements, request, world))
            except (RuntimeError, NotImplementedError) as error:
                # Backends say so on every rank before anything is sent.
                if not _is_unsupported(error):
                    raise MeasurementError(f"{operation} of {elements * count:,} bytes: {told(error)}") from error
                result["limitations"].append(f"{operation}: {world.backend} of torch {torch.__version__} does not have it")
                break
    return result | {"rows": rows}


def _row(operation: str, elements: int, request: CollectivesRequest, world: World) -> dict[str, Any]:
    exchange = _EXCHANGES[operation](elements, getattr(torch, request.dtype), world)
    exchange.fill()
    exchange.call()
    correct = world.agreed(0.0 if exchange.correct() else 1.0) == 0.0
    message, (seconds, operations) = elements * DTYPES[request.dtype], _timed(exchange.call, request.seconds, world)
    algorithm_gbs = message / seconds.median / 1e9
    return {
        "operation": operation,
        "message_bytes": message,
        "operations_per_sample": operations,
        "time_us": plain(seconds.scaled(1e6)),
        "algorithm_bandwidth_gbs": float(f"{algorithm_gbs:.6g}"),
        "bus_bandwidth_gbs": float(f"{algorithm_gbs * bus_factor(operation, world.place.size):.6g}"),
        "correct": correct,
    }


def _timed(call: Callable[[], object], budget_s: float, world: World) -> tuple[Estimate, int]:
    """Seconds of one operation, and how many a sample has. Every rank counts the same, by the slowest."""
    for _ in range(_WARMUP):
        call()
    once = world.agreed(_sample(call, 1, world))
    operations = int(min(max(_SAMPLE_S / once, 1), _MOST_OPERATIONS))
    samples = int(min(max(budget_s / (once * operations), 2), _MOST_SAMPLES))
    taken = [_sample(call, operations, world) / operations for _ in range(samples)]
    return estimate(world.slowest(taken)), operations


def _sample(call: Callable[[], object], operations: int, world: World) -> float:
    """Seconds of some operations, one after the other; ranks begin together."""
    dist.barrier()
    if world.device.type != "cuda":
        started = time.perf_counter()
        for _ in range(operations):
            call()
        return time.perf_counter() - started
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_HELD_CYCLES)
    before.record()
    for _ in range(operations):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def _all_reduce(elements: int, dtype: torch.dtype, world: World) -> Exchange:
    buffer = torch.zeros(elements, dtype=dtype, device=world.device)
    everyone = sum(_value(rank, 0) for rank in range(world.place.size))

    def correct() -> bool:
        right = _all_are(buffer, everyone)
        # Repeated sums of anything else would overflow.
        buffer.zero_()
        return right

    return Exchange(lambda: dist.all_reduce(buffer), lambda: buffer.fill_(_value(world.place.rank, 0)), correct)


def _all_gather(elements: int, dtype: torch.dtype, world: World) -> Exchange:
    size = world.place.size
    mine = torch.zeros(elements // size, dtype=dtype, device=world.device)
    all_of_it = torch.zeros(elements, dtype=dtype, device=world.device)
    return Exchange(
        lambda: dist.all_gather_into_tensor(all_of_it, mine),
        lambda: mine.fill_(_value(world.place.rank, 0)),
        lambda: all(_all_are(part, _value(rank, 0)) for rank, part in enumerate(all_of_it.chunk(size))),
    )


def _reduce_scatter(elements: int, dtype: torch.dtype, world: World) -> Exchange:
    size, rank = world.place.size, world.place.rank
    all_of_it = torch.zeros(elements, dtype=dtype, device=world.device)
    mine = torch.zeros(elements // size, dtype=dtype, device=world.device)
    return Exchange(
        lambda: dist.reduce_scatter_tensor(mine, all_of_it),
        lambda: [part.fill_(_value(rank, to)) for to, part in enumerate(all_of_it.chunk(size))],
        lambda: _all_are(mine, sum(_value(source, rank) for source in range(size))),
    )


def _all_to_all(elements: int, dtype: torch.dtype, world: World) -> Exchange:
    size, rank = world.place.size, world.place.rank
    sent = torch.zeros(elements, dtype=dtype, device=world.device)
    received = torch.zeros(elements, dtype=dtype, device=world.device)
    return Exchange(
        lambda: dist.all_to_all_single(received, sent),
        lambda: [part.fill_(_value(rank, to)) for to, part in enumerate(sent.chunk(size))],
        lambda: all(_all_are(part, _value(source, rank)) for source, part in enumerate(received.chunk(size))),
    )


def _send(elements: int, dtype: torch.dtype, world: World) -> Exchange:
    """One way: every even rank to the next one. The last of an odd number of ranks has no partner."""
    size, rank = world.place.size, world.place.rank
    buffer = torch.zeros(elements, dtype=dtype, device=world.device)
    sends, partner = rank % 2 == 0, rank + 1 if rank % 2 == 0 else rank - 1
    if partner >= size:
        return Exchange(lambda: None, lambda: None, lambda: True)
    return Exchange(
        lambda: dist.send(buffer, partner) if sends else dist.recv(buffer, partner),
        lambda: buffer.fill_(_value(rank, 0)),
        lambda: sends or _all_are(buffer, _value(partner, 0)),
    )


def _send_recv(elements: int, dtype: torch.dtype, world: World) -> Exchange:
    """Both ways, as nccl-tests' sendrecv: every rank to the next one around a ring, while it receives from the one before."""
    size, rank = world.place.size, world.place.rank
    sent = torch.zeros(elements, dtype=dtype, device=world.device)
    received = torch.zeros(elements, dtype=dtype, device=world.device)
    after, before = (rank + 1) % size, (rank - 1) % size

    def call() -> None:
        both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Exchange(call, lambda: sent.fill_(_value(rank, 0)), lambda: _all_are(received, _value(before, 0)))


_EXCHANGES: dict[str, Callable[[int, torch.dtype, World], Exchange]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "send_recv": _send_recv,
}


def _value(source: int, to: int) -> float:
    """What a rank sends to another: small numbers, which 16 bits hold, and others for others."""
    return float(1 + source % 16 + 3 * (to % 16))


def _all_are(buffer: torch.Tensor, value: float) -> bool:
    """Whether all elements are a value, as far as sums of 16-bit numbers are exact."""
    return bool(torch.allclose(buffer, torch.full_like(buffer, value), rtol=0.02))


def _is_unsupported(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "does not support" in text or "not implemented" in text
