"""Compares what this checkout answers about stored captures with what another commit answers, byte by byte.

  python tools/goldens.py COMMIT [--captures FOLDER] [--only TEXT] [--workers N] [--cached]

Captures: those of tests/planted and tests/everyday, and the runs below each FOLDER (a run holds the files of its ranks). The
answers about a run are `analyze --json`, `report --json`, `memory --json`, `compare --json` with the run that comes before it
in its group, and the text of the page. Exit code 1: some answers differ; they stay in the folder that the last line names.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class _Text(HTMLParser):
    """The text of a page, without its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.lines.append(data.strip())


def runs(folder: Path, captures: list[Path], only: str) -> list[Path]:
    """The runs to ask about; everyday captures are unpacked into `folder`."""
    sys.path.insert(0, str(ROOT))
    from tests.planted.cases import CASES
    from tools import everyday

    everyday_set = everyday.full() or everyday.STORED
    for group in dict.fromkeys(each.group for each in everyday.captures(everyday_set).values()):
        if only in group:
            everyday.unpack(everyday_set, group, folder / "everyday" / group)
    found = [case.folder for case in CASES.values()]
    found += sorted((folder / "everyday").glob("*/*"))
    for given in captures:
        found += sorted({path.parent for path in given.resolve().rglob("rank*.*") if path.is_file()})
    return [path for path in found if only in str(path)]


def write(folder: Path, paths: list[Path], workers: int, cached: bool) -> None:
    """Write all answers about runs, of the package that is importable here, below `folder`, the current directory."""
    for place, path in enumerate(paths):
        target = folder / "-".join(path.parts[-3:])
        target.mkdir(parents=True)
        asked = {name: [name, path, "--json"] for name in ("analyze", "report", "memory")}
        asked["page"] = ["report", path, "-o", "page.html"]
        if place and paths[place - 1].parent == path.parent:
            asked["compare"] = ["compare", paths[place - 1], path, "--json"]
        for name, words in asked.items():
            for _ in range(1 + cached):
                text = _typed([*map(str, words), "--workers", str(workers)])
            if name == "page" and Path("page.html").exists():
                page = _Text()
                page.feed(Path("page.html").read_text(encoding="utf-8"))
                text += "\n".join(page.lines)
                Path("page.html").unlink()
            (target / f"{name}.txt").write_text(text, encoding="utf-8")


def _typed(arguments: list[str]) -> str:
    """What a command prints, and its exit code."""
    from bridge_profiling.cli import main

    sys.argv = ["bridge-profiling", *arguments]
    printed, said, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return f"exit code {code}\n{printed.getvalue()}{said.getvalue()}"


def differences(before: Path, after: Path) -> Iterator[str]:
    """The first differing lines of each answer that is not the same."""
    for path in sorted({one.relative_to(side) for side in (before, after) for one in side.rglob("*.txt")}):
        old, new = (side / path for side in (before, after))
        if not (old.exists() and new.exists()):
            yield f"{path}: only {'after' if new.exists() else 'before'}"
        elif old.read_bytes() != new.read_bytes():
            lines = difflib.unified_diff(_lines(old), _lines(new), "before", "after", n=0, lineterm="")
            yield "\n".join([str(path), *(line[:200] for line, _ in zip(lines, range(12), strict=False))])


def _lines(path: Path) -> list[str]:
    """The lines of an answer; a document in JSON has a line for each of its values."""
    code, _, text = path.read_text(encoding="utf-8").partition("\n")
    with contextlib.suppress(ValueError):
        text = json.dumps(json.loads(text), indent=1)
    return [code, *text.splitlines()]


def main() -> int:
    """Ask both sides, in a process each, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the other side")
    parser.add_argument("--captures", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs with this in their path")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cached", action="store_true", help="ask twice, and keep the answer that comes from the cache")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, [Path(line) for line in sys.stdin.read().splitlines()], arguments.workers, arguments.cached)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="goldens-"))
    paths = runs(folder, arguments.captures, arguments.only)
    other = folder / "checkout"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, arguments.commit], cwd=ROOT, check=True)
    try:
        sides = []
        for name, checkout in (("before", other), ("after", ROOT)):
            environment = os.environ | {"PYTHONPATH": str(checkout), "BRIDGE_PROFILING_CACHE": str(folder / f"{name}-cache")}
            command = [sys.executable, __file__, "-", "--write", folder / name, "--workers", str(arguments.workers)]
            command += ["--cached"] * arguments.cached
            (folder / name).mkdir()
            sides.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment, cwd=folder / name))
        for side in sides:
            side.stdin.write("\n".join(map(str, paths)))
            side.stdin.close()
        codes = [side.wait() for side in sides]
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    found = list(differences(folder / "before", folder / "after"))
    print(*found, sep="\n\n")
    print(f"{len(paths)} runs, {len(found)} answers differ: {folder}")
    return int(bool(found or any(codes)))


if __name__ == "__main__":
    sys.exit(main())
