"""Megatron Bridge's published wheel, downloaded once from wherever this machine gets its packages."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "wheels"

#: The newest release that the tests have read.
RELEASE = "0.3.1"

WHEEL = CACHE / f"megatron_bridge-{RELEASE}-py3-none-any.whl"


@functools.cache
def why_no_wheel() -> str | None:
    """Get the wheel into the checkout's cache; why that fails, or None. Its dependencies stay away."""
    if WHEEL.exists():
        return None
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
        asked = ["download", "--quiet", "--no-deps", f"--dest={folder}", f"megatron-bridge=={RELEASE}"]
        done = subprocess.run([*pip, *asked], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            return f"the wheel of megatron-bridge {RELEASE} cannot be downloaded: {last}"
        (Path(folder) / WHEEL.name).rename(WHEEL)
    return None
