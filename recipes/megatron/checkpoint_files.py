"""Names and files of checkpoints, and which one to resume from.

    <save>/iter_0000010/                        the state after 10 iterations; `training.json` describes the training
    <save>/latest_checkpointed_iteration.txt    10

A checkpoint is written into a hidden folder, which is renamed when every rank is done; then the pointer is replaced
atomically. So whenever the job is killed, a folder named `iter_…` is complete, and the pointer names one that exists.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from bridge_profiling.common.atomic import write_atomically, write_json
from bridge_profiling.common.errors import ProfilingConfigError, require

#: Holds the number of iterations of the newest complete checkpoint, as Megatron's own tools expect it.
POINTER = "latest_checkpointed_iteration.txt"

#: The settings that a training must share with the one that wrote the checkpoint.
DESCRIPTION = "training.json"


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    """The folder of the checkpoint made when `iteration` iterations were complete."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """The number of iterations in the newest checkpoint under `root`, or None if it holds none yet.

    Raises:
        ProfilingConfigError: the pointer is invalid, or names a checkpoint that does not exist.
    """
    pointer = Path(root) / POINTER
    try:
        text = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProfilingConfigError(
            f"{pointer} cannot be read", why=str(error), instead="Name a directory of checkpoints"
        ) from None
    found = sorted(folder.parent.name for folder in pointer.parent.glob(f"iter_*/{DESCRIPTION}"))
    fix = (
        f"Write the number of one of these into it: {', '.join(found)}" if found else f"Remove {pointer} to start from scratch"
    )
    require(
        text.isdecimal(),
        f"{pointer} holds {text[:40]!r}",
        why="it must be the number of iterations that the newest checkpoint holds",
        instead=fix,
    )
    folder = checkpoint_folder(root, int(text))
    require(
        (folder / DESCRIPTION).is_file(),
        f"{pointer} names iteration {text}, and {folder} is not a checkpoint of this loop",
        why=f"{DESCRIPTION} is not in it",
        instead=fix,
    )
    return int(text)


def read_description(folder: Path) -> dict[str, object]:
    """The description of the training that wrote the checkpoint.

    Raises:
        ProfilingConfigError: the file cannot be read.
    """
    try:
        return json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken(folder, error) from None


def broken(folder: Path, error: BaseException) -> ProfilingConfigError:
    """The error for a checkpoint that cannot be read back."""
    # The last line says what happened; the lines before it are a traceback in torch.
    reason = str(error).strip().rpartition("\n")[2][:400]
    return ProfilingConfigError(
        f"the checkpoint {folder} cannot be loaded",
        why=f"{type(error).__name__}: {reason}",
        instead=f"Write the number of an older checkpoint into {folder.parent / POINTER}, or name another checkpoint.load",
    )


def unfinished(root: str | Path, iteration: int) -> Path:
    """The hidden folder into which the checkpoint of `iteration` is written."""
    folder = checkpoint_folder(root, iteration)
    return folder.with_name(f".{folder.name}.incomplete")


def prepare(root: str | Path, iteration: int) -> None:
    """Make the hidden folder, empty, for a checkpoint to be written into."""
    folder = unfinished(root, iteration)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def publish(root: str | Path, iteration: int, description: dict[str, object]) -> Path:
    """Rename the checkpoint that `prepare` began and point to it, once all ranks have written.

    A checkpoint of the same iteration is replaced.

    Returns:
        The final folder.
    """
    written, folder = unfinished(root, iteration), checkpoint_folder(root, iteration)
    write_json(written / DESCRIPTION, description)
    _remove(folder)
    written.rename(folder)

    def write_pointer(path: Path) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(iteration))
            file.flush()
            os.fsync(file.fileno())

    write_atomically(Path(root) / POINTER, write_pointer)
    return folder


def _remove(folder: Path) -> None:
    """Delete a checkpoint; an interrupted deletion leaves nothing under its name."""
    if not folder.exists():
        return
    hidden = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
