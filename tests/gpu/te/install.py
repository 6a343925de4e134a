"""Installs a kit of `make_kit.py` on a GPU machine, without a network and without touching the machine's Python.

    python3 tests/gpu/te/install.py KIT DEST [--save FOLDER]
    . DEST/env.sh

Unpacks the packages and nsys into DEST, compiles Transformer Engine's torch extension with all cores, and compares its layers
with torch's own on a GPU. KIT/te_torch_ext.tar.xz replaces the compilation where it can be imported; --save writes that file.
NVLink multicast stays off in env.sh: a program that uses it and dies can leave a server's GPUs unusable for all its users.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
_EXTENSION = "te_torch_ext.tar.xz"

#: Among a kit's packages: an NCCL for ranks that share a GPU. It is loaded before torch's.
SHARED_NCCL = "shared_gpu/libnccl.so.2"

#: Loaded with it. Userbuffers asks CUDA whether a rank's GPU can access its peer's. For the same GPU, CUDA answers no.
_SAME_GPU = "int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return 0; }"

#: Imported by the packages, and not in the kit: every machine that trains with torch has them.
_EXPECTED = (
    "torch", "numpy", "pyarrow", "psutil", "pytest", "pytest_timeout", "rich", "typer", "jinja2", "networkx", "httpx",
    "requests", "yaml", "regex", "tqdm", "safetensors", "packaging", "filelock", "fsspec", "tensorboard", "six", "accelerate",
    "onnxscript", "click", "absl", "pyre_extensions", "typing_inspect", "zipp", "prometheus_client",
)  # fmt: skip


def main() -> None:
    """Install the kit that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--save", type=Path, help=f"folder for {_EXTENSION}, when the extension is compiled")
    arguments = parser.parse_args()
    kit, dest = arguments.kit.absolute(), arguments.dest.absolute()
    missing = [name for name in _EXPECTED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"warning: {sys.executable} lacks {', '.join(missing)}", flush=True)
    _unpack(kit / "site.tar.xz", dest / "site")
    if (kit / "nsys.tar.xz").is_file():
        _unpack(kit / "nsys.tar.xz", dest / "nsys")
    environment = write_environment(dest)
    libraries = dest / "site" / "transformer_engine" / "wheel_lib"
    if not _prebuilt(kit, libraries, environment):
        _compile(kit, dest, libraries, environment)
        if arguments.save is not None:
            arguments.save.mkdir(parents=True, exist_ok=True)
            with tarfile.open(arguments.save / _EXTENSION, "w:xz") as tar:
                for library in libraries.glob("transformer_engine_torch*.so"):
                    tar.add(library, library.name)
    code = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "check.py")], env=environment, cwd="/", check=False
    ).returncode
    print(f"ready. Type: . {dest / 'env.sh'}" if code == 0 else "the check failed", flush=True)
    sys.exit(code)


def _unpack(archive: Path, folder: Path) -> None:
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    print(f"unpacked {archive.name} in {time.monotonic() - started:.0f} s", flush=True)


def write_environment(dest: Path) -> dict[str, str]:
    """Write DEST/env.sh.

    Returns:
        The environment that a shell has after reading it.
    """
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations
    nvidia = Path(torch).parent / "nvidia"
    libraries = [str(nvidia / name / "lib") for name in ("cudnn", "cu13", "nccl")]
    in_front = {
        "PYTHONPATH": [str(dest / "site")],
        "LD_LIBRARY_PATH": libraries,
        "PATH": [str(dest / "nsys" / "bin")],
    }
    settings = {
        # Transformer Engine loads the very libraries that torch has loaded.
        "CUDNN_PATH": str(nvidia / "cudnn"), "NVRTC_PATH": str(nvidia / "cu13"), "CURAND_PATH": str(nvidia / "cu13"),
        "NVTE_FRAMEWORK": "pytorch",
        "UB_SKIPMC": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    toolkit = next(
        (Path(home) for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if Path(home, "include/crt").is_dir()),
        None,
    )
    if toolkit is not None:
        settings |= {"CUDA_HOME": str(toolkit), "NVTE_CUDA_INCLUDE_DIR": str(toolkit / "include")}
    shared = dest / "site" / SHARED_NCCL
    if shared.is_file():
        same_gpu = dest / "same_gpu.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(same_gpu)]
        subprocess.run(command, input=_SAME_GPU, text=True, check=True)
        settings |= {"LD_PRELOAD": f"{shared} {same_gpu}", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    lines += [f'export {name}="{":".join(paths)}${{{name}:+:${name}}}"' for name, paths in in_front.items()]
    (dest / "env.sh").write_text("\n".join(lines) + "\n")
    fronts = {name: os.pathsep.join([*paths, *filter(None, [os.environ.get(name)])]) for name, paths in in_front.items()}
    return os.environ | settings | fronts


def _prebuilt(kit: Path, libraries: Path, environment: dict[str, str]) -> bool:
    """Whether the kit holds an extension that can be imported here."""
    archive = kit / _EXTENSION
    if not archive.is_file():
        return False
    with tarfile.open(archive) as tar:
        tar.extractall(libraries, filter="data")
    command = [sys.executable, "-W", "ignore", "-c", "import transformer_engine.pytorch"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return True
    print(f"{archive.name} cannot be imported here: {done.stderr.strip().splitlines()[-1]}", flush=True)
    for library in libraries.glob("transformer_engine_torch*.so"):
        library.unlink()
    return False


def _compile(kit: Path, dest: Path, libraries: Path, environment: dict[str, str]) -> None:
    (archive,) = kit.glob("transformer_engine_torch-*.tar.gz")
    _unpack(archive, dest / "source")
    source = dest / "source" / archive.name.removesuffix(".tar.gz")
    command = [sys.executable, "-W", "ignore", str(HERE / "build_extension.py"), str(source), str(dest / "extension")]
    # Transformer Engine is not whole yet, and torch must not look for it.
    if subprocess.run(command, env=environment | {"PYTHONPATH": ""}, check=False).returncode:
        sys.exit(f"error: the extension does not compile; the compiler's messages are in {dest / 'extension' / 'log'}")
    for library in (dest / "extension").glob("transformer_engine_torch*.so"):
        library.rename(libraries / library.name)


if __name__ == "__main__":
    main()
