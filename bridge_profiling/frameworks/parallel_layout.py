"""The parallel layout of a torch training, and the size of its model: DistributedDataParallel, FSDP, fully_shard.

A mesh has any dimensions under any names; `ParallelLayout` has megatron-core's. A mesh that these can't express gets a note and
a flat layout: every rank is data-parallel. Reads models and changes nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.frameworks.session import world_size
from bridge_profiling.layout import ParallelLayout

#: Names of mesh dimensions in use: torch's tutorials', torchtitan's, Accelerate's, Lightning's.
_DATA = ("dp", "data", "ddp", "fsdp", "hsdp", "shard", "replicate", "dp_replicate", "dp_shard", "data_parallel", "world")
_MEANINGS = {
    **dict.fromkeys(_DATA, "dp"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model"), "tp"),
    **dict.fromkeys(("cp", "context", "context_parallel", "sp", "sequence", "ulysses"), "cp"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "pipeline_parallel", "stage"), "pp"),
}


@dataclass
class FoundLayout:
    """A layout (flat by default), notes on what is unknown, and the mesh's dimensions, the slowest first."""

    layout: ParallelLayout = field(default_factory=lambda: ParallelLayout(world_size=world_size()))
    notes: list[str] = field(default_factory=list)
    mesh: dict[str, int] = field(default_factory=dict)


def layout_of_mesh(mesh: Any, *, data_parallel: Collection[str] = ()) -> FoundLayout:
    """The layout of a torch DeviceMesh or its root mesh; `data_parallel` names dimensions known to be data-parallel."""
    root, world = _root(mesh), world_size()
    sizes = tuple(root.mesh.shape)
    # Without names, by fully_shard's use: one dimension shards; of two, the first replicates.
    unnamed = {1: ("dp",), 2: ("dp_replicate", "dp_shard")}
    names = root.mesh_dim_names or unnamed.get(len(sizes)) or tuple(f"dim{i}" for i in range(len(sizes)))
    found = FoundLayout(mesh=dict(zip(names, sizes, strict=True)))
    kinds = {name: "dp" if name in data_parallel else _MEANINGS.get(name.lower()) for name in names}
    used = [(kinds[name], size) for name, size in found.mesh.items() if size > 1]
    # The fastest first, with neighbours of one kind merged.
    merged = [(kind, math.prod(size for _, size in of_kind)) for kind, of_kind in groupby(reversed(used), itemgetter(0))]
    split = dict(merged)
    if not torch.equal(root.mesh.flatten().cpu(), torch.arange(world)):
        found.notes.append(f"the mesh {found.mesh} does not hold ranks 0 to {world - 1} in order; its coordinates are unknown")
    elif None in split:
        unknown = next(name for name, size in found.mesh.items() if kinds[name] is None and size > 1)
        found.notes.append(f"the purpose of the mesh's dimension {unknown!r} is unknown from its name; pass layout=")
    elif len(split) < len(merged):
        found.notes.append(f"the mesh {found.mesh} has dimensions of one kind that are not neighbours; pass layout=")
    else:
        order = "-".join(map(str, split)) or "dp"
        split.pop("dp", None)
        found.layout = ParallelLayout(world_size=world, order=order, **{str(kind): size for kind, size in split.items()})
    return found


def layout_of_sizes(sizes: Mapping[str, int], order: str) -> FoundLayout:
    """The layout with these sizes of tp, pp, cp and ep, and the rest dp; `order` has the fastest-varying dimension first."""
    try:
        return FoundLayout(ParallelLayout(world_size=world_size(), order=order, **sizes))
    except ProfilingConfigError as error:
        return FoundLayout(notes=[f"{error}; pass layout="])


