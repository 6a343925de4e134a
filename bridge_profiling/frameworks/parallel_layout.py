"""The parallel layout of a torch training, and the settings of its wrapper: DistributedDataParallel, FSDP, fully_shard.

A mesh has any dimensions under any names; `ParallelLayout` has megatron-core's. A mesh that these can't express gets a note and
a flat layout: every rank is data-parallel. Reads models and changes nothing; settings that a torch release does not expose are
left out.
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
    if not torch.equal(root.mesh.flatten().cpu(), torch.arange(world)):
        found.notes.append(f"the mesh {found.mesh} does not hold ranks 0 to {world - 1} in order; its coordinates are unknown")
        return found
    kinds = ["dp" if name in data_parallel else _MEANINGS.get(name.lower()) for name in names]
    unknown = [name for name, kind, size in zip(names, kinds, sizes, strict=True) if kind is None and size > 1]
    if unknown:
        found.notes.append(f"the purpose of the mesh's dimension {unknown[0]!r} is unknown from its name; pass layout=")
        return found
    used = [(kind, size) for kind, size in zip(kinds, sizes, strict=True) if kind is not None and size > 1]
    # The fastest first, with neighbours of one kind merged.
    merged = [(kind, math.prod(size for _, size in of_kind)) for kind, of_kind in groupby(reversed(used), itemgetter(0))]
    order = [kind for kind, _ in merged] or ["dp"]
    if len(set(order)) < len(order):
        found.notes.append(f"the mesh {found.mesh} has dimensions of one kind that are not neighbours; pass layout=")
        return found
    split = {kind: size for kind, size in merged if kind != "dp"}
    found.layout = ParallelLayout(world_size=world, order="-".join(order), **split)
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
    """The layout and the settings of a model's training: `name`, `parameters`, and those of the wrapper."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return _ddp(module)
        if _is_a(module, "FSDPModule"):
            return _fully_shard(model)
        if _is_a(module, "FullyShardedDataParallel"):
            return _fsdp(model, module)
    return _not_wrapped(model), {"name": "torch", **size_of(model.parameters())}


def size_of_model(model: torch.nn.Module) -> dict[str, object]:
    """`parameters` and `trainable_parameters` of a model, whichever wrapper has sharded it."""
    _, facts = describe(model)
    return {name: facts[name] for name in ("parameters", "trainable_parameters") if name in facts}


def size_of(parameters: Iterable[Any]) -> dict[str, object]:
    """`parameters` and `trainable_parameters`: elements, of the whole tensor where DTensor or DeepSpeed's ZeRO shards it."""
    sizes = [(getattr(one, "ds_numel", None) or one.numel(), one.requires_grad) for one in parameters]
    return {
        "parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, trained in sizes if trained),
    }


def bucket_bytes(model: torch.nn.Module) -> list[int]:
    """Sizes of the gradient buckets of a model with DDP, as rebuilt after the first iteration."""
    ddp = next(module for module in model.modules() if isinstance(module, DistributedDataParallel))
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return [int(size) for size in str(sizes).split(",") if size.strip().isdigit()]


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


def _ddp(ddp: DistributedDataParallel) -> tuple[FoundLayout, dict[str, object]]:
    return _layout(getattr(ddp, "device_mesh", None), [ddp.process_group]), {
        "name": "ddp",
        **size_of(ddp.parameters()),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        **{name: getattr(ddp, name) for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")},
        "mixed_precision": _fields(getattr(ddp, "mixed_precision", None), "param_dtype", "reduce_dtype", "buffer_dtype"),
        "wrapped_units": 1,
    }


def _fsdp(model: torch.nn.Module, first: Any) -> tuple[FoundLayout, dict[str, object]]:
    groups = [group for group in (first.process_group, getattr(first, "_inter_node_pg", None)) if group is not None]
    # The flat parameter's full size, independent of the shard that this rank holds.
    units = [
        (name, handle.flat_param._unpadded_unsharded_size.numel(), _trainable(handle.flat_param))
        for name, handle in wrapped_units(model)
    ]
    precision, prefetch = getattr(first, "mixed_precision", None), getattr(first, "backward_prefetch", None)
    return _layout(getattr(first, "_device_mesh", None), groups), {
        "name": "fsdp",
        **_units(units),
        "sharding_strategy": first.sharding_strategy.name,
        "mixed_precision": _fields(precision, "param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads"),
        "backward_prefetch": prefetch.name if prefetch is not None else None,
        "limit_all_gathers": getattr(first, "limit_all_gathers", None),
        "cpu_offload": bool(getattr(getattr(first, "cpu_offload", None), "offload_params", False)),
        "use_orig_params": getattr(first, "_use_orig_params", None),
    }


def _fully_shard(model: torch.nn.Module) -> tuple[FoundLayout, dict[str, object]]:
    sharded = [(name, module) for name, module in model.named_modules() if _is_a(module, "FSDPModule")]
    groups = [(name, group) for name, module in sharded for group in _param_groups(module)]
    sizes = [(name, size_of(one.sharded_param for one in group.fsdp_params)) for name, group in groups]
    units = [(name, size["parameters"], size["trainable_parameters"]) for name, size in sizes]
    first = groups[0][1] if groups else None
    mesh = first.mesh_info.mesh if first is not None else None
    names = (mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.mesh.ndim))) if mesh is not None else ()
    precision = next(filter(None, (_precision(group) for _, group in groups)), None)
    return _layout(mesh, []), {
        "name": "fully_shard",
        **_units(units),
        "sharded_over": dict(zip(names, mesh.mesh.shape, strict=True)) if mesh is not None else None,
        "mixed_precision": _fields(precision, "param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
        "reshard_after_forward": {
            "units": sum(group.post_forward_mesh_info is not None for _, group in groups),
            "of": len(units),
        },
        "offload_policy": type(first.offload_policy).__name__ if first is not None else None,
    }


def _trainable(flat: Any) -> int:
    """How many of a flat parameter's elements are trained: with `use_orig_params`, some parameters in it can be frozen."""
    originals = getattr(flat, "_params", None)
    if not originals:
        return int(flat._unpadded_unsharded_size.numel()) if flat.requires_grad else 0
    return sum(size for size, one in zip(flat._numels, originals, strict=False) if one.requires_grad)


def _units(sizes: Sequence[tuple[str, Any, Any]]) -> dict[str, object]:
    """Facts about units from their names and numbers of parameters, all and trainable."""
    units = [{"name": name, "parameters": size} for name, size, _ in sizes]
    return {
        "parameters": sum(size for _, size, _ in sizes),
        "trainable_parameters": sum(trained for *_, trained in sizes),
        "wrapped_units": len(units),
        "units": units,
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


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    # Until torch 2.9 a module has at most one.
    return list(groups) if groups is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def _precision(group: Any) -> Any:
    """The group's policy; since torch 2.15 each parameter may have its own: then the first parameter's."""
    return group.mp_policy if hasattr(group, "mp_policy") else group.fsdp_params[0].mp_policy


def _is_a(module: torch.nn.Module, wrapper: str) -> bool:
    # A wrapper exists only if its package is imported, which takes a moment.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, wrapper))


def _fields(settings: Any, *names: str) -> dict[str, object] | None:
    """Settings that are set, in types that JSON has."""
    values = {name: getattr(settings, name, None) for name in names}
    plain = {name: value if isinstance(value, bool | int | str) else str(value) for name, value in values.items()}
    return {name: plain[name] for name in names if values[name] is not None} or None
