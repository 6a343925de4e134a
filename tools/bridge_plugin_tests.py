"""Runs Megatron Bridge's own tests of its NeMo-Run plugins with the plugins of this project in their place.

    python tools/bridge_plugin_tests.py CHECKOUT [pytest's options]

The file comes from a checkout of Megatron Bridge, or a clone without a work tree, and is not stored. The tests of the four
plugins that both have run. Those of `WandbPlugin`, `CometPlugin` and `PerfEnvPlugin`, which do not profile, are left out.
The exit code is pytest's, or 2 if there is no such file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from bridge_profiling import plugins

FILE = "tests/unit_tests/recipes/test_run_plugins.py"

#: What the file imports from.
MODULE = "megatron.bridge.recipes.run_plugins"

CLASSES = ("TestNsysPlugin", "TestPyTorchProfilerPlugin", "TestFaultTolerancePlugin")


def read(checkout: Path) -> str:
    """The file in a checkout, or in the last commit of a clone without a work tree.

    Raises:
        OSError, subprocess.CalledProcessError: there is no such file.
    """
    if (checkout / FILE).is_file():
        return (checkout / FILE).read_text(encoding="utf-8")
    show = ["git", "-C", str(checkout), "show", f"HEAD:{FILE}"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def stand_in() -> None:
    """Make `MODULE` importable: our plugins by their names, and empty classes for the others."""
    names = MODULE.split(".")
    for end in range(2, len(names)):
        package = types.ModuleType(".".join(names[:end]))
        package.__path__ = []
        sys.modules[package.__name__] = package
    module = types.ModuleType(MODULE)
    module.__dict__.update({name: getattr(plugins, name) for name in plugins.__all__})
    module.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    sys.modules[MODULE] = module


def main(arguments: Sequence[str]) -> int:
    """Run the tests; the exit code is pytest's."""
    if not arguments:
        print("error: no checkout is named. Type python tools/bridge_plugin_tests.py CHECKOUT", file=sys.stderr)
        return 2
    try:
        text = read(Path(arguments[0]))
    except (OSError, subprocess.CalledProcessError):
        print(f"error: {arguments[0]} has no {FILE}. Type the directory of a checkout of Megatron Bridge", file=sys.stderr)
        return 2
    stand_in()
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder, Path(FILE).name)
        test.write_text(text, encoding="utf-8")
        options = ["-v", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", folder]
        return pytest.main([*options, *(f"{test}::{name}" for name in CLASSES), *arguments[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
