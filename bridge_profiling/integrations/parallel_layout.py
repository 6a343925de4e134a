"""The parallel layout of a torch training: from a device mesh, or from the process groups that share gradients.

A mesh has any dimensions under any names; `ParallelLayout` has megatron-core's. A mesh that these can't express gets a note and
a flat layout: every rank is data-parallel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.integrations.driver import world_size
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
    """A layout and its uncertainties.

    Args:
        layout: where each rank is; flat by default.
        notes: what is unknown, in sentences.
        mesh: names and sizes of the mesh's dimensions, the slowest first; empty without a mesh.
    """

    layout: ParallelLayout = field(default_factory=lambda: ParallelLayout(world_size=world_size()))
    notes: list[str] = field(default_factory=list)
    mesh: dict[str, int] = field(default_factory=dict)


def layout_of_mesh(mesh: Any, *, data_parallel: Collection[str] = ()) -> FoundLayout:
    """The layout of a torch DeviceMesh, or of its root mesh.

    Args:
        mesh: the DeviceMesh.
        data_parallel: names of dimensions known to be data-parallel.
    """
    root, world = _root(mesh), world_size()
    sizes = tuple(root.mesh.shape)
    names = root.mesh_dim_names or _default_names(len(sizes))
    found = FoundLayout(mesh=dict(zip(names, sizes, strict=True)))
    if not torch.equal(root.mesh.flatten().cpu(), torch.arange(world)):
        found.notes.append(f"the mesh {found.mesh} does not hold ranks 0 to {world - 1} in order; its coordinates are unknown")
        return found
    kinds = [_meaning(name, data_parallel) for name in names]
    unknown = [name for name, kind, size in zip(names, kinds, sizes, strict=True) if kind is None and size > 1]
    if unknown:
        found.notes.append(f"the purpose of the mesh's dimension {unknown[0]!r} is unknown from its name; pass layout=")
        return found
    order, product = _order(kinds, sizes)
    if len(set(order)) < len(order):
        found.notes.append(f"the mesh {found.mesh} has dimensions of one kind that are not neighbours; pass layout=")
        return found
    split = {kind: product[kind] for kind in ("tp", "pp", "cp") if kind in product}
    found.layout = ParallelLayout(world_size=world, order="-".join(order), **split)
    return found


def layout_of_groups(groups: Sequence[Any]) -> FoundLayout:
    """The layout without a mesh: data-parallel, if these process groups together hold every rank.

    Args:
        groups: the groups of one rank that reduce gradients (hybrid sharding has two).
    """
    found, world = FoundLayout(), world_size()
    size = math.prod(dist.get_world_size(group) for group in groups)
    if size != world:
        found.notes.append(
            f"gradients are reduced among {size} of {world} ranks; the role of the others is unknown: pass layout="
        )
    return found


def layout_of_sizes(sizes: Mapping[str, int], order: str) -> FoundLayout:
    """The layout with these parallel sizes.

    Args:
        sizes: of tp, pp, cp and ep; the rest is dp.
        order: the dimensions, the fastest-varying first.
    """
    try:
        return FoundLayout(ParallelLayout(world_size=world_size(), order=order, **sizes))
    except ProfilingConfigError as error:
        return FoundLayout(notes=[f"{error}; pass layout="])


def _order(kinds: Sequence[str | None], sizes: Sequence[int]) -> tuple[list[str], dict[str, int]]:
    """Kinds of dimensions, the fastest first with neighbours of one kind merged; and the size of each."""
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


def _default_names(count: int) -> tuple[str, ...]:
    """Names for a mesh without names, by fully_shard's use: one dimension shards; of two, the first replicates."""
    return ("dp",) if count == 1 else ("dp_replicate", "dp_shard") if count == 2 else tuple(f"dim{i}" for i in range(count))


def _root(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    # Until torch 2.8.
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)
