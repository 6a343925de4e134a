"""Where checkpoints lie, and how one becomes the one to resume from. Knows names and files; never what is in a tensor.

    <save>/iter_0000010/                        the state after 10 iterations; `training.json` says of which training
    <save>/latest_checkpointed_iteration.txt    10

A checkpoint is written into a hidden folder, which is renamed when every rank is done; the pointer follows, in one step as
well. So a folder named `iter_…` is whole, whenever the job was killed, and the pointer names one that exists.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from bridge_profiling.errors import ProfilingConfigError

#: Names the newest whole checkpoint by its number of completed iterations, as Megatron's own tools expect it.
POINTER = "latest_checkpointed_iteration.txt"

#: What a training must share with the one that wrote the checkpoint.
DESCRIPTION = "training.json"


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    """The folder of the checkpoint made when `iteration` iterations were complete."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """The number of iterations that the newest checkpoint under `root` holds, or None where there is none yet.

    Raises:
        ProfilingConfigError: the pointer says something else, or names a checkpoint that is not there.
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
    if not text.isdecimal():
        raise ProfilingConfigError(
            f"{pointer} holds {text[:40]!r}",
            why="it must be the number of iterations that the newest checkpoint holds",
            instead=_mend_pointer(pointer),
        )
    folder = checkpoint_folder(root, int(text))
    if not (folder / DESCRIPTION).is_file():
        raise ProfilingConfigError(
            f"{pointer} names iteration {text}, and there is no checkpoint of this loop at {folder}",
            why=f"{DESCRIPTION} is not in it",
            instead=_mend_pointer(pointer),
        )
    return int(text)


def _mend_pointer(pointer: Path) -> str:
    found = sorted(folder.parent.name for folder in pointer.parent.glob(f"iter_*/{DESCRIPTION}"))
    if not found:
        return f"Remove {pointer} to start from scratch"
    return f"Write the number of one of these into it: {', '.join(found)}"


def read_description(folder: Path) -> dict[str, object]:
    """What the checkpoint says of the training that wrote it.

    Raises:
        ProfilingConfigError: the file cannot be read.
    """
    try:
        return json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken(folder, error) from None


def broken(folder: Path, error: BaseException) -> ProfilingConfigError:
    """The error for a checkpoint that cannot be read back."""
    # The last line says what happened; those before it, where in torch.
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
    """Give the checkpoint that `prepare` began its final name, and point at it. To be called when all ranks have written.

    A checkpoint of the same iteration is replaced.

    Returns:
        The final folder.
    """
    written, folder = unfinished(root, iteration), checkpoint_folder(root, iteration)
    (written / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    _remove(folder)
    written.rename(folder)
    pointer = Path(root) / POINTER
    temporary = pointer.with_name(f".{POINTER}.incomplete")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(pointer)
    return folder


def keep_most_recent(root: str | Path, count: int) -> None:
    """Remove all checkpoints but the `count` written last; the pointer names the last of them."""
    written = sorted(Path(root).glob(f"iter_*/{DESCRIPTION}"), key=lambda file: file.stat().st_mtime_ns)
    for file in written[:-count]:
        _remove(file.parent)


def _remove(folder: Path) -> None:
    """Delete a checkpoint, so that an interrupted deletion leaves no half of it under its name."""
    if not folder.exists():
        return
    hidden = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
