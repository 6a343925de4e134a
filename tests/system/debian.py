"""Debian packages for system tests: installed, or unpacked into a folder, from the mirror that this machine is configured for.

Writes no host into any file, starts no service, and changes nothing on a machine that has the programs already.
"""

import contextlib
import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Debian asks this script whether a package may start its service; 101 means no.
_POLICY = Path("/usr/sbin/policy-rc.d")

#: A real Chromium without a window, for Playwright.
BROWSER = {"chromium": "chromium fonts-dejavu-core"}


def why_no_packages(*, root: bool) -> str | None:
    """Why Debian packages cannot be had here, or None when they can.

    Args:
        root: whether they have to be installed, which only root may do; unpacking them anybody may.
    """
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    if release.get("ID") != "debian" or not shutil.which("apt-get"):
        return f"this is {release.get('PRETTY_NAME', platform.system())}, not Debian"
    if root and os.geteuid() != 0:
        return "only root may install Debian packages"
    return None


def why_no_browser() -> str | None:
    """Why no browser can be had here, or None when one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if shutil.which("chromium") else why_no_packages(root=True)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other workers of pytest-xdist waiting: apt-get waits for nobody."""
    with open(Path(tempfile.gettempdir()) / f"test-packages-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(programs: Mapping[str, str]) -> None:
    """Install the packages of programs that are missing, without starting services."""
    with one_at_a_time():
        missing = [packages for program, packages in programs.items() if not shutil.which(program)]
        if not missing:
            return
        is_asked = _POLICY.exists()
        if not is_asked:
            _POLICY.write_text("#!/bin/sh\nexit 101\n")
            _POLICY.chmod(0o755)
        try:
            # An installation that a signal has cut short would fail every later one.
            run("dpkg", "--configure", "-a")
            run("apt-get", "-qq", "update")
            run("apt-get", "-qq", "install", "--yes", "--fix-broken", "--no-install-recommends", *" ".join(missing).split())
        finally:
            if not is_asked:
                _POLICY.unlink()


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command of the package tools, which must succeed; its standard output."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
