"""The GPUs of this machine: their number, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bridge_profiling.doctor.checks import Machine, Verdict, checked, join, ok, unknown, warning
from bridge_profiling.doctor.request import Request

#: Links of `nvidia-smi topo -m` within PCIe switches or NVLink; the others cross a host bridge or a socket.
_NEAR = re.compile(r"NV\d+|PIX|PXB")

_GPU = re.compile(r"GPU\d+")


@checked("GPUs", instead="Run doctor where the job runs, if that is another machine")
def check_gpus(request: Request, machine: Machine) -> Iterator[Verdict]:
    """The number of GPUs for the ranks of a machine, and whether all pairs are linked alike."""
    listed = machine.run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpus = [line.split(", ") for line in listed.splitlines() if line.count(", ") == 1]
    if not gpus:
        yield unknown(f"nvidia-smi lists none: {listed or 'no output'}")
        return
    names = dict.fromkeys(name for name, _ in gpus)
    yield ok(f"{len(gpus)} × {' and '.join(names)}, driver {gpus[0][1]}")
    per_node = request.world_size // request.nodes if request.world_size and request.nodes else 0
    if per_node > len(gpus):
        yield warning(f"{per_node} ranks share {len(gpus)}", f"Start {len(gpus)} ranks on this machine")
    if len(gpus) > 1:
        yield from _check_topology(request, machine)
    yield from _check_nvlink(request, machine)


@checked("GPU topology")
def _check_topology(request: Request, machine: Machine) -> Iterator[Verdict]:
    links = parse_topology(machine.run("nvidia-smi", "topo", "-m"))
    pairs: dict[str, list[str]] = {}
    for gpus, kind in links.items():
        pairs.setdefault(kind, []).append("-".join(gpus))
    shown = {kind: f"{kind}: {join(names, 4)}" for kind, names in pairs.items()}
    far = [kind for kind in pairs if not _NEAR.fullmatch(kind)]
    if not links:
        yield unknown("nvidia-smi topo -m shows no matrix of GPUs")
    elif far:
        count = sum(len(pairs[kind]) for kind in far)
        kinds = "; ".join(shown[kind] for kind in far)
        found = f"{count} of {len(links)} pairs are linked across a host bridge or socket ({kinds})"
        yield warning(found, "Keep tensor-parallel ranks on GPUs connected by NVLink or one PCIe switch")
    elif len(pairs) > 1:
        found = f"links differ between pairs of GPUs ({'; '.join(shown.values())})"
        yield warning(found, "Place tensor-parallel ranks on the pairs with the most links")
    else:
        yield ok(f"each of {len(links)} {'pairs' if len(links) > 1 else 'pair'}: {next(iter(pairs))}")


@checked("NVLink")
def _check_nvlink(request: Request, machine: Machine) -> Iterator[Verdict]:
    speeds = parse_nvlink(machine.run("nvidia-smi", "nvlink", "-s"))
    total = sum(map(len, speeds.values()))
    down = [f"{gpu} link {number}" for gpu, links in speeds.items() for number, speed in enumerate(links) if speed is None]
    rates = {gpu: sum(speed or 0.0 for speed in links) for gpu, links in speeds.items()}
    if not total:
        yield ok("these GPUs have none")
    elif down:
        found = f"{len(down)} of {total} links are inactive ({join(down, 4)})"
        yield warning(found, "Have the machine checked (`nvidia-smi nvlink -e`): collectives wait for the slowest link")
    elif max(rates.values()) > 1.01 * min(rates.values()):
        slowest = min(rates, key=lambda gpu: rates[gpu])
        found = f"{slowest} has {rates[slowest]:.0f} GB/s, others up to {max(rates.values()):.0f} GB/s"
        yield warning(found, "Have the machine checked: collectives wait for the slowest GPU")
    else:
        yield ok(f"all {total} links active, {next(iter(rates.values())):.0f} GB/s per GPU and direction")


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """The link of each pair of GPUs, from `nvidia-smi topo -m`: `{("GPU0", "GPU1"): "NV18"}`."""
    lines = [[cell.strip() for cell in line.split("\t")] for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    header = next((line for line in lines if _GPU.fullmatch((line[1:] or [""])[0])), [])
    links: dict[tuple[str, str], str] = {}
    for first, *cells in lines:
        for second, link in zip(header[1:], cells, strict=False):
            both_gpus = _GPU.fullmatch(first) and _GPU.fullmatch(second)
            if both_gpus and link != "X" and (second, first) not in links:
                links[first, second] = link
    return links


def parse_nvlink(text: str) -> dict[str, list[float | None]]:
    """The speed of each GPU's links in GB/s and direction, None for one that is down, from `nvidia-smi nvlink -s`."""
    speeds: dict[str, list[float | None]] = {}
    for gpu, link in re.findall(r"^GPU (\d+):|^\s*Link \d+: (<inactive>|[\d.]+ GB/s)", text, re.MULTILINE):
        if gpu:
            speeds[f"GPU{gpu}"] = []
        elif speeds:
            speeds[next(reversed(speeds))].append(None if link == "<inactive>" else float(link.split()[0]))
    return speeds
