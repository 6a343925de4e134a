"""Writes docs/reference/features.md: each feature of the guides that this project comes from, and the test that shows it.

python tools/feature_table.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "features.md"
ROWS = ROOT / "tests" / "snippets" / "features.txt"

_GUIDES = {
    "bridge": "Megatron Bridge: profiling",
    "rl": "NeMo RL: profiling and performance",
    "torch": "Profiling tools",
    "guide": "Comprehensive GPU profiling guide",
    "speed": "Performance and optimization",
}

_HEAD = """# Features of other guides

Each feature that the guides behind this project describe, with the test that shows it, or the page that says what to use
instead, or that it is not supported. Tests in `tests/gpu` run on GPUs, those in `tests/system` with a real nsys, Slurm or
Ray, and the others on a CPU. The [snippets](snippets.md) of the guides have a page of their own. `tools/feature_table.py`
writes this one from `tests/snippets/features.txt`, and a test checks that every test exists and that every page has the
words that a row names.
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
    def is_page(self) -> bool:
        """Whether a page says what to use instead."""
        return self.evidence.startswith("docs/")

    @property
    def holds(self) -> bool:
        """Whether the file has that test, or the page those words."""
        file = ROOT / self.place if self.is_page else ROOT / "tests" / self.place
        wanted = self.evidence.removeprefix(self.place)
        text = f"def {wanted.removeprefix('::')}(" if wanted.startswith("::") else wanted.strip(' "')
        return bool(text) and file.is_file() and text in file.read_text(encoding="utf-8")


def features() -> list[Feature]:
    """The rows of the table."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    return [Feature(*line.split(" | ")) for line in lines if not line.startswith("#")]


def page() -> str:
    """The text of the page."""
    parts, rows = [_HEAD], features()
    for guide, title in _GUIDES.items():
        parts += [f"\n## {title}\n", "| feature | here |", "|---|---|"]
        parts += [f"| {row.name} | {_shown(row)} |" for row in rows if row.guide == guide]
    return "\n".join(parts) + "\n"


def _shown(row: Feature) -> str:
    if not row.is_page:
        test = row.evidence.removeprefix(f"{row.place}::")
        return f"test: `{test}` in `tests/{row.place}`"
    path = row.place.removeprefix("docs/")
    link = path.removeprefix("reference/") if path.startswith("reference/") else f"../{path}"
    return f"[{Path(path).stem.replace('-', ' ')}]({link})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
