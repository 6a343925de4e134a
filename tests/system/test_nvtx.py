"""Our ranges reach a real nsys whichever nvtx is installed, or none, in CPU and CUDA builds of torch, without a GPU."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.system.jobs import ROOT, ended_well, environment, manifests, nvtx_ranges

pytestmark = [pytest.mark.system, pytest.mark.needs("nsys")]

#: The last release that does not ask NVTX's payload extension whether a profiler listens, and the newest.
RELEASES = ("0.2.11", "0.2.17")

#: A rank with the hook. What the package nvtx emits before and around it must not disturb, or be disturbed.
LOOP = """
import sys
from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ParallelLayout, ProfilingHook, start_under_nsys

folder, *theirs = sys.argv[1:]
config = ProfilingConfig(use_nsys_profiler=True, profile_step_start=2, profile_step_end=4, nsys_export_sqlite=True)
config.output_dir = folder
config.finalize()
layout = ParallelLayout(world_size=1)
start_under_nsys(config, rank=0, layout=layout, local_rank=0, cuda=False)
if theirs:
    import nvtx
    nvtx.push_range("theirs")
with ProfilingHook(config, rank=0, layout=layout) as hook:
    for iteration in range(5):
        with hook.iteration(iteration), hook.range("forward"):
            pass
"""


def installed(release: str) -> Path:
    """A folder that holds this release of nvtx for this Python, installed once into the checkout's cache."""
    folder = ROOT / ".cache" / "nvtx" / f"{release}-{sys.implementation.cache_tag}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                target = Path(made, "nvtx")
                asked = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
                done = subprocess.run([*asked, f"--target={target}", f"nvtx=={release}"], capture_output=True, text=True)
                if done.returncode:
                    pytest.skip(f"nvtx {release} cannot be had: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
                target.rename(folder)
    return folder


@pytest.mark.parametrize("release", [*RELEASES, None])
def test_every_range_of_the_window_is_there_with_any_nvtx_and_without(nsys: Path, tmp_path: Path, release: str | None) -> None:
    (tmp_path / "nvtx.py").write_text("raise ImportError('not installed')")
    theirs = ["theirs"] if release else []
    job = environment(nsys, PYTHONPATH=f"{installed(release) if release else tmp_path}:{ROOT}")
    ended_well([sys.executable, "-c", LOOP, tmp_path, *theirs], env=job)
    manifest = manifests(tmp_path, "iter-2-4")[0]
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("complete", [2, 3]), manifest
    assert release in (manifest["versions"].get("nvtx"), None), "the test ran with another nvtx"
    found = nvtx_ranges(tmp_path / "nsys" / "iter-2-4" / "rank-0.sqlite")
    assert found == ["bridge_profiling_window", "iteration_2", "forward", "iteration_3", "forward"]
