"""What a stranger gets: a fresh clone trains and profiles, whichever Python is there."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.jobs import ROOT, ended_well

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


def interpreter(version: str) -> str | None:
    """A Python of this version that `make setup` takes, or None: a shim of pyenv may exist and fail."""
    candidates = [f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    found = filter(shutil.which, candidates)
    return next((each for each in found if not subprocess.run([each, "-c", "import venv, ensurepip"]).returncode), None)


#: What somebody who has not built this project yet does not have in the environment.
OURS = {"VIRTUAL_ENV", "PYTHONPATH", "NEMORUN_HOME", "MAKEFLAGS", "MAKELEVEL", "TMPDIR", "TORCHDYNAMO_DISABLE"}

#: What `make setup` installs on each Python.
MEGATRON_CORE = {"3.12": "0.19.2", "3.13": "0.19.2"}


def make(clone: Path, *arguments: str) -> str:
    """Run make; what it prints. What the checkout has downloaded is not downloaded again, and only what is used is compiled."""
    cache = os.environ.get("UV_CACHE_DIR") or str(ROOT / ".cache" / "uv")
    settings = {"UV_CACHE_DIR": cache, "UV_COMPILE_BYTECODE": "0"}
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | settings
    done = ended_well(["make", *arguments], cwd=clone, env=environment, timeout=1200)
    return done.stdout + done.stderr


def test_make_profile_on_a_fresh_clone_with_each_python(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    default = next(version for version in ("3.12", "3.13") if interpreter(version))
    printed = make(clone, "profile")
    assert (f"Python {default}: " in printed, "window 4-6" in printed) == (True, True)
    assert make(clone, "setup") == "", "something is set up anew"
    # Another Python takes the environment's place.
    others = [version for version in MEGATRON_CORE if version != default and interpreter(version)]
    for version in others:
        assert "window 4-6" in make(clone, "profile", f"PYTHON={interpreter(version)}")
    manifests = [json.loads(path.read_text()) for path in (clone / ".runs").rglob("rank-*.json")]
    assert len(manifests) == 2 + 2 * len(others)
    assert all(manifest["status"] == "complete" for manifest in manifests)
    assert all(manifest["captured"]["iterations"] == [4, 5] for manifest in manifests)
    versions = {manifest["versions"]["megatron-core"] for manifest in manifests}
    assert versions == {MEGATRON_CORE[version] for version in (default, *others)}
    changed = ended_well(["git", "status", "--porcelain"], cwd=clone).stdout
    assert changed == "", "the run changed tracked files, or left some that git does not ignore"
