"""Writes docs/reference/snippets.md: what becomes of each code block of the documents that this project comes from.

python tools/snippet_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "snippets.md"

_HEAD = """# Snippets of other guides

The guides below show how to profile without this project, or with utilities that it replaces. Each code block that names
such a utility runs in a test as it is typed, with only its imports adapted; for the others the table says why they do not
run, and what to use instead. `tools/snippet_table.py` writes this page, and the tests are `tests/snippets`. Which of their
names is which of ours: [coming from other tools](../how-to/coming-from.md).

"""


def page() -> str:
    """The text of the page."""
    sys.path.insert(0, str(ROOT))
    from tests.snippets.blocks import table

    return _HEAD + table()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
