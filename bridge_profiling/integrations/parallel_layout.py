"""Where each rank stands, as torch's own parallelism says it: from a device mesh, or from the group that shares gradients.

A mesh may have any dimensions under any names; `ParallelLayout` has megatron-core's. What it cannot say is said
in a note, and the layout is then flat: every rank a data-parallel one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.layout import ParallelLayout

#: Names of mesh dimensions in use: torch's tutorials', torchtitan's, Accelerate's, Lightning's.
_MEANINGS = {
    "dp": ("dp", "data", "ddp", "fsdp", "hsdp", "shard", "replicate", "dp_replicate", "dp_shard", "data_parallel", "world"),
    "tp": ("tp", "tensor", "tensor_parallel", "model"),
    "cp": ("cp", "context", "context_parallel", "sp", "sequence", "ulysses"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
}


@dataclass
class FoundLayout:
    """A layout, and what could not be told in it.

    Args:
        layout: where each rank stands.
        notes: for people.
        mesh: names and sizes of the mesh's dimensions, the slowest first; empty without one.
    """

    layout: ParallelLayout
    notes: list[str] = field(default_factory=list)
    mesh: dict[str, int] = field(default_factory=dict)


def layout_of_mesh(mesh: Any, world_size: int, *, data_parallel: Collection[str] = ()) -> FoundLayout:
    """The layout of a torch DeviceMesh, or of the one that it is a part of.

    Args:
        mesh: the DeviceMesh.
        world_size: number of ranks of the job.
        data_parallel: dimensions known to be data-parallel, whatever they are called.
    """
    root = _root(mesh)
    sizes = tuple(root.mesh.shape)
    names = root.mesh_dim_names or _names_without_any(len(sizes))
    found = FoundLayout(ParallelLayout(world_size=world_size), mesh=dict(zip(names, sizes, strict=True)))
    if not torch.equal(root.mesh.flatten().cpu(), torch.arange(world_size)):
        found.notes.append(
            f"the mesh {found.mesh} does not hold ranks 0 to {world_size - 1} in order; its coordinates are not told"
        )
        return found
    kinds = [_meaning(name, data_parallel) for name in names]
    unknown = [name for name, kind, size in zip(names, kinds, sizes, strict=True) if kind is None and size > 1]
    if unknown:
        found.notes.append(f"what the mesh's dimension {unknown[0]!r} is for cannot be told from its name; pass layout=")
        return found
    order, product = _order(kinds, sizes)
    if len(set(order)) < len(order):
        found.notes.append(f"the mesh {found.mesh} has dimensions of one kind that are not neighbours; pass layout=")
        return found
    found.layout = ParallelLayout(
        world_size=world_size, **{kind: product[kind] for kind in ("tp", "pp", "cp") if kind in product}, order="-".join(order)
    )
    return found


def layout_of_groups(groups: Sequence[Any], world_size: int) -> FoundLayout:
    """The layout of a training that has no mesh: data-parallel, if these process groups hold every rank between them.

    Args:
        groups: of one rank, those among which gradients are reduced (two of a hybrid sharding).
        world_size: number of ranks of the job.
    """
    found = FoundLayout(ParallelLayout(world_size=world_size))
    size = math.prod(dist.get_world_size(group) for group in groups)
    if size != world_size:
        found.notes.append(
            f"gradients are reduced among {size} of {world_size} ranks; what the others are for cannot be told: pass layout="
        )
    return found


def layout_of_sizes(world_size: int, sizes: Mapping[str, int], order: str) -> FoundLayout:
    """The layout of sizes that a framework tells.

    Args:
        world_size: number of ranks of the job.
        sizes: of tp, pp, cp and ep; the rest is dp.
        order: the dimension that varies fastest from rank to rank first.
    """
    try:
        return FoundLayout(ParallelLayout(world_size=world_size, order=order, **sizes))
    except ProfilingConfigError as error:
        return FoundLayout(ParallelLayout(world_size=world_size), [f"{error}; pass layout="])


def _order(kinds: Sequence[str | None], sizes: Sequence[int]) -> tuple[list[str], dict[str, int]]:
    """Kinds of dimensions, the fastest first, neighbours of one kind as one; and how large each is."""
    order: list[str] = []
    product: dict[str, int] = {}
    for kind, size in reversed(list(zip(kinds, sizes, strict=True))):
        if kind is None or size == 1:
            continue
        if not order or order[-1] != kind:
            order.append(kind)
        product[kind] = product.get(kind, 1) * size
    return order or ["dp"], product


def _meaning(name: str, data_parallel: Collection[str]) -> str | None:
    if name in data_parallel:
        return "dp"
    return next((kind for kind, names in _MEANINGS.items() if name.lower() in names), None)


def _names_without_any(count: int) -> tuple[str, ...]:
    """What fully_shard makes of a mesh without names: of one dimension shards, of two the first replicates."""
    return ("dp",) if count == 1 else ("dp_replicate", "dp_shard") if count == 2 else tuple(f"dim{i}" for i in range(count))


def _root(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    # Until torch 2.8.
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)
