"""Tests the recipes and the Megatron Bridge callback with each supported release of megatron-core.

    python tools/versions.py [RELEASE ...]

Each release gets an environment of its own in .cache/versions, with `constraints.txt` but for its
own pins. Prints one table; exit code 1 if a cell of it failed. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".cache" / "versions"

TESTED: Sequence[str] = runpy.run_path(str(ROOT / "bridge_profiling" / "common" / "megatron_versions.py"))["TESTED"]

#: Megatron Bridge has no release for another Python.
PYTHON = "3.12"

PARTS = {
    "main job": ["tests/launch/test_experiment.py"],
    "recipes and layouts": [
        "tests/recipes/test_config.py",
        "tests/recipes/test_data.py",
        "tests/recipes/test_megatron_loop.py",
        "tests/recipes/test_recipes.py",
    ],
    "checkpoint and resume": ["tests/recipes/test_checkpoint.py", "tests/launch/test_pretrain.py"],
    "Megatron Bridge": ["tests/frameworks/test_bridge_pretrain.py"],
}


def make_environment(release: str) -> Path:
    """The Python of an environment with this release of megatron-core; made when it is missing or its pins have changed.

    Raises:
        subprocess.CalledProcessError: it cannot be made; the reason has been printed.
    """
    folder = ENVIRONMENTS / release
    python = folder / "bin" / "python"
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("megatron-core")]
    text = "\n".join([*pins, f"megatron-core=={release}", ""]) + (ROOT / "pyproject.toml").read_text()
    installed = folder / "installed"
    if installed.is_file() and installed.read_text() == text:
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["make", f"VENV={folder}", f"{folder}/.created"], cwd=ROOT, check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pins, f"megatron-core=={release}", ""]))
    install = [str(python), "tools/install.py", "--constraint", str(constraints), "--editable", ".[megatron,analysis,test]"]
    subprocess.run(install, cwd=ROOT, check=True)
    installed.write_text(text)
    return python


def versions(python: Path) -> str:
    """The versions in an environment, read from the environment itself: a wrong pin would test another release."""
    code = """
import platform
from importlib.metadata import version
print(version("megatron-core"), platform.python_version(), version("torch"))
"""
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return "{}, Python {}, torch {}".format(*done.stdout.split())


def run_part(python: Path, name: str) -> tuple[bool, str]:
    """Run a part's tests, and say how they ended; what they print goes to this process's output."""
    # A Bridge or a path named for another environment would be tested in the place of this one's.
    foreign = ("BRIDGE_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    # What is required is not skipped, and a run without tests is no success: the exit code says whether all is right.
    environment = {**inherited, "REQUIRE": "megatron,nemo_run,bridge", "TORCHDYNAMO_DISABLE": "1"}
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *PARTS[name]]
    started = time.monotonic()
    passed = subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
    return passed, f"{'passed' if passed else 'failed'} ({time.monotonic() - started:.0f} s)"


def main(arguments: Sequence[str]) -> int:
    """Test the releases named, or all of them; the exit code says whether all is right."""
    unknown = [release for release in arguments if release not in TESTED]
    if unknown:
        print(f"error: {unknown[0]} is not a tested release of megatron-core. Type one of: {' '.join(TESTED)}", file=sys.stderr)
        return 2
    rows, right = [["megatron-core", *PARTS]], True
    for release in arguments or TESTED:
        print(f"megatron-core {release}", flush=True)
        try:
            python = make_environment(release)
        except subprocess.CalledProcessError as error:
            rows.append([f"{release}: no environment (exit code {error.returncode})", *["not run"] * len(PARTS)])
            right = False
            continue
        cells = [run_part(python, name) for name in PARTS]
        held = versions(python)
        rows.append([held, *(text for _, text in cells)])
        right = right and held.startswith(f"{release},") and all(passed for passed, _ in cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
