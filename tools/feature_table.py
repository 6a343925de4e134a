"""Writes docs/reference/source-guides.md: features and code blocks of the guides behind this project, and what shows each here.

python tools/feature_table.py
"""

from __future__ import annotations

import re
from functools import cache
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


@cache
def _tests() -> dict[str, str]:
    """The file below `tests/` of each test."""
    folder = ROOT / "tests"
    return {
        name: str(path.relative_to(folder))
        for path in sorted(folder.rglob("test_*.py"))
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


class Feature(NamedTuple):
    """One row: a key of the guides, the feature, and the evidence as `tests/snippets/features.txt` has it."""

    guide: str
    name: str
    evidence: str

    @property
    def is_test(self) -> bool:
        """Whether a test shows the feature; else a page says what to use."""
        return self.evidence.startswith("test_")

    @property
    def blocks(self) -> list[int]:
        """The code blocks that the row is about, if it is about any."""
        numbers = re.match(r"blocks? ([\d, ]+): ", self.name)
        return [int(each) for each in numbers[1].split(", ")] if numbers else []

    @property
    def holds(self) -> bool:
        """Whether there is that test, or the page has those words."""
        if self.is_test:
            return self.evidence in _tests()
        page, _, words = self.evidence.partition(' "')
        return (ROOT / page).is_file() and words.removesuffix('"') in (ROOT / page).read_text(encoding="utf-8")

    @property
    def place(self) -> str:
        """The test's file, or a link to the page."""
        if self.is_test:
            return f"`{_tests().get(self.evidence)}`"
        path = Path(self.evidence.partition(" ")[0])
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
                shown.setdefault(row.place, []).append(row.name)
        parts += [f"| {'<br>'.join(names)} | {place} |" for place, names in shown.items()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
