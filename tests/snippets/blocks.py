"""The code blocks of the documents that this project comes from; docs/reference/snippets.md says what becomes of each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_DOCUMENTS = Path(__file__).parent / "documents"

#: The page, whose sections are these documents in this order.
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "snippets.md"
DOCUMENTS = ("megatron-bridge", "nemo-rl-profiling", "nemo-rl-performance", "profiling-tools", "gpu-profiling-guide")

#: Imports of the documents' own utilities, and ours.
IMPORTS = {
    "from megatron.bridge.training.config import": "from bridge_profiling import",
    "from megatron.bridge.recipes.run_plugins import": "from bridge_profiling.plugins import",
    "from profiling_lab.utils.easy_profiler import": "from bridge_profiling.easy import",
    "from nemo_rl.utils.monitoring import": "from bridge_profiling.easy import",
}


@cache
def blocks() -> dict[str, str]:
    """The text of every block, by document and number."""
    found: dict[str, str] = {}
    for document in DOCUMENTS:
        text = (_DOCUMENTS / f"{document}.md.txt").read_text(encoding="utf-8")
        for number, match in enumerate(re.finditer(r"^```[^\n`]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
            found[f"{document} {number}"] = match[1]
    return found


def source(name: str) -> str:
    """A block with its imports adapted."""
    text = blocks()[name]
    for theirs, ours in IMPORTS.items():
        text = text.replace(theirs, ours)
    return text


def listed() -> dict[str, tuple[str, str]]:
    """Each block that the page lists, as `blocks` names it: how it begins, and what becomes of it."""
    _, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    return {
        f"{document} {number}": (begin, fate)
        for document, section in zip(DOCUMENTS, sections, strict=True)
        for number, begin, fate in re.findall(r"^\| (\d+) \| `(.*?)` \| (.*) \|$", section, re.MULTILINE)
    }


def begins(text: str) -> str:
    """How the page shows a block: its first line."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first[:60].replace("|", "¦").replace("`", "'")
