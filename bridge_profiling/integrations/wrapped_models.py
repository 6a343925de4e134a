"""Settings and layout of a wrapped model: DistributedDataParallel, FullyShardedDataParallel, fully_shard.

Reads the model and changes nothing. The description leaves out settings that a torch release does not expose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bridge_profiling.integrations.driver import world_size
from bridge_profiling.integrations.parallel_layout import FoundLayout, layout_of_groups, layout_of_mesh
from bridge_profiling.layout import ParallelLayout


def describe(model: torch.nn.Module) -> tuple[FoundLayout, dict[str, object]]:
    """The layout and the settings of a model's training.

    Args:
        model: the wrapped model, or a model that contains it.

    Returns:
        The layout, and the description: `name` (`ddp`, `fsdp`, `fully_shard` or `torch`), `parameters`, the wrapper's settings.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return _ddp(module)
        if _is_a(module, "FSDPModule"):
            return _fully_shard(model)
        if _is_a(module, "FullyShardedDataParallel"):
            return _fsdp(model, module)
    return _not_wrapped(model), {"name": "torch", "parameters": _parameters(model)}


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
        "parameters": _parameters(ddp),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        **{name: getattr(ddp, name) for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")},
        "mixed_precision": _fields(getattr(ddp, "mixed_precision", None), "param_dtype", "reduce_dtype", "buffer_dtype"),
        "wrapped_units": 1,
    }


def _fsdp(model: torch.nn.Module, first: Any) -> tuple[FoundLayout, dict[str, object]]:
    groups = [group for group in (first.process_group, getattr(first, "_inter_node_pg", None)) if group is not None]
    # The flat parameter's full size, independent of the shard that this rank holds.
    units = [
        {"name": name, "parameters": handle.flat_param._unpadded_unsharded_size.numel()}
        for name, handle in wrapped_units(model)
    ]
    precision, prefetch = getattr(first, "mixed_precision", None), getattr(first, "backward_prefetch", None)
    return _layout(getattr(first, "_device_mesh", None), groups), {
        "name": "fsdp",
        "parameters": sum(unit["parameters"] for unit in units),
        "sharding_strategy": first.sharding_strategy.name,
        "wrapped_units": len(units),
        "units": units,
        "mixed_precision": _fields(precision, "param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads"),
        "backward_prefetch": prefetch.name if prefetch is not None else None,
        "limit_all_gathers": getattr(first, "limit_all_gathers", None),
        "cpu_offload": bool(getattr(getattr(first, "cpu_offload", None), "offload_params", False)),
        "use_orig_params": getattr(first, "_use_orig_params", None),
    }


def _fully_shard(model: torch.nn.Module) -> tuple[FoundLayout, dict[str, object]]:
    sharded = [(name, module) for name, module in model.named_modules() if _is_a(module, "FSDPModule")]
    groups = [(name, group) for name, module in sharded for group in _param_groups(module)]
    units = [
        {"name": name, "parameters": sum(one.sharded_param.numel() for one in group.fsdp_params)} for name, group in groups
    ]
    first = groups[0][1] if groups else None
    mesh = first.mesh_info.mesh if first is not None else None
    names = (mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.mesh.ndim))) if mesh is not None else ()
    precision = next(filter(None, (_precision(group) for _, group in groups)), None)
    return _layout(mesh, []), {
        "name": "fully_shard",
        "parameters": sum(unit["parameters"] for unit in units),
        "sharded_over": dict(zip(names, mesh.mesh.shape, strict=True)) if mesh is not None else None,
        "wrapped_units": len(units),
        "units": units,
        "mixed_precision": _fields(precision, "param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
        "reshard_after_forward": {
            "units": sum(group.post_forward_mesh_info is not None for _, group in groups),
            "of": len(units),
        },
        "offload_policy": type(first.offload_policy).__name__ if first is not None else None,
    }


def _layout(mesh: Any, groups: Sequence[Any]) -> FoundLayout:
    """The layout of the mesh that gradients are reduced over; without a mesh, of these groups, if any."""
    if mesh is not None:
        return layout_of_mesh(mesh, data_parallel=mesh.mesh_dim_names or ())
    return layout_of_groups(groups) if groups else FoundLayout()


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    # Until torch 2.9 a module has at most one.
    return list(groups) if groups is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def _precision(group: Any) -> Any:
    """The group's policy; since torch 2.15 each parameter may have its own: then the first parameter's."""
    return group.mp_policy if hasattr(group, "mp_policy") else group.fsdp_params[0].mp_policy


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _is_a(module: torch.nn.Module, wrapper: str) -> bool:
    # A wrapper exists only if its package is imported, which takes a moment.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, wrapper))


def _fields(settings: Any, *names: str) -> dict[str, object] | None:
    """Settings that are set, in types that JSON has."""
    values = {name: getattr(settings, name, None) for name in names}
    plain = {name: value if isinstance(value, bool | int | str) else str(value) for name, value in values.items()}
    return {name: plain[name] for name in names if values[name] is not None} or None
