"""Writes docs/reference/features.md: each feature of the guides that this project comes from, and the test that shows it.

python tools/feature_table.py
"""

from __future__ import annotations

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
instead. The [snippets](snippets.md) of the guides have a page of their own. `tools/feature_table.py` writes this one,
and a test checks that every file that it names exists.
"""


class Feature(NamedTuple):
    """One row: a key of the guides, the feature, and the evidence as `tests/snippets/features.txt` has it."""

    guide: str
    name: str
    evidence: str

    @property
    def file(self) -> Path:
        """The test or page that shows it."""
        return ROOT / (self.evidence if self.evidence.startswith("docs/") else f"tests/{self.evidence}")


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
    if row.evidence.startswith("docs/"):
        path = row.evidence.removeprefix("docs/")
        link = path.removeprefix("reference/") if path.startswith("reference/") else f"../{path}"
        return f"[{Path(path).stem.replace('-', ' ')}]({link})"
    return f"works: `tests/{row.evidence}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
