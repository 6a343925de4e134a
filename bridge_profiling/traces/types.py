"""Types that readers, analysis and report share. Imports no pyarrow at run time."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

    from bridge_profiling.traces.tables import BlockTable

Source = Literal["kineto", "nsys", "memory"]

#: Where a capture's rank comes from: `order` numbers the files that nothing else names.
RankSource = Literal["trace", "manifest", "file name", "order"]

#: `unix`: nanoseconds since 1970 on the host's clock. `unknown`: only differences between times mean anything.
Clock = Literal["unix", "unknown"]


@dataclass(frozen=True)
class Caveat:
    """Something that a capture cannot show, or that was read differently than it was written."""

    code: str  # stable identifier in snake_case, such as `stream_waits_unrecorded`. Code compares this, never the text.
    text: str  # one or more sentences for the user, without naming the ranks
    ranks: tuple[int, ...] = ()  # global ranks it applies to; empty for the whole run
    file: str | None = None  # the file it is about, if it is about one


@cache
def texts(package: str, name: str) -> Mapping[str, Any]:
    """A TOML file of texts in a package."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def filled(package: str, name: str, /, *keys: str, **values: object) -> str:
    """An entry of a TOML file of texts, with values filled in. Line breaks count as spaces."""
    entry: Any = texts(package, name)
    for key in keys:
        entry = entry[key]
    return " ".join(entry.split()).format_map(values)


def caveat(key: str, ranks: Any = (), file: Any = None, **values: Any) -> Caveat:
    """An entry of caveats.toml with values and the file filled in. The key is the code and perhaps, after a point, a case."""
    text = filled(__package__, "caveats.toml", key, **{"file": file} | values)
    return Caveat(key.partition(".")[0], text, ranks, None if file is None else str(file))


@dataclass(frozen=True)
class ProcessGroup:
    """A communicator named in a trace."""

    name: str  # torch's name
    description: str  # the program's name; empty when it gave none
    backend: str  # "cuda:nccl"
    ranks: tuple[int, ...]  # global ranks in the group's order; empty when the trace lists none


#: Share of its device events that a capture can lose and still be judged.
_LOST_SHARE = 0.01


@dataclass(frozen=True)
class LostRecords:
    """Records of a capture that could not be used. Device work counts too when its launch is ambiguous."""

    total: int = 0  # of any kind
    device: int = 0  # of device work among them
    of_device: int = 0  # all records of device work, lost or not
    unrecorded: int = 0  # kernels among the lost that were launched, and of which there is no record


@dataclass
class RankInfo:
    """What is known about one rank's capture besides its events."""

    rank: int  # global rank
    rank_source: RankSource
    source: Source
    files: list[str]  # absolute
    clock: Clock = "unknown"  # of the tables' times
    clock_base_ns: int = 0  # added to the file's own times to get the tables' times
    world_size: int | None = None  # number of ranks in the job; None when unknown
    coordinates: dict[str, tuple[int, int]] | None = None  # {"tp": (rank, size), …}; None when unknown
    host: str | None = None
    versions: dict[str, str] = field(default_factory=dict)  # {"cuda_runtime": "13.0", "nccl": "2.28.9", …}, as recorded
    devices: dict[int, str] = field(default_factory=dict)  # names by number
    device_bytes: dict[int, int] = field(default_factory=dict)  # memory by number; empty when unknown
    groups: list[ProcessGroup] = field(default_factory=list)  # those listed in the trace
    lost: LostRecords = LostRecords()
    content: str = ""  # a digest of the times of its events, the same for two captures with the same content; empty without any
    # What this capture cannot show. Their `ranks` are empty, unless other ranks have the same content.
    caveats: list[Caveat] = field(default_factory=list)
    partial: bool = False  # the file is cut off, or its manifest says that the capture is incomplete
    error: str | None = None  # why the file could not be read to its end; the tables hold what could be read

    @property
    def judged(self) -> bool:
        """Whether so little of the device work is lost that the rest shows what the rank did."""
        return self.lost.device <= _LOST_SHARE * self.lost.of_device

    @property
    def doubts(self) -> list[str]:
        """Why findings about this capture can be wrong: its times contradict each other."""
        known = texts(__package__, "caveats.toml")["doubts"]
        return [known[caveat.code] for caveat in self.caveats if caveat.code in known]

    @property
    def has_unread_events(self) -> bool:
        """Whether events are of an unknown category, as those of MTIA: they can be the work of a device."""
        return any(caveat.code == "category_unknown" for caveat in self.caveats)

    def add_caveat(self, key: str, *, of_file: bool = False, **values: Any) -> None:
        """Append a caveat about this rank; `of_file` names its file too, where that is what has to be looked at."""
        self.caveats.append(caveat(key, file=self.files[0] if of_file else None, **values))


@dataclass
class RankTables:
    """One rank's capture as tables."""

    info: RankInfo
    tables: Mapping[str, pa.Table | BlockTable]  # for each name in `tables.SCHEMAS` that this capture fills
    entry: Path | None = None  # the cache folder that holds them as Parquet
    unkept: str | None = None  # why no such folder could be written

    def __getitem__(self, name: str) -> pa.Table:
        """The table of that name; empty, with its schema, when the capture has none."""
        return self.columns(name)

    def columns(self, name: str, wanted: Sequence[str] | None = None) -> pa.Table:
        """Some columns of a table. From Parquet, only these are read."""
        from bridge_profiling.traces.tables import SCHEMAS, BlockTable  # on use: it imports pyarrow

        found = self.tables[name] if name in self.tables else SCHEMAS[name].empty_table()
        if isinstance(found, BlockTable):
            return found.read(wanted)
        return found if wanted is None else found.select(list(wanted))

    def blocks(self, name: str, wanted: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows of a table, or of some of its columns, in one or more tables: not all of them need to fit into memory."""
        blocks = getattr(self.tables.get(name), "blocks", None)
        return iter([self.columns(name, wanted)]) if blocks is None else blocks(wanted)
