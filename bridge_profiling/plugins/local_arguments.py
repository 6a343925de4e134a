"""Lets a task's arguments arrive as they were written under LocalExecutor.

LocalExecutor starts a process from a list of arguments, without a shell, but NeMo-Run prepares that list for one: its
torchrun and ft_launcher components pass every argument through `shlex.quote`, so the script receives
`'profiling.profile_ranks=[0,1]'` with the quotes in it, which Hydra rejects.

That is mended on the one executor object that a plugin is given, through a method NeMo-Run itself calls on it while
packaging; NeMo-Run's classes stay as they are. The experiment hands plugins the very object it submits with, so nothing is
lost there; a later `executor.clone()` goes back to NeMo-Run's behaviour, which `launch/pretrain.py` tolerates.
"""

from __future__ import annotations

import types
from typing import Any

import nemo_run as run
import torchx.components.dist as torchx_dist

from bridge_profiling.plugins.launchers import current_launcher, starts_every_rank


def keep_arguments_as_written(executor: Any) -> None:
    """Mend that for this executor; an executor that goes through a shell is left alone."""
    if not isinstance(executor, run.LocalExecutor):
        return
    executor.supports_launcher_transform = types.MethodType(_transforms, executor)


def _transforms(executor: run.LocalExecutor) -> bool:
    # Called while packaging, just before the launcher's transform(): whichever launcher it is by then gets ours.
    launcher = current_launcher(executor)
    if not starts_every_rank(launcher):
        return run.LocalExecutor.supports_launcher_transform(executor)
    launcher.transform = types.MethodType(_unquoted, launcher)
    return True


def _unquoted(launcher: object, command: list[str]) -> run.Script:
    """The same command as a Script whose arguments the components leave unquoted."""
    entrypoint, *rest = command
    module = rest[0] == "-m"
    # torchx' own mark for text not to be quoted. It is set only here, on the packaged command, because a task that holds
    # anything but plain strings cannot be serialized.
    path, *args = map(torchx_dist._noquote, rest[1:] if module else rest)
    return run.Script(path=path, entrypoint=entrypoint, m=module, args=args)
