"""Packs Transformer Engine, Megatron Bridge and NeMo-Run for a GPU machine without a network.

    python tools/gpu_kit/make_kit.py 0.6.2 KIT [--architecture 90] [--without-nsys] [--shared-gpu]

0.6.2 or 0.3.1: the release of Megatron Bridge; `stacks.py` names all that goes with it. Run it where pip reaches a package
index, with a Python that has a CUDA build of torch, setuptools and wheel (Transformer Engine's source package asks for them
before pip downloads it; no GPU is needed). The kit is for Python 3.12 on x86-64 Linux, torch with CUDA 13. On that machine:

    python3 tools/gpu_kit/install.py KIT DEST && . DEST/env.sh

--shared-gpu adds an NCCL that lets two ranks share a GPU: the cases with two ranks then run on a machine with one.

KIT holds site.tar.xz (the packages), transformer_engine_torch-*.tar.gz (the torch extension's source, compiled there) and
nsys.tar.xz (from Debian's packages, where apt can get them).
"""

from __future__ import annotations

import argparse
import importlib.util
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.gpu_kit.install import SHARED_NCCL  # noqa: E402
from tools.gpu_kit.keep_architecture import keep_architecture  # noqa: E402
from tools.gpu_kit.stacks import COMMON, FROM_SOURCE, NCCL, STACKS  # noqa: E402

_TARGET = ("--python-version=3.12", "--implementation=cp", "--only-binary=:all:")
_PLATFORMS = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 18, 17)]
_PLATFORMS += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]

#: Parts of nsys that record other things than CUDA, NVTX and the operating system, and its reports; a third of its size.
_UNUSED_OF_NSYS = (
    "target-linux-x64/CollectX", "target-linux-x64/sqlite3", "target-linux-x64/libToolsInjectionCu*",
    "target-linux-x64/libToolsInjectionPython*", "target-linux-x64/nvgpucs", "host-linux-x64/sqlite3", "host-linux-x64/reports",
    "host-linux-x64/rules", "host-linux-x64/python",
)  # fmt: skip


def main() -> None:
    """Make the kit that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bridge", choices=STACKS)
    parser.add_argument("kit", type=Path)
    parser.add_argument("--architecture", type=int, default=90, help="of the GPUs: 90 is Hopper")
    parser.add_argument("--without-nsys", action="store_true")
    parser.add_argument("--shared-gpu", action="store_true")
    arguments = parser.parse_args()
    _check_python()
    stack, kit = STACKS[arguments.bridge], arguments.kit.absolute()
    kit.mkdir(parents=True, exist_ok=True)
    engine = stack.transformer_engine
    _pip("download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "-d", kit, f"transformer_engine_torch=={engine}")
    with tempfile.TemporaryDirectory(dir=kit) as folder:
        site = Path(folder, "site")
        packages = [*stack.packages, *COMMON, f"transformer_engine=={engine}"]
        _pip("install", "--no-deps", "--no-compile", "--target", site, *_TARGET, *_PLATFORMS, *packages)
        _pip("install", "--no-deps", "--no-compile", "--target", site, "--no-binary=:all:", *FROM_SOURCE)
        _add_core_library(site, engine, arguments.architecture, Path(folder))
        if arguments.shared_gpu:
            _add_nccl(site / SHARED_NCCL, arguments.architecture, Path(folder))
        # It would import JAX, where that is installed, in every rank.
        shutil.rmtree(site / "transformer_engine" / "jax")
        shutil.copytree(Path(__file__).parent / "stand_ins", site, dirs_exist_ok=True)
        # Its wheel has debugging information: 9 of 10 MB.
        _strip(*(site / "nvtx").rglob("*.so"))
        _pack(site, kit / "site.tar.xz")
        if not arguments.without_nsys:
            _pack(_nsys(Path(folder)), kit / "nsys.tar.xz")
    for path in sorted(kit.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB {path.name}")


def _check_python() -> None:
    lacks = [name for name in ("torch", "setuptools", "wheel") if importlib.util.find_spec(name) is None]
    if not lacks and importlib.import_module("torch").version.cuda is None:
        lacks = ["a CUDA build of torch"]
    if lacks:
        install = f"{sys.executable} -m pip install torch setuptools wheel"
        sys.exit(f"error: {sys.executable} lacks {', '.join(lacks)}. Type: {install}")


def _pip(*arguments: str | Path) -> None:
    environment = os.environ | {"NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "pytorch"}
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *map(str, arguments)], check=True, env=environment
    )


def _strip(*libraries: Path) -> None:
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-debug", *libraries], check=True)


def _add_core_library(site: Path, release: str, architecture: int, folder: Path) -> None:
    """Put Transformer Engine's core library into its package, with one architecture's code alone."""
    core = folder / "core"
    name = f"transformer_engine_cu13=={release}"
    _pip("install", "--no-deps", "--no-compile", "--target", core, *_TARGET, *_PLATFORMS, name)
    (information,) = core.glob("transformer_engine_cu13-*.dist-info")
    shutil.copytree(information, site / information.name)
    libraries = site / "transformer_engine" / "wheel_lib"
    shutil.copytree(core / "transformer_engine" / "wheel_lib", libraries, dirs_exist_ok=True)
    print(keep_architecture(libraries / "libtransformer_engine.so", architecture), flush=True)


def _add_nccl(place: Path, architecture: int, folder: Path) -> None:
    """Put an NCCL that knows shared GPUs where `install.py` has programs load it before torch's."""
    _pip("install", "--no-deps", "--no-compile", "--target", folder / "nccl", *_TARGET, *_PLATFORMS, NCCL)
    place.parent.mkdir()
    shutil.copy(folder / "nccl" / "nvidia" / "nccl" / "lib" / place.name, place)
    _strip(place)
    print(keep_architecture(place, architecture), flush=True)


def _nsys(folder: Path) -> Path:
    """The nsys that system tests assemble, without what these tests never use."""
    from tests.system.nsys_install import working_nsys

    # One that is installed has its parts all over the machine.
    os.environ["PATH"] = os.pathsep.join(
        path for path in os.environ["PATH"].split(os.pathsep) if not Path(path, "nsys").exists()
    )
    bundle = working_nsys(folder / "nsys").parent.parent
    for pattern in _UNUSED_OF_NSYS:
        for unused in bundle.glob(pattern):
            shutil.rmtree(unused) if unused.is_dir() else unused.unlink()
    return bundle


def _pack(folder: Path, archive: Path) -> None:
    """All of a folder, without the paths that lead to it."""
    # Most of it is x86 code, and nsys' parts repeat each other across tens of MB: 26 MB instead of the default's 32.
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}]
    with lzma.open(archive, "w", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)


if __name__ == "__main__":
    main()
