"""The tables of speeds, as they are printed, stored and shown in the documentation: docs/reference/speed.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: The tables of the last release: of what needs no GPU, and of what needs one.
STORED, STORED_GPU = HERE / "table.json", HERE / "gpu_table.json"
PAGE = HERE.parent / "docs" / "reference" / "speed.md"


@dataclass(frozen=True)
class Measured:
    """Seconds, or another unit, of our side and of the floor, and the ratio with its interval."""

    ours: float
    floor: float
    unit: str
    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A row of a table: what is measured, against what, and what was found, or why nothing was."""

    name: str
    floor: str
    found: Measured | None
    why_not: str = ""

    def is_comparable(self, other: Line) -> bool:
        """Whether its ratio can be compared with the other one's."""
        return (self.name, self.floor) == (other.name, other.floor)


@dataclass
class Table:
    """A table and the machine that it was measured on."""

    machine: str = ""
    lines: dict[str, Line] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Table:
        """A stored table, or an empty one."""
        stored = json.loads(path.read_text()) if path.exists() else {"machine": "", "lines": {}}
        lines = {
            id: Line(**{**line, "found": line["found"] and Measured(**line["found"])}) for id, line in stored["lines"].items()
        }
        return Table(stored["machine"], lines)

    def store(self, path: Path) -> None:
        """Keep this as the table of the last release, and write the page of both tables."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        PAGE.write_text(page(Table.read(STORED), Table.read(STORED_GPU)))

    def show(self, stored: Table) -> None:
        """Print it next to the stored one."""
        print(self.machine)
        if stored.lines:
            print(f"last release: {stored.machine}")
        print("\n".join(self.markdown(stored)))

    def markdown(self, stored: Table | None = None) -> Iterator[str]:
        """As Markdown; with the ratios of a stored table, if it has any."""
        before = stored.lines if stored else {}
        last = " last release |" if before else ""
        yield f"| | ours | floor | × floor |{last} the floor |"
        yield f"|---|---:|---:|---:|{'---:|' * bool(before)}---|"
        for id, line in self.lines.items():
            then = before[id].found if id in before and before[id].is_comparable(line) else None
            last = "" if not before else " |" if then is None else f" {then.ratio:.2f} |"
            yield f"| {line.name} | {_cells(line)} |{last} {line.floor} |"


def _cells(line: Line) -> str:
    found = line.found
    if found is None:
        return f"not measured: {line.why_not} | |"
    interval = "" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.ours:,.3g} {found.unit} | {found.floor:,.3g} {found.unit} | {found.ratio:.2f}{interval}"


def page(table: Table, gpu: Table) -> str:
    """The page of the documentation."""
    text = (
        "# Speed\n\n"
        "What `make bench` measured for the last release. Each row is a ratio to a floor: the least that the same work could "
        "take,\nor another tool that does it. Both sides ran in turns, so compare ratios, not times.\n\n"
        f"{table.machine}\n\n" + "\n".join(table.markdown()) + "\n\n"
        "CPU seconds are those of all processes of a command. An interval contains the ratio in 95 of 100 such measurements.\n"
        "`python benchmarks/table.py --store` writes this table.\n"
    )
    if gpu.lines:
        text += (
            "\n## With a GPU\n\n"
            "Measured by `make bench-gpu`: a step that is bound by the host, the worst case for what profiling costs. "
            "`python\nbenchmarks/gpu_table.py --store` writes this table. Longer measurements are in "
            "[Benchmarks](../benchmarks.md).\n\n"
            f"{gpu.machine}\n\n" + "\n".join(gpu.markdown()) + "\n"
        )
    return text


def machine(device: str, *libraries: str, where: tuple[int | None, str] | None = None) -> str:
    """What a table was measured on, in words; `where`: the number of its CPUs and its Python, if not this machine's."""
    cpus, python = where or (os.cpu_count(), platform.python_version())
    return f"{datetime.date.today()}, {', '.join([device, f'{cpus} CPUs', platform.system(), f'Python {python}', *libraries])}."


def processor() -> str:
    """The processor's name, as Linux knows it."""
    known = Path("/proc/cpuinfo")
    found = [line.partition(":")[2].strip() for line in known.read_text().splitlines() if line.startswith("model name")]
    return found[0] if found else platform.machine()