def _root(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    # Until torch 2.8.
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


# -- wrapped models ---------------------------------------------------------------------------------------------------


def describe(model: torch.nn.Module) -> tuple[FoundLayout, dict[str, object]]:
    """The layout of a model's training, and facts: the wrapper's `name`, `parameters`, and how it shards or buckets them."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            facts = {"name": "ddp", **size_of(module.parameters()), "bucket_cap_bytes": module.bucket_bytes_cap}
            return _layout(getattr(module, "device_mesh", None), [module.process_group]), facts
        if _is_a(module, "FSDPModule"):
            mesh = next((group.mesh_info.mesh for one in model.modules() for group in _param_groups(one)), None)
            over = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)) if mesh is not None else None
            return _layout(mesh, []), {"name": "fully_shard", **size_of(model.parameters()), "sharded_over": over}
        if _is_a(module, "FullyShardedDataParallel"):
            return _fsdp(model, module)
    return _not_wrapped(model), {"name": "torch", **size_of(model.parameters())}


def size_of_model(model: torch.nn.Module) -> dict[str, object]:
    """`parameters` and `trainable_parameters` of a model, whichever wrapper has sharded it."""
    _, facts = describe(model)
    return {name: facts[name] for name in ("parameters", "trainable_parameters")}


def size_of(parameters: Iterable[Any]) -> dict[str, object]:
    """`parameters` and `trainable_parameters`: elements, of the whole tensor where DTensor or DeepSpeed's ZeRO shards it."""
    sizes = [(getattr(one, "ds_numel", None) or one.numel(), one.requires_grad) for one in parameters]
    return _sizes((size, size * trained) for size, trained in sizes)


def wrapped_units(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Units of FullyShardedDataParallel with parameters of their own: the module's name, and its handle."""
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None) if _is_a(module, "FullyShardedDataParallel") else None
        if handle is not None:
            yield name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "").strip("."), handle


def _not_wrapped(model: torch.nn.Module) -> FoundLayout:
    """Tensor parallelism alone wraps nothing: only its parameters have a mesh."""
    sharded: list[Any] = [
        one for one in model.parameters() if any(placement.is_shard() for placement in getattr(one, "placements", ()))
    ]
    if not sharded:
        return FoundLayout()
    mesh, world = sharded[0].device_mesh, world_size()
    if mesh.mesh_dim_names is None and mesh.ndim == 1 and mesh.size() == world:
        return FoundLayout(ParallelLayout(world_size=world, tp=world), mesh={"tp": world})
    return layout_of_mesh(mesh)


def _fsdp(model: torch.nn.Module, first: Any) -> tuple[FoundLayout, dict[str, object]]:
    groups = [group for group in (first.process_group, getattr(first, "_inter_node_pg", None)) if group is not None]
    # The flat parameter's full size, independent of the shard that this rank holds.
    flats = [handle.flat_param for _, handle in wrapped_units(model)]
    sizes = _sizes((flat._unpadded_unsharded_size.numel(), _trainable(flat)) for flat in flats)
    facts = {"name": "fsdp", **sizes, "sharding_strategy": first.sharding_strategy.name}
    return _layout(getattr(first, "_device_mesh", None), groups), facts


def _trainable(flat: Any) -> int:
    """How many of a flat parameter's elements are trained: with `use_orig_params`, some parameters in it can be frozen."""
    originals = getattr(flat, "_params", None)
    if not originals:
        return int(flat._unpadded_unsharded_size.numel()) if flat.requires_grad else 0
    return sum(size for size, one in zip(flat._numels, originals, strict=False) if one.requires_grad)


def _sizes(all_and_trained: Iterable[tuple[int, int]]) -> dict[str, object]:
    sizes = list(all_and_trained)
    return {
        "parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(trained for _, trained in sizes),
    }


def _layout(mesh: Any, groups: Sequence[Any]) -> FoundLayout:
    """The layout of the mesh that gradients are reduced over; without a mesh, data-parallel if these groups hold every rank."""
    if mesh is not None:
        return layout_of_mesh(mesh, data_parallel=mesh.mesh_dim_names or ())
    found, world = FoundLayout(), world_size()
    # Hybrid sharding has two groups.
    size = math.prod(dist.get_world_size(group) for group in groups)
    if groups and size != world:
        found.notes.append(
            f"gradients are reduced among {size} of {world} ranks; the role of the others is unknown: pass layout="
        )
    return found


def _param_groups(module: torch.nn.Module) -> list[Any]:
    """The groups of parameters that fully_shard has made of a module."""
    if not _is_a(module, "FSDPModule"):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    # Until torch 2.9 a module has at most one.
    return list(groups) if groups is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def _is_a(module: torch.nn.Module, wrapper: str) -> bool:
    # A wrapper exists only if its package is imported, which takes a moment.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, wrapper))
