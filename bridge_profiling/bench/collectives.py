"""Communication between ranks that do nothing else, by operation and size.

Bandwidths follow NCCL's own benchmark, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Algorithm bandwidth
is message size over time; the size is the larger of one rank's input and output. Bus bandwidth is algorithm bandwidth times
`results.bus_factor`: a number that does not depend on the number of ranks and compares with the bandwidth of the link.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling.bench import results
from bridge_profiling.bench.conditions import conditions
from bridge_profiling.bench.results import MeasurementError, UnavailableError
from bridge_profiling.common.errors import one_line, require
from bridge_profiling.common.launch_env import LaunchEnv

#: How long a rank waits for the others.
_TIMEOUT = timedelta(minutes=3)

#: Operations before the first that counts: the first of a size creates connections and buffers.
_WARMUP = 3

#: Target duration of a sample, and its largest number of operations: long enough for any clock, and few enough for a device's
#: queue.
_SAMPLE_S, _MAX_OPERATIONS = 0.002, 50

_MIN_SAMPLES, _MAX_SAMPLES = 2, 30

#: Cycles that a device waits, so that the host launches a whole sample before its first operation starts.
_HOLD_CYCLES = 4_000_000

#: Environment variables that select the links.
_LINK_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")


def start_ranks(nproc: int | None, backend: str | None, arguments: Sequence[str]) -> int:
    """Run this package in ranks on this machine; returns 0, or the exit code of the first rank that failed.

    `nproc` None means one per CUDA device, else 2; `backend` None means the best available.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    devices = torch.cuda.device_count() if backend != "gloo" and torch.cuda.is_available() else 0
    if nproc is None and devices == 1:
        raise UnavailableError(
            "one CUDA device: unavailable, communication needs two; type --backend gloo to measure the host's instead"
        )
    count = nproc or devices or 2
    for local_rank in range(count):
        _device(backend or _best_backend(), local_rank)
    # The ranks share the machine's CPU cores, and print their own errors.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable()
    try:
        run.main(["--standalone", f"--nproc-per-node={count}", "-m", "bridge_profiling.bench", *arguments])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else MeasurementError.exit_code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def measure(
    *, operations: Sequence[str], sizes: Sequence[int], dtype: str, backend: str | None, seconds: float
) -> dict[str, Any]:
    """Measure every operation at every size; all ranks call it and get the same result, except for facts about each host.

    Args:
        operations: of `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `send` (one way between pairs of ranks) and
            `send_recv` (both ways around a ring).
        sizes: message sizes in bytes: the larger of one rank's input and output.
        dtype: torch's name of the element type.
        backend: `nccl` or `gloo`; None for the best available.
        seconds: approximate limit for each operation and size.
    """
    env = LaunchEnv.read()
    require(
        env.world_size >= 2,
        "the launcher started only one rank",
        why="communication needs two",
        instead="Start two or more, or run without a launcher and type --nproc 2",
    )
    backend = backend or _best_backend()
    device = _device(backend, env.device_index)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    host, port = env.rendezvous or ("127.0.0.1", 29500)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    device_id = device if backend == "nccl" else None
    dist.init_process_group(backend, rank=env.rank, world_size=env.world_size, timeout=_TIMEOUT, device_id=device_id)
    try:
        hosts: list[Any] = [None] * env.world_size
        dist.all_gather_object(hosts, socket.gethostname())
        result = conditions("collectives", device) | {
            "world_size": env.world_size,
            "hosts": len(set(hosts)),
            "ranks_per_host": max(map(hosts.count, hosts)),
            "backend": backend,
            "link": _links(device),
            "dtype": dtype,
        }
        # Each rank's part has as many elements, at least one. Sizes that round to the same message are measured once.
        step_bytes = getattr(torch, dtype).itemsize * env.world_size
        counts = dict.fromkeys(max(size // step_bytes, 1) * env.world_size for size in sizes)
        rows = _rows(operations, list(counts), getattr(torch, dtype), device, seconds, result["limitations"])
        return result | {"rows": rows}
    finally:
        dist.destroy_process_group()


def _best_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _device(backend: str, local_rank: int) -> torch.device:
    """Where a rank's messages are stored."""
    if backend == "gloo":
        return torch.device("cpu")
    version, count = f"torch {torch.__version__}", torch.cuda.device_count()
    if not dist.is_nccl_available():
        raise UnavailableError(f"nccl: unavailable, {version} was built without it; type --backend gloo")
    if not torch.cuda.is_available():
        why = f"{version} was built without CUDA" if torch.version.cuda is None else "torch finds none"
        raise UnavailableError(f"no CUDA device: unavailable, {why}")
    if local_rank >= count:
        raise UnavailableError(
            f"rank {local_rank} of this host: unavailable, it needs a CUDA device of its own and this host has {count}; "
            "type a smaller --nproc, or --backend gloo"
        )
    return torch.device("cuda", local_rank)


def _links(device: torch.device) -> dict[str, Any]:
    """The variables that select links, and on CUDA devices peer access and nvidia-smi's matrix of links."""
    selected = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_LINK_VARIABLES)}
    if device.type != "cuda":
        return {"environment": selected}
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    peers = {str(other): torch.cuda.can_device_access_peer(device.index, other) for other in others}
    topology = None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "topo", "-m"]
        matrix = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        topology = [line.expandtabs(8).rstrip() for line in matrix if line.lstrip().startswith(("GPU", "NIC"))]
    return {"environment": selected, "peer_access": peers, "topology": topology}


