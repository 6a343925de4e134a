"""The GPUs of this machine as a profile will show them: how they are linked, and what NCCL is told to do with that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bridge_profiling.doctor.machine import Machine, Unavailable, join, parse_settings
from bridge_profiling.doctor.request import Request
from bridge_profiling.doctor.verdict import Verdict, ok, unknown, warning

#: Links of `nvidia-smi topo -m` that stay inside PCIe switches or NVLink; the others cross a host bridge or a socket.
_NEAR = re.compile(r"NV\d+|PIX|PXB")


def check_gpus(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Which GPUs there are, and whether every pair of them is linked alike."""
    try:
        listed = machine.run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except Unavailable as reason:
        yield unknown("GPUs", f"not seen: {reason}", "Run doctor where the job runs, if that is another machine")
        return
    gpus = [line.split(", ") for line in listed.splitlines() if line.count(", ") == 1]
    if not gpus:
        yield unknown("GPUs", f"nvidia-smi names none: {listed or 'it said nothing'}")
        return
    names = dict.fromkeys(name for name, _ in gpus)
    yield ok("GPUs", f"{len(gpus)} × {' and '.join(names)}, driver {gpus[0][1]}")
    per_node = request.world_size // request.nodes if request.world_size and request.nodes else None
    if per_node is not None and per_node > len(gpus):
        yield warning("GPUs", f"{per_node} ranks share {len(gpus)}", f"Start {len(gpus)} ranks on this machine")
    if len(gpus) > 1:
        yield from _check_topology(machine)
    yield from _check_nvlink(machine)


def _check_topology(machine: Machine) -> Iterator[Verdict]:
    try:
        links = parse_topology(machine.run("nvidia-smi", "topo", "-m"))
    except Unavailable as reason:
        yield unknown("GPU topology", str(reason))
        return
    if not links:
        yield unknown("GPU topology", "nvidia-smi topo -m shows no matrix of GPUs")
        return
    kinds: dict[str, list[str]] = {}
    for (one, other), kind in links.items():
        kinds.setdefault(kind, []).append(f"{one}-{other}")
    far = {kind: pairs for kind, pairs in kinds.items() if not _NEAR.fullmatch(kind)}
    if far:
        shown = "; ".join(f"{kind}: {join(pairs, 4)}" for kind, pairs in far.items())
        yield warning(
            "GPU topology",
            f"{sum(map(len, far.values()))} of {len(links)} pairs are linked across a host bridge or socket ({shown})",
            "Keep tensor-parallel ranks on GPUs that NVLink or one PCIe switch joins; the profile shows their collectives",
        )
    elif len(kinds) > 1:
        shown = "; ".join(f"{kind}: {join(pairs, 4)}" for kind, pairs in kinds.items())
        yield warning(
            "GPU topology",
            f"pairs of GPUs are not linked alike ({shown})",
            "Place tensor-parallel ranks on the pairs with most links",
        )
    else:
        yield ok("GPU topology", f"each of {len(links)} {'pairs' if len(links) > 1 else 'pair'}: {next(iter(kinds))}")


