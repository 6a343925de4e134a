"""How large each part of the project is, against `[tool.budget]` in pyproject.toml. Prints the table; fails on an excess.

python tools/budget.py
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Files of tests that are larger count as captures.
_CAPTURE_BYTES = 20_000

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines with code: neither blank, nor comments or docstrings alone."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def sizes() -> dict[str, int]:
    """The size of each part that has a budget: code lines of Python by folder, modules, words of docs, KB of captures."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [Path(name) for name in listed if name and (ROOT / name).is_file()]
    found = Counter[str]()
    for path in files:
        top, parts = path.parts[0], path.parts
        if path.suffix == ".py":
            part = "/".join(parts[:2]) if top == "bridge_profiling" and len(parts) > 2 else top
            found[part] += code_lines((ROOT / path).read_text(encoding="utf-8"))
            found["modules of bridge_profiling"] += top == "bridge_profiling"
        elif path.suffix == ".md" and top == "docs":
            found["pages of docs"] += 1
            found["words of docs"] += len((ROOT / path).read_text(encoding="utf-8").split())
        size = (ROOT / path).stat().st_size
        if top == "tests" and size > _CAPTURE_BYTES:
            found["KB of captures"] += size // 1000
    return dict(found)


def excesses() -> list[str]:
    """What is larger than its budget, and what has none."""
    budget, found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["budget"], sizes()
    over = [part for part in {**budget, **found} if found.get(part, 0) > budget.get(part, 0)]
    return [f"{part}: {found[part]} of {budget.get(part)}" for part in over]


if __name__ == "__main__":
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["budget"]
    for part, size in sorted(sizes().items()):
        print(f"{part:32}{size:8}{limits.get(part, 0):8}")
    sys.exit("\n".join(excesses()))
