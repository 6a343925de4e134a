"""Debian packages for system tests: installed from the machine's own configured mirror, or unpacked beside it.

Writes no host into any file, starts no service, and changes nothing on a machine that has the packages already.
"""

import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: Debian asks this script whether a package may start its service; 101 means no.
_POLICY = Path("/usr/sbin/policy-rc.d")


class InstallationError(RuntimeError):
    """A package that a required system test needs could not be had."""


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


#: A real Chromium without a window, and fonts for what it draws; Playwright drives it.
BROWSER = ("chromium", "fonts-dejavu-core")


def why_no_browser() -> str | None:
    """Why no browser can be had here, or None when one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if shutil.which("chromium") else why_no_packages(root=True)


def install(packages: Sequence[str]) -> None:
    """Install what is missing, without starting its services.

    Raises:
        InstallationError: apt-get failed; holds its output.
    """
    if all(map(_installed, packages)):
        return
    # One worker of pytest-xdist at a time: apt-get waits for nobody.
    with open(Path(tempfile.gettempdir()) / f"test-packages-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in packages if not _installed(name)]
        if not missing:
            return
        with _no_services():
            # An installation that a signal has cut short would fail every later one.
            run(["dpkg", "--configure", "-a"])
            run(["apt-get", "-qq", "install", "--yes", "--fix-broken"])
            run(["apt-get", "-qq", "update"])
            run(["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing])


def run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """Run a command of the package tools; its standard output.

    Raises:
        InstallationError: it failed; holds its output.
    """
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise InstallationError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _installed(package: str) -> bool:
    status = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True)
    return status.stdout == "install ok installed"


@contextmanager
def _no_services() -> Iterator[None]:
    """Where Debian's own answer is to start services, say no for as long as the installation takes."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
