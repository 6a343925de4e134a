"""Writes docs/reference/source-guides.md: features and code blocks of the guides behind this project, and what shows each here.

python tools/feature_table.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "source-guides.md"
ROWS = ROOT / "tests" / "snippets" / "features.txt"

_GUIDES = {
    "bridge": "Megatron Bridge: profiling",
    "rl": "NeMo RL: profiling",
    "torch": "Profiling tools",
    "guide": "Comprehensive GPU profiling guide",
    "speed": "NeMo RL: performance",
}

_HEAD = """# Other guides, feature by feature

Look up a feature or a code block of the guides behind this project: here is the test that shows it, or the page that says
what to use instead. Tests in `gpu` run on GPUs, those in `system` with a real nsys, Slurm or Ray. Code blocks
count from 0. One that *runs* is executed as typed, with only its imports adapted and the names defined that it leaves to the
reader; of one that is *checked*, a test reads the settings or compares the interface.
[Which name is which](../how-to/coming-from.md).
"""


class Feature(NamedTuple):
    """One row: a key of the guides, the feature, and the evidence as `tests/snippets/features.txt` has it."""

    guide: str
    name: str
    evidence: str

    @property
    def place(self) -> str:
        """The test's file below `tests/`, or the page."""
        return re.split(r"::| ", self.evidence, maxsplit=1)[0]

    @property
    def blocks(self) -> list[int]:
        """The code blocks that the row is about, if it is about any."""
        numbers = re.match(r"blocks? ([\d, ]+): ", self.name)
        return [int(each) for each in numbers[1].split(", ")] if numbers else []

    @property
    def holds(self) -> bool:
        """Whether the file has that test, or the page those words."""
        wanted = self.evidence.removeprefix(self.place)
        is_test = wanted.startswith("::")
        file = ROOT / ("tests" if is_test else "") / self.place
        text = f"def {wanted[2:]}(" if is_test else wanted[2:-1]
        return bool(text) and file.is_file() and text in file.read_text(encoding="utf-8")

    @property
    def shown(self) -> str:
        """The row's evidence on the page."""
        if not self.place.startswith("docs/"):
            return f"`{self.place}`"
        path = Path(self.place)
        link = path.name if path.parent.name == "reference" else f"../{path.parent.name}/{path.name}"
        return f"[{path.stem.replace('-', ' ')}]({link})"


def features() -> list[Feature]:
    """The rows of the table."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    return [Feature(*line.split(" | ")) for line in lines if not line.startswith("#")]


def page() -> str:
    """The text of the page: a row for each place, with all features of a guide that it shows."""
    parts, rows = [_HEAD], features()
    for guide, title in _GUIDES.items():
        parts += [f"\n## {title}\n", "| feature | here |", "|---|---|"]
        shown = dict[str, list[str]]()
        for row in rows:
            if row.guide == guide:
                shown.setdefault(row.shown, []).append(row.name)
        parts += [f"| {'<br>'.join(names)} | {place} |" for place, names in shown.items()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
