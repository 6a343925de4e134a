"""Where the supported releases of megatron-core differ, or need care. Importing this module loads no megatron-core."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bridge_profiling.common.megatron_versions import series_of

if TYPE_CHECKING:
    import torch

#: A part of nvidia-resiliency-ext, for asynchronous checkpoints, which this loop does not write.
_ASYNC_CHECKPOINTS = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


def hide_old_async_checkpoints() -> None:
    """Make megatron-core importable next to an old nvidia-resiliency-ext. Call it before the first import of megatron-core.

    megatron-core asserts, when it is imported, that the package is at least 0.6 if it has asynchronous checkpoints.
    0.4.1, the newest release that installs on Debian 12, is older; its fault tolerance works.
    """
    try:
        version = importlib.metadata.version("nvidia-resiliency-ext")
    except importlib.metadata.PackageNotFoundError:
        return
    series = series_of(version)
    if series is not None and series < (0, 6):
        # None makes an import fail as if the module were missing; a module that is already imported stays.
        sys.modules.setdefault(_ASYNC_CHECKPOINTS, None)  # type: ignore[arg-type]


def context_parallel_share(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This context-parallel rank's share of a microbatch.

    Args:
        batch: tensors of shape (sequences, tokens); an attention mask of shape (sequences, 1, tokens, tokens).

    Returns:
        The batch itself if context parallelism is off.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    # Without a group, all ranks share a batch: each data-parallel rank would train on a part of its sequences.
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


#: Settings that 0.19 compares, besides a group's structure, to find an optimizer's parameter group in a checkpoint.
_CONFIGURED = ("max_lr", "min_lr", "start_wd", "end_wd")


def find_groups_by_structure(groups: list[dict[str, Any]], saved: object) -> None:
    """Let a training resume with another learning rate or weight decay than that of its checkpoint.

    Up to 0.18 megatron-core finds a parameter group in a checkpoint by its structure (experts, decoupled learning rate,
    multipliers); since 0.19 its learning rates and weight decays must be equal too. Here they are the configuration's.

    Args:
        groups: the optimizer's groups; the compared settings are removed, and the caller restores them after loading.
        saved: an optimizer's state as loaded from a checkpoint; its groups lose them too.
    """
    for group in [*groups, *_param_groups(saved)]:
        for name in _CONFIGURED:
            group.pop(name, None)


def _param_groups(state: object) -> Iterator[dict[str, Any]]:
    """Every parameter group in a nested optimizer state."""
    if not isinstance(state, dict):
        return
    for name, value in state.items():
        if name == "param_groups":
            yield from value
        else:
            yield from _param_groups(value)
