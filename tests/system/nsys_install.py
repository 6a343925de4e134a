"""A real nsys for system tests, from Debian's packages: unpacked into a cache as nsys expects it, not installed.

Debian's experimental suite has a version that records and exports on any Debian; the one of bookworm hangs.
"""

import platform
import shutil
import tempfile
from pathlib import Path

from tests.system.debian import one_at_a_time, run, why_no_packages

#: Enough for `nsys profile` and `--export=sqlite`; libarrow's version is the one that this nsys is linked with.
_EXPERIMENTAL = ("nsight-systems", "nsight-systems-target", "libarrow500", "libparquet500")
_OF_THIS_DEBIAN = ("libssh-4", "libpfm4")
_LIBRARIES = ("libarrow.so.500", "libparquet.so.500", "libssh.so.4", "libpfm.so.4")


def why_no_nsys() -> str | None:
    """Why this machine can have no nsys, or None when it can; looks, and runs nothing."""
    if shutil.which("nsys"):
        return None
    if platform.machine() != "x86_64":
        return f"nsys is not on PATH, and its Debian packages are not for {platform.machine()}"
    missing = why_no_packages(root=False)
    return missing and f"nsys is not on PATH, and {missing}"


def working_nsys(cache: Path) -> Path:
    """The nsys on PATH, else the cached one, else one that is made there now."""
    if found := shutil.which("nsys"):
        return Path(found)
    with one_at_a_time():
        if not cache.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache.parent, prefix="nsys-") as folder:
                _assemble(_unpack(Path(folder))).rename(cache)
    return cache / "bin" / "nsys"


def _unpack(folder: Path) -> Path:
    """Download the packages through the machine's own mirror, and unpack them into the root that is returned."""
    for name in ("lists/partial", "cache/archives/partial", "packages", "root"):
        (folder / name).mkdir(parents=True)
    # One line a list of the machine's apt: where it comes from, the suite, the part, and who made it.
    listed = run("apt-get", "indextargets", "--format", "$(SITE)|$(CODENAME)|$(COMPONENT)|$(ORIGIN)|$(LABEL)").splitlines()
    mains = [line.split("|")[:2] for line in listed if line.endswith("|main|Debian|Debian")]
    mirror, suite = next((site, suite) for site, suite in mains if "-" not in suite)
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    sources = folder / "sources.list"
    sources.write_text(f"deb {signed} {mirror} {suite} main\ndeb {signed} {mirror} experimental non-free\n")
    # Lists, cache and sources of its own: the machine's stay as they are.
    places = {"Etc::sourcelist": sources, "Etc::sourceparts": "/dev/null", "State::lists": folder / "lists"}
    options = [f"-oDir::{name}={place}" for name, place in (places | {"Cache": folder / "cache"}).items()]
    apt = ("apt-get", "-qq", *options, "-oAPT::Sandbox::User=root")
    run(*apt, "update")
    run(*apt, "download", *(f"{name}/experimental" for name in _EXPERIMENTAL), *_OF_THIS_DEBIAN, cwd=folder / "packages")
    for package in (folder / "packages").glob("*.deb"):
        run("dpkg", "-x", package, folder / "root")
    return folder / "root"


def _assemble(root: Path) -> Path:
    """nsys looks for its two halves next to each other, and for its libraries in the host's half."""
    libraries = root / "usr" / "lib" / "x86_64-linux-gnu"
    bundle = libraries / "nsight-systems"
    host = (root / "usr" / "lib" / "nsight-systems" / "host-linux-x64").rename(bundle / "host-linux-x64")
    for library in _LIBRARIES:
        (host / library).unlink(missing_ok=True)
        shutil.copy(libraries / library, host)
    (bundle / "bin").mkdir()
    (bundle / "bin" / "nsys").symlink_to("../target-linux-x64/nsys")
    return bundle
