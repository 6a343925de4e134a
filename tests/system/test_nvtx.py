"""Our ranges reach a real nsys whichever nvtx is installed, or none, in CPU and CUDA builds of torch, without a GPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.jobs import ROOT, ended_well, environment, manifests, nvtx_ranges

pytestmark = [pytest.mark.system, pytest.mark.needs("nsys")]

#: The last release that does not ask NVTX's payload extension whether a profiler listens, and the newest.
RELEASES = ("0.2.11", "0.2.17")


def installed(release: str) -> Path:
    """A folder that holds this release of nvtx for this Python, installed once into the checkout's cache."""
    folder = ROOT / ".cache" / "nvtx" / f"{release}-{sys.implementation.cache_tag}"
    if not folder.exists():
        made = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(made, ignore_errors=True)
        asked = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*asked, f"--target={made}", f"nvtx=={release}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"nvtx {release} cannot be had: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        made.rename(folder)
    return folder


@pytest.mark.parametrize("release", [*RELEASES, None])
def test_every_range_of_the_window_is_there_with_any_nvtx_and_without(nsys, tmp_path, release):
    (tmp_path / "nvtx.py").write_text("raise ImportError('not installed')")
    # Its own range must not disturb ours, or be disturbed.
    theirs = {"OWN_RANGE": "theirs"} if release else {}
    job = environment(nsys, PYTHONPATH=f"{installed(release) if release else tmp_path}:{ROOT}", **theirs)
    done = ended_well([sys.executable, Path(__file__).with_name("nsys_loop.py"), tmp_path, "nsys_export_sqlite=true"], env=job)
    manifest = manifests(tmp_path, "iter-2-4")[0]
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("complete", [2, 3]), manifest
    assert release in (manifest["versions"].get("nvtx"), None), "the test ran with another nvtx"
    lost, before = "does not record the ranges of nvtx", (done.stderr + done.stdout).partition("capturing iterations")[0]
    assert (lost in before, lost in str(manifest["profilers"][0]["notes"])) == (release == "0.2.17",) * 2, done.stderr
    found = nvtx_ranges(tmp_path / "nsys" / "iter-2-4" / "rank-0.sqlite")
    assert found == ["bridge_profiling_window", "iteration_2", "work", "iteration_3", "work"]