def _rows(
    operations: Sequence[str],
    counts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    limitations: list[str],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for operation in operations:
        for elements in counts:
            try:
                rows.append(_row(operation, elements, dtype, device, seconds))
            except RuntimeError as error:
                # An unsupported operation fails on every rank before anything is sent.
                if "not support" not in str(error) and not isinstance(error, NotImplementedError):
                    what = f"{operation} of {elements * dtype.itemsize:,} bytes"
                    raise MeasurementError(f"{what}: {one_line(error)}") from error
                limitations.append(f"{operation}: not supported by {dist.get_backend()} of torch {torch.__version__}")
                break
    return rows


def _row(operation: str, elements: int, dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, Any]:
    call, received, expected = _exchange(operation, elements, dtype, device)
    call()
    # Sums in 16 bits are rounded.
    (wrong,) = _slowest([float(not torch.allclose(received, expected, rtol=0.02))], device)
    # Repeated sums of any other value would overflow.
    received.zero_()
    del expected
    for _ in range(_WARMUP):
        call()
    # All ranks take the same number of samples, from the time of the slowest.
    (once_s,) = _slowest([_sample(call, 1, device)], device)
    operations = int(min(max(_SAMPLE_S / once_s, 1), _MAX_OPERATIONS))
    samples = int(min(max(seconds / (once_s * operations), _MIN_SAMPLES), _MAX_SAMPLES))
    taken = [_sample(call, operations, device) / operations for _ in range(samples)]
    time_s = results.estimate(_slowest(taken, device))
    message = elements * dtype.itemsize
    algorithm_gbs = message / time_s.median / 1e9
    return {
        "operation": operation,
        "message_bytes": message,
        "operations_per_sample": operations,
        "time_us": time_s.scaled(1e6).as_json(),
        "algorithm_bandwidth_gbs": float(f"{algorithm_gbs:.6g}"),
        "bus_bandwidth_gbs": float(f"{algorithm_gbs * results.bus_factor(operation, dist.get_world_size()):.6g}"),
        "correct": not wrong,
    }


def _slowest(samples: list[float], device: torch.device) -> list[float]:
    """For each sample the largest value of all ranks, which must have the same number of them."""
    values = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()


def _sample(call: Callable[[], object], operations: int, device: torch.device) -> float:
    """Seconds of some operations in sequence; ranks start together."""
    dist.barrier()
    if device.type == "cpu":
        started = time.perf_counter()
        for _ in range(operations):
            call()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HOLD_CYCLES)
    before.record()
    for _ in range(operations):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def _exchange(
    operation: str, elements: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], torch.Tensor, torch.Tensor]:
    """A call that exchanges a message of so many elements, the buffer it fills, and the values it brings there.

    On a device the call may return before it is complete.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    part = elements // size

    def message(values: list[float], count: int) -> torch.Tensor:
        """Of each value so many elements."""
        return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(count)

    of_each, empty = [_value(source, 0) for source in range(size)], message([0.0], elements)
    to_each, from_each = [_value(rank, to) for to in range(size)], [_value(source, rank) for source in range(size)]
    match operation:
        case "all_reduce":
            whole = message([of_each[rank]], elements)
            return partial(dist.all_reduce, whole), whole, message([sum(of_each)], elements)
        case "all_gather":
            own = message([of_each[rank]], part)
            return partial(dist.all_gather_into_tensor, empty, own), empty, message(of_each, part)
        case "reduce_scatter":
            sent, received = message(to_each, part), empty[:part].clone()
            return partial(dist.reduce_scatter_tensor, received, sent), received, message([sum(from_each)], part)
        case "all_to_all":
            sent = message(to_each, part)
            return partial(dist.all_to_all_single, empty, sent), empty, message(from_each, part)
        case "send":
            # Every even rank sends to the next one. The last of an odd number of ranks has no partner.
            own, source, target = message([of_each[rank]], elements), rank // 2 * 2, rank // 2 * 2 + 1
            transfer = partial(dist.send, own, target) if rank == source else partial(dist.recv, own, source)
            return transfer if target < size else lambda: None, own, message([of_each[source]], elements)
        case "send_recv":
            # As in nccl-tests: every rank sends to the next one around a ring and receives from the previous one.
            own, before, after = message([of_each[rank]], elements), (rank - 1) % size, (rank + 1) % size

            def both_ways() -> None:
                both = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, empty, before)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()

            return both_ways, empty, message([of_each[before]], elements)
    raise AssertionError(operation)


def _value(source: int, to: int) -> float:
    """The value that a rank sends to another: small, so that 16 bits hold it, and different for different ranks."""
    return float(1 + source % 16 + 3 * (to % 16))
