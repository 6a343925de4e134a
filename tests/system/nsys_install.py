"""A real nsys for system tests, from Debian's packages: unpacked into a cache, side by side as nsys expects, not installed.

Debian's experimental suite holds a version that records and exports on any Debian; the one of bookworm hangs.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.system.debian import InstallationError, run, why_no_packages

#: Enough for `nsys profile` and `--export=sqlite`; libarrow's version is the one that this nsys is linked with.
_EXPERIMENTAL = ("nsight-systems", "nsight-systems-target", "libarrow500", "libparquet500")
_OF_THIS_DEBIAN = ("libssh-4", "libpfm4")
_LIBRARIES = ("libarrow.so.500", "libparquet.so.500", "libssh.so.4", "libpfm.so.4")

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def why_no_nsys() -> str | None:
    """Why this machine can have no nsys, or None when it can; looks, and runs nothing."""
    if shutil.which("nsys"):
        return None
    if platform.machine() != "x86_64":
        return f"nsys is not on PATH, and its Debian packages are not for {platform.machine()}"
    missing = why_no_packages(root=False)
    return missing and f"nsys is not on PATH, and {missing}"


def working_nsys(cache: Path) -> Path:
    """A working nsys: the one on PATH if it makes a report, else the cached one, else one made now.

    Args:
        cache: directory to keep it in; a second process waits there for the first.

    Raises:
        InstallationError: a package could not be had, or the result makes no report.
    """
    found = shutil.which("nsys")
    if found and _defect(Path(found)) is None:
        return Path(found)
    program = cache / "bin" / "nsys"
    cache.parent.mkdir(parents=True, exist_ok=True)
    with open(cache.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        with tempfile.TemporaryDirectory(dir=cache.parent, prefix="nsys-") as folder:
            made = _assemble(_unpack(Path(folder)), Path(folder, "nsys"))
            defect = _defect(made / "bin" / "nsys")
            if defect:
                raise InstallationError(f"the nsys made from Debian's packages makes no report: {defect}")
            made.rename(cache)
    return program


def _unpack(folder: Path) -> Path:
    """Download the packages through the machine's own mirror, and unpack them; the root they lie under."""
    for name in ("lists/partial", "cache/archives/partial", "packages", "root"):
        (folder / name).mkdir(parents=True)
    sources = folder / "sources.list"
    mirror, suite = _mirror()
    sources.write_text(
        f"deb [signed-by={_KEYRING}] {mirror} {suite} main\ndeb [signed-by={_KEYRING}] {mirror} experimental non-free\n"
    )
    # Lists, cache and sources of its own: the machine's stay as they are.
    apt = ["apt-get", "-qq"]
    places = {"Etc::sourcelist": sources, "Etc::sourceparts": "/dev/null", "State::lists": folder / "lists"}
    for name, place in (places | {"Cache": folder / "cache"}).items():
        apt += ["-o", f"Dir::{name}={place}"]
    apt += ["-o", "APT::Sandbox::User=root"]
    run([*apt, "update"])
    run([*apt, "download", *(f"{name}/experimental" for name in _EXPERIMENTAL), *_OF_THIS_DEBIAN], cwd=folder / "packages")
    for package in (folder / "packages").glob("*.deb"):
        run(["dpkg", "-x", package, folder / "root"])
    return folder / "root"


def _mirror() -> tuple[str, str]:
    """The mirror and the suite that this machine's apt uses for Debian's main part."""
    # One line a list: where it comes from, the suite, the part, and who signs it.
    fields = "$(SITE)|$(CODENAME)|$(COMPONENT)|$(ORIGIN)|$(LABEL)"
    for line in run(["apt-get", "indextargets", "--format", fields]).splitlines():
        site, suite, component, origin, label = line.split("|")
        if (component, origin, label) == ("main", "Debian", "Debian") and "-" not in suite:
            return site, suite
    raise InstallationError("apt has no list of Debian's main part; type: apt-get update")


def _assemble(root: Path, bundle: Path) -> Path:
    """nsys looks for its two halves beside each other, and for its libraries among the host's half.

    What makes its own reports is left out: nothing here asks for them.
    """
    libraries = root / "usr" / "lib" / "x86_64-linux-gnu"
    host, target = bundle / "host-linux-x64", bundle / "target-linux-x64"
    shutil.copytree(libraries / "nsight-systems" / "target-linux-x64", target, symlinks=True)
    packaged = root / "usr" / "lib" / "nsight-systems" / "host-linux-x64"
    host.mkdir()
    for library in _LIBRARIES:
        shutil.copy(libraries / library, host / library)
    (host / "libssh.so").symlink_to("libssh.so.4")
    importer = packaged / "QdstrmImporter"
    shutil.copy(importer, host)
    for library in _needed(importer, [packaged, libraries]):
        if library.parent == packaged and library.name.split(".")[0] not in ("libssh", "libarrow", "libparquet"):
            shutil.copy(library, host)
    if (packaged / "config.ini").exists():
        shutil.copy(packaged / "config.ini", host)
    (bundle / "bin").mkdir()
    (bundle / "bin" / "nsys").symlink_to("../target-linux-x64/nsys")
    return bundle


def _needed(program: Path, search: list[Path]) -> list[Path]:
    """The libraries that the loader gives a program, found first where told."""
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, search))}
    listed = subprocess.run(["ldd", program], env=environment, capture_output=True, text=True, check=True).stdout
    return [Path(line.split()[2]) for line in listed.splitlines() if "=> /" in line]


def _defect(program: Path) -> str | None:
    """What keeps this nsys from making a report of a program that does nothing, or None."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        command = [program, "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite"]
        try:
            done = subprocess.run([*command, f"--output={report}", "true"], capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode or not report.with_suffix(".nsys-rep").exists() or not report.with_suffix(".sqlite").exists():
            return f"exit code {done.returncode}, {done.stdout}{done.stderr}"
    return None
