"""The table of captures with planted causes: `cases.json`, read. Needs no torch, and no capture to exist."""

import contextlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import columns

FOLDER = Path(__file__).parent

#: Captures are unpacked once for each checkout: 20 s for all of them, 170 MB.
_UNPACKED = FOLDER.parents[1] / ".cache" / "captures"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run that was captured, as far as programs need to know it.

    Args:
        name: also the folder of its captures.
        configuration: name of what is trained, and on how many ranks; a case and its twin share it.
        profiler: `torch` or `nsys`.
        window: first iteration captured, and the first one not captured any more.
        twin: the clean case of the same configuration; None for a clean case.
        finding: id of the finding that the plant must lead to; None for a clean case.
        plant: its kind, and the numbers it takes; None for a clean case.
        overrides: settings over the configuration's.
        environment: variables of every rank.
        planted_ranks: ranks that do what was planted.
        captured_ranks: ranks that are captured; None for all.
        losses: whether the loss of each iteration is kept beside the capture.
    """

    name: str
    configuration: str
    profiler: str
    window: Sequence[int]
    twin: str | None = None
    finding: str | None = None
    plant: dict[str, Any] | None = None
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    planted_ranks: list[int] = field(default_factory=list)
    captured_ranks: list[int] | None = None
    losses: bool = False

    @property
    def folder(self) -> Path:
        """Where its captures are: what a user's run leaves. Unpacked when it is asked for first."""
        packed = FOLDER / self.name
        there = _UNPACKED / f"{zlib.crc32((packed / 'captures.columns').read_bytes()):08x}" / self.name
        if not there.is_dir():
            there.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=there.parent) as scratch:
                unpacked = Path(shutil.copytree(packed, Path(scratch, self.name)))
                columns.write(columns.decode((unpacked / "captures.columns").read_bytes()), unpacked)
                (unpacked / "captures.columns").unlink()
                with contextlib.suppress(OSError):  # another process was faster
                    unpacked.rename(there)
        return there

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return CONFIGURATIONS[self.configuration]["ranks"]

    @property
    def captured(self) -> list[int]:
        """The ranks that are captured."""
        return list(range(self.ranks)) if self.captured_ranks is None else self.captured_ranks

    @property
    def iterations(self) -> list[int]:
        """The iterations that are captured."""
        return list(range(*self.window))


#: Its rows also say, for readers, what must be found and how much was planted.
TABLE: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))

CONFIGURATIONS: dict[str, dict[str, Any]] = TABLE["configurations"]

#: Every case by its name.
CASES: dict[str, Case] = {
    row["name"]: Case(**{name: value for name, value in row.items() if name in Case.__dataclass_fields__})
    for row in TABLE["cases"]
}
