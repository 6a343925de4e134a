"""Installs into the interpreter that runs it: with uv, told what pip is configured with, else with pip itself.

    python tools/install.py --constraint constraints.txt --editable '.[megatron]'

Imports nothing but the standard library: it runs in an environment that has only pip.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Install; the exit code is the installer's."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "install", "--quiet", "--no-cache-dir", "uv"]).returncode == 0:
        # As pip does: each rank imports thousands of modules, and where Python may not keep what it compiled
        # (PYTHONDONTWRITEBYTECODE, a read-only image) every start would compile them again.
        os.environ.setdefault("UV_COMPILE_BYTECODE", "1")
        uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
        print(f"installing {arguments[-1]} and what it needs: a minute, or several on a slow line", file=sys.stderr)
        if _run_with_progress([*uv, *_pip_settings(pip), *arguments]) == 0:
            return 0
        print("uv could not install this; trying pip, which takes minutes where uv takes seconds", file=sys.stderr)
    return subprocess.run([*pip, "install", "--quiet", "--no-cache-dir", *arguments]).returncode


def _run_with_progress(command: list[str]) -> int:
    """Run uv, and pass on what it does, without its list of everything installed; the exit code is uv's."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as uv:
        assert uv.stderr is not None
        for line in uv.stderr:
            if not line.startswith((" + ", " - ", " ~ ")):
                print(line, end="", file=sys.stderr, flush=True)
    return uv.returncode


def _pip_settings(pip: list[str]) -> list[str]:
    """pip's package sources, as uv's options: uv does not read pip's configuration."""
    options = []
    for setting, option in (("index-url", "--default-index"), ("find-links", "--find-links")):
        found = os.environ.get(f"PIP_{setting.upper().replace('-', '_')}")
        if not found:
            asked = subprocess.run([*pip, "config", "get", f"global.{setting}"], capture_output=True, text=True)
            found = asked.stdout.strip() if asked.returncode == 0 else ""
        for place in found.split():
            options += [option, place]
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
