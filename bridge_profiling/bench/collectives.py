"""Communication between ranks that do nothing else, by operation and size.

Bandwidths follow NCCL's own benchmark, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Algorithm bandwidth
is message size over time; the size is the larger of one rank's input and output. Bus bandwidth is algorithm bandwidth times
`results.bus_factor`: a number that does not depend on the number of ranks and compares with the bandwidth of the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling.bench import ranks, requests, results
from bridge_profiling.bench.ranks import World
from bridge_profiling.common.errors import one_line, require
from bridge_profiling.common.launch_env import LaunchEnv

#: Operations before the first that counts: the first of a size creates connections and buffers.
_WARMUP = 3

_MIN_SAMPLES = 2

#: Cycles that a device waits, so that the host launches a whole sample before its first operation starts.
_HOLD_CYCLES = 4_000_000


@dataclass(frozen=True)
class Exchange:
    """One operation of one size, with buffers of equal parts: filled with `values`, and `expected` after the call.

    On a device the call may return before it is complete.
    """

    call: Callable[[], object]
    sent: torch.Tensor
    values: list[float]
    received: torch.Tensor
    expected: list[float]

    def arrives(self) -> bool:
        """Perform it once; returns whether this rank received the expected values, within the precision of 16-bit sums."""
        for part, value in zip(self.sent.chunk(len(self.values)), self.values, strict=True):
            part.fill_(value)
        self.call()
        parts = zip(self.received.chunk(len(self.expected)), self.expected, strict=True)
        correct = all(torch.allclose(part, torch.full_like(part, value), rtol=0.02) for part, value in parts)
        if self.sent is self.received:
            # Repeated sums of any other value would overflow.
            self.sent.zero_()
        return correct


def measure(request: requests.CollectivesRequest) -> dict[str, Any]:
    """Measure every operation at every size; all ranks call it and get the same result, except for facts about each host."""
    env = LaunchEnv.read()
    require(
        env.world_size >= 2,
        "the launcher started only one rank",
        why="communication needs two",
        instead="Start two or more, or run without a launcher and type --nproc 2",
    )
    backend = request.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    with ranks.joined(env, backend) as world:
        return _measure_in(world, request)


def _measure_in(world: World, request: requests.CollectivesRequest) -> dict[str, Any]:
    result = ranks.conditions("collectives", world.device) | {
        "world_size": world.size,
        "hosts": len(set(world.hosts)),
        "ranks_per_host": max(world.hosts.count(host) for host in set(world.hosts)),
        "backend": world.backend,
        "link": ranks.links(world.device),
        "dtype": request.dtype,
    }
    rows: list[dict[str, Any]] = []
    bytes_per_element = requests.DTYPES[request.dtype]
    # Each rank's part has the same number of elements, at least one. Sizes that round to the same message are measured once.
    messages = dict.fromkeys(max(size // (bytes_per_element * world.size), 1) * world.size for size in request.sizes)
    for operation in request.operations:
        for elements in messages:
            try:
                rows.append(_row(operation, elements, request, world))
            except (RuntimeError, NotImplementedError) as error:
                # An unsupported operation fails on every rank before anything is sent.
                unsupported = any(text in str(error).lower() for text in ("does not support", "not implemented"))
                if not unsupported and not isinstance(error, NotImplementedError):
                    what = f"{operation} of {elements * bytes_per_element:,} bytes"
                    raise results.MeasurementError(f"{what}: {one_line(error)}") from error
                result["limitations"].append(f"{operation}: not supported by {world.backend} of torch {torch.__version__}")
                break
    return result | {"rows": rows}


def _row(operation: str, elements: int, request: requests.CollectivesRequest, world: World) -> dict[str, Any]:
    exchange = _exchange(operation, elements, getattr(torch, request.dtype), world)
    (wrong,) = world.slowest([0.0 if exchange.arrives() else 1.0])
    for _ in range(_WARMUP):
        exchange.call()
    # All ranks take the same number of samples, from the time of the slowest.
    (once_s,) = world.slowest([_sample(exchange.call, 1, world)])
    operations, samples = ranks.plan(once_s, request.seconds, min_samples=_MIN_SAMPLES)
    taken = [_sample(exchange.call, operations, world) / operations for _ in range(samples)]
    seconds = results.estimate(world.slowest(taken))
    message = elements * requests.DTYPES[request.dtype]
    algorithm_gbs = message / seconds.median / 1e9
    return {
        "operation": operation,
        "message_bytes": message,
        "operations_per_sample": operations,
        "time_us": seconds.scaled(1e6).as_json(),
        "algorithm_bandwidth_gbs": float(f"{algorithm_gbs:.6g}"),
        "bus_bandwidth_gbs": float(f"{algorithm_gbs * results.bus_factor(operation, world.size):.6g}"),
        "correct": not wrong,
    }


def _sample(call: Callable[[], object], operations: int, world: World) -> float:
    """Seconds of some operations in sequence; ranks start together."""
    dist.barrier()
    if world.device.type == "cuda":
        return ranks.device_seconds(call, operations, hold_cycles=_HOLD_CYCLES)
    started = time.perf_counter()
    for _ in range(operations):
        call()
    return time.perf_counter() - started


def _exchange(operation: str, elements: int, dtype: torch.dtype, world: World) -> Exchange:
    rank, size = world.rank, world.size
    buffer = partial(torch.zeros, dtype=dtype, device=world.device)
    own, of_each = [_value(rank, 0)], [_value(source, 0) for source in range(size)]
    to_each, from_each = [_value(rank, to) for to in range(size)], [_value(source, rank) for source in range(size)]
    match operation:
        case "all_reduce":
            whole = buffer(elements)
            return Exchange(lambda: dist.all_reduce(whole), whole, own, whole, [sum(of_each)])
        case "all_gather":
            part, whole = buffer(elements // size), buffer(elements)
            return Exchange(lambda: dist.all_gather_into_tensor(whole, part), part, own, whole, of_each)
        case "reduce_scatter":
            part, whole = buffer(elements // size), buffer(elements)
            return Exchange(lambda: dist.reduce_scatter_tensor(part, whole), whole, to_each, part, [sum(from_each)])
        case "all_to_all":
            sent, received = buffer(elements), buffer(elements)
            return Exchange(lambda: dist.all_to_all_single(received, sent), sent, to_each, received, from_each)
        case "send":
            # Every even rank sends to the next one. The last of an odd number of ranks has no partner.
            message, source, target = buffer(elements), rank // 2 * 2, rank // 2 * 2 + 1
            transfer = partial(dist.send, message, target) if rank == source else partial(dist.recv, message, source)
            call = transfer if target < size else lambda: None
            return Exchange(call, message, own, message, [_value(source, 0)])
        case "send_recv":
            # As in nccl-tests: every rank sends to the next one around a ring and receives from the previous one.
            sent, received = buffer(elements), buffer(elements)
            before, after = (rank - 1) % size, (rank + 1) % size

            def both_ways() -> None:
                both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()

            return Exchange(both_ways, sent, own, received, [_value(before, 0)])
    raise AssertionError(operation)


def _value(source: int, to: int) -> float:
    """The value that a rank sends to another: small, so that 16 bits hold it, and different for different ranks."""
    return float(1 + source % 16 + 3 * (to % 16))
