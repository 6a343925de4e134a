"""What a wrapped model says of itself: DistributedDataParallel, FullyShardedDataParallel, fully_shard.

Reads the model and changes nothing. What a torch release does not tell is left out of the description.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bridge_profiling.integrations.callback_hook import world_size
from bridge_profiling.integrations.parallel_layout import FoundLayout, layout_of_groups, layout_of_mesh
from bridge_profiling.layout import ParallelLayout


def describe(model: torch.nn.Module) -> tuple[FoundLayout, dict[str, object]]:
    """The layout a model is trained in, and how.

    Args:
        model: wrapped, or holding the wrapped one.

    Returns:
        The layout, and the description: `name` (`ddp`, `fsdp`, `fully_shard` or `torch`), `parameters`, the wrapper's settings.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return _ddp(module)
        if _is_fully_sharded(module):
            return _fully_shard(model)
        if _is_fsdp(module):
            return _fsdp(model, module)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _not_wrapped(model), {"name": "torch", "parameters": parameters}


def bucket_bytes(model: torch.nn.Module) -> list[int]:
    """Sizes of the buckets in which DDP reduces gradients, as rebuilt after the first iteration; empty without DDP."""
    ddp = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
    if ddp is None:
        return []
    told = ddp._get_ddp_logging_data()
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return [int(size) for size in str(sizes).split(",") if size.strip().isdigit()]


def wrapped_units(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Units of FullyShardedDataParallel with parameters of their own: the module's name, and its handle."""
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None) if _is_fsdp(module) else None
        if handle is not None:
            yield name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "").strip("."), handle


def _not_wrapped(model: torch.nn.Module) -> FoundLayout:
    """Tensor parallelism alone wraps nothing: its parameters are what knows of a mesh."""
    sharded: list[Any] = [
        one for one in model.parameters() if any(placement.is_shard() for placement in getattr(one, "placements", ()))
    ]
    mesh = sharded[0].device_mesh if sharded else None
    if mesh is None:
        return FoundLayout(ParallelLayout(world_size=world_size()))
    if mesh.mesh_dim_names is None and mesh.ndim == 1 and mesh.size() == world_size():
        return FoundLayout(ParallelLayout(world_size=world_size(), tp=world_size()), mesh={"tp": world_size()})
    return layout_of_mesh(mesh, world_size())


def _ddp(ddp: DistributedDataParallel) -> tuple[FoundLayout, dict[str, object]]:
    mesh = getattr(ddp, "device_mesh", None)
    found = (
        layout_of_mesh(mesh, world_size(), data_parallel=mesh.mesh_dim_names or ())
        if mesh is not None
        else layout_of_groups([ddp.process_group], world_size())
    )
    precision = getattr(ddp, "mixed_precision", None)
    return found, {
        "name": "ddp",
        "parameters": sum(parameter.numel() for parameter in ddp.parameters()),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "mixed_precision": _fields(precision, ("param_dtype", "reduce_dtype", "buffer_dtype")),
        "wrapped_units": 1,
    }


def _fsdp(model: torch.nn.Module, first: Any) -> tuple[FoundLayout, dict[str, object]]:
    mesh = getattr(first, "_device_mesh", None)
    groups = [group for group in (first.process_group, getattr(first, "_inter_node_pg", None)) if group is not None]
    found = (
        layout_of_mesh(mesh, world_size(), data_parallel=mesh.mesh_dim_names or ())
        if mesh is not None
        else layout_of_groups(groups, world_size())
    )
    # The flat parameter knows how many it has, whatever shard is held.
    units = [
        {"name": name, "parameters": handle.flat_param._unpadded_unsharded_size.numel()}
        for name, handle in wrapped_units(model)
    ]
    prefetch = getattr(first, "backward_prefetch", None)
    offload = getattr(first, "cpu_offload", None)
    return found, {
        "name": "fsdp",
        "parameters": sum(unit["parameters"] for unit in units),
        "sharding_strategy": first.sharding_strategy.name,
        "wrapped_units": len(units),
        "units": units,
        "mixed_precision": _fields(
            getattr(first, "mixed_precision", None), ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads")
        ),
        "backward_prefetch": prefetch.name if prefetch is not None else None,
        "limit_all_gathers": getattr(first, "limit_all_gathers", None),
        "cpu_offload": bool(getattr(offload, "offload_params", False)),
        "use_orig_params": getattr(first, "_use_orig_params", None),
    }


def _fully_shard(model: torch.nn.Module) -> tuple[FoundLayout, dict[str, object]]:
    units: list[dict[str, Any]] = []
    meshes, policy, sharded_again, offload = [], None, [], None
    for name, module in model.named_modules():
        for group in _param_groups(module) if _is_fully_sharded(module) else ():
            units.append({"name": name, "parameters": sum(one.sharded_param.numel() for one in group.fsdp_params)})
            meshes.append(group.mesh_info.mesh)
            sharded_again.append(group.post_forward_mesh_info is not None)
            policy, offload = policy or _precision(group), offload or type(group.offload_policy).__name__
    found = (
        layout_of_mesh(meshes[0], world_size(), data_parallel=meshes[0].mesh_dim_names or ())
        if meshes
        else FoundLayout(ParallelLayout(world_size=world_size()))
    )
    return found, {
        "name": "fully_shard",
        "parameters": sum(unit["parameters"] for unit in units),
        "sharded_over": dict(zip(_names(meshes[0]), meshes[0].mesh.shape, strict=True)) if meshes else None,
        "wrapped_units": len(units),
        "units": units,
        "mixed_precision": _fields(policy, ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")),
        "reshard_after_forward": {"units": sum(sharded_again), "of": len(units)},
        "offload_policy": offload,
    }


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    # Until torch 2.9 a module has at most one.
    return list(groups) if groups is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def _precision(group: Any) -> Any:
    """Since torch 2.15 each parameter of a group may have a policy of its own: then the first one's."""
    return group.mp_policy if hasattr(group, "mp_policy") else group.fsdp_params[0].mp_policy


def _names(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.mesh.ndim))


def _is_fully_sharded(module: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _is_fsdp(module: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)


def _fields(settings: Any, names: tuple[str, ...]) -> dict[str, object] | None:
    """Settings that are set, as JSON can hold them."""
    values = {name: getattr(settings, name, None) for name in names}
    told: dict[str, object] = {
        name: value if isinstance(value, bool | int | str) else str(value)
        for name, value in values.items()
        if value is not None
    }
    return told or None