def _check_nvlink(machine: Machine) -> Iterator[Verdict]:
    try:
        speeds = parse_nvlink(machine.run("nvidia-smi", "nvlink", "-s"))
    except Unavailable as reason:
        yield unknown("NVLink", str(reason))
        return
    total = sum(map(len, speeds.values()))
    if not total:
        yield ok("NVLink", "these GPUs have none")
        return
    down = [f"{gpu} link {number}" for gpu, links in speeds.items() for number, speed in enumerate(links) if speed is None]
    rates = {gpu: sum(speed or 0.0 for speed in links) for gpu, links in speeds.items()}
    if down:
        yield warning(
            "NVLink",
            f"{len(down)} of {total} links are inactive ({join(down, 4)})",
            "Have the machine looked at (`nvidia-smi nvlink -e` counts errors): collectives there wait for the slowest link",
        )
    elif max(rates.values()) > 1.01 * min(rates.values()):
        slowest = min(rates, key=lambda gpu: rates[gpu])
        yield warning(
            "NVLink",
            f"{slowest} has {rates[slowest]:.0f} GB/s, others up to {max(rates.values()):.0f} GB/s",
            "Have the machine looked at: collectives wait for the slowest GPU",
        )
    else:
        yield ok("NVLink", f"all {total} links active, {next(iter(rates.values())):.0f} GB/s a GPU and direction")


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """The link of each pair of GPUs, from `nvidia-smi topo -m`: `{("GPU0", "GPU1"): "NV18"}`."""
    lines = [[cell.strip() for cell in line.split("\t")] for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    header = next((line for line in lines if re.fullmatch(r"GPU\d+", (line[1:] or [""])[0])), None)
    if header is None:
        return {}
    columns = {index: name for index, name in enumerate(header) if re.fullmatch(r"GPU\d+", name)}
    links = {}
    for line in lines:
        if re.fullmatch(r"GPU\d+", line[0]):
            for index, name in columns.items():
                if index < len(line) and line[index] != "X" and (name, line[0]) not in links:
                    links[line[0], name] = line[index]
    return links


def parse_nvlink(text: str) -> dict[str, list[float | None]]:
    """The speed of each GPU's links in GB/s and direction, None for one that is down, from `nvidia-smi nvlink -s`."""
    speeds: dict[str, list[float | None]] = {}
    gpu = ""
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = f"GPU{match[1]}"
            speeds[gpu] = []
        elif (match := re.match(r"\s*Link \d+: (<inactive>|[\d.]+ GB/s)", line)) and gpu:
            speeds[gpu].append(None if match[1] == "<inactive>" else float(match[1].split()[0]))
    return speeds


def _is_one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in values


def _logs_collectives(value: str) -> bool:
    return not value.startswith("^") and not {"ALL", "COLL", "P2P"}.isdisjoint(value.upper().split(","))


_on = _is_one_of("1", "TRUE", "YES", "ON")

#: Settings known to slow communication down or to change what a profile shows: when, and what follows.
_SETTINGS: dict[str, tuple[Callable[[str], bool], str]] = {
    "NCCL_P2P_DISABLE": (_on, "GPUs of one machine talk through host memory instead of NVLink or PCIe"),
    "NCCL_P2P_LEVEL": (_is_one_of("LOC", "0"), "GPUs of one machine talk through host memory instead of NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (_on, "ranks of one machine talk through the network"),
    "NCCL_IB_DISABLE": (_on, "machines talk through TCP sockets instead of InfiniBand or RoCE"),
    "NCCL_NET": (_is_one_of("SOCKET"), "machines talk through TCP sockets"),
    "NCCL_NET_GDR_LEVEL": (_is_one_of("LOC", "0"), "the network card copies through host memory"),
    "NCCL_DEBUG": (_is_one_of("TRACE"), "NCCL logs while it works, and the log's time is in the profile"),
    "NCCL_DEBUG_SUBSYS": (_logs_collectives, "with NCCL_DEBUG=INFO, NCCL logs every collective"),
    "NCCL_ALGO": (bool, "NCCL uses this algorithm for every size, the best one or not"),
    "NCCL_PROTO": (bool, "NCCL uses this protocol for every size, the best one or not"),
    "NCCL_BLOCKING_WAIT": (_on, "the host waits for every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": (_on, "the host waits for every collective"),
    "TORCH_DISTRIBUTED_DEBUG": (_is_one_of("DETAIL"), "every collective is checked by another one, which the profile shows"),
    "CUDA_LAUNCH_BLOCKING": (_on, "every kernel is waited for: nothing overlaps, and the profile shows another program"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_on, "every tensor is allocated by CUDA, which the profile shows"),
}


#: What changes nothing on one machine.
_BETWEEN_MACHINES = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_GDR_LEVEL")


def check_nccl_settings(request: Request, machine: Machine) -> Iterator[Verdict]:
    """Variables and NCCL's own files that are known to slow communication down, or to distort a profile."""
    found = False
    for place, settings in _places(request, machine):
        for name, (harmful, consequence) in _SETTINGS.items():
            if harmful(settings.get(name, "")) and not (name in _BETWEEN_MACHINES and request.nodes == 1):
                found = True
                yield warning("NCCL settings", f"{name}={settings[name]} ({place}): {consequence}", f"Unset {name} for the job")
    if not found:
        yield ok("NCCL settings", "none that is known to slow communication down or to distort a profile")


def _places(request: Request, machine: Machine) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield "environment", {**machine.environ, **request.environment}
    home = str(Path(machine.environ.get("HOME", "/"), ".nccl.conf"))
    for path in ("/etc/nccl.conf", machine.environ.get("NCCL_CONF_FILE") or home):
        try:
            yield path, parse_settings(machine.read(path), "=")
        except Unavailable:
            continue
