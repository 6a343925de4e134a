"""Where the tests find a Python that can import Megatron Bridge, and how it trains there."""

import functools
import os
import subprocess
import sys
import tempfile
import zlib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]

_SCRIPT = Path(__file__).with_name("bridge_pretrain.py")

#: The Bridge release for each release of megatron-core: what `tests/versions/bridge-*.txt` install.
BRIDGE_FOR_CORE = {"0.18": "0.5.1", "0.19": "0.6.2"}

#: What would make a rank believe that it is part of another job, or write somewhere else.
_NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BRIDGE_PROFILING_DIR", "TENSORBOARD_DIR")


@functools.cache
def _found() -> tuple[str, list[str]] | str:
    """A Python that can import Megatron Bridge, and the folders to put on its path; or why there is none, with what to type."""
    if named := os.environ.get("BRIDGE_PYTHON"):
        return named, []
    if _distribution("megatron-bridge"):
        return sys.executable, []
    core = _distribution("megatron-core")
    if core is None:
        return "megatron-core is not installed"
    release = BRIDGE_FOR_CORE.get(core.rpartition(".")[0])
    if release is None:
        return f"no release of Megatron Bridge is known for megatron-core {core}; name a Python that has both: BRIDGE_PYTHON=…"
    try:
        return sys.executable, [str(_overlay(release))]
    except subprocess.CalledProcessError as error:
        return f"pip install --no-deps -r tests/versions/bridge-{release}.txt failed: {error.stderr[-300:]}"


def why_no_bridge() -> str | None:
    """Why no Megatron Bridge can be imported here, or None. May install one into `.cache`."""
    return _found() if isinstance(_found(), str) else None


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _overlay(release: str) -> Path:
    """A folder with Bridge and its pins, for the front of the path: the environment keeps its own transformers."""
    requirements = ROOT / "tests" / "versions" / f"bridge-{release}.txt"
    # Other pins make another folder.
    name = f"{release}-py{sys.version_info.major}.{sys.version_info.minor}-{zlib.crc32(requirements.read_bytes()):08x}"
    place = ROOT / ".cache" / "bridge" / name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            command = [sys.executable, str(ROOT / "tools" / "install.py"), "--no-deps", "--target", f"{folder}/site"]
            subprocess.run([*command, "-r", str(requirements)], check=True, capture_output=True, text=True)
            if not place.exists():  # made by another process of tests meanwhile
                (Path(folder) / "site").rename(place)
    return place


def train_every_case(folder: Path) -> None:
    """What `bridge_pretrain.py` leaves in a folder."""
    assert not isinstance(_found(), str), _found()
    python, path = _found()
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    environment |= {
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
        "CUDA_VISIBLE_DEVICES": "",
        # A thread pool would not survive a fork.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run([python, str(_SCRIPT), str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"Megatron Bridge cannot be loaded:\n{done.stderr[-3000:]}"
