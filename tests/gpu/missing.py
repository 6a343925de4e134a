"""Says in one line what this Python lacks for `make test-gpu`; exit code 2 then. Imports nothing that could be missing."""

from __future__ import annotations

import importlib.util
import shutil
import sys

#: What is imported, and what gets it into an environment or a container.
_PACKAGES = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "nemo_run": "nemo_run",
    "omegaconf": "omegaconf",
    "msgspec": "msgspec",
    "isal": "isal",
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "psutil": "psutil",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
}


def missing() -> list[str]:
    """What stands in the way, each with the mend."""
    absent = [package for name, package in _PACKAGES.items() if not _importable(name)]
    told = [f"no {', '.join(absent)} (type: {sys.executable} -m pip install {' '.join(absent)})"] if absent else []
    if _importable("torch"):
        import torch

        if not torch.cuda.is_available():
            built = f"torch {torch.__version__} was built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
            told.append(f"{built} (name another Python: make test-gpu GPU_PYTHON=/path/to/python3)")
    if shutil.which("nsys") is None:
        print("without nsys on PATH most tests are skipped: install Nsight Systems, or put its folder on PATH", file=sys.stderr)
    return told


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    lacking = missing()
    if lacking:
        print(f"error: {sys.executable} cannot run the GPU tests: {'; '.join(lacking)}", file=sys.stderr)
    sys.exit(2 if lacking else 0)
