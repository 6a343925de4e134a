"""Compiles Transformer Engine's torch extension without a network, setuptools or nvcc.

    python3 build_extension.py SOURCE OUT [--jobs N]

SOURCE is the unpacked source package `transformer_engine_torch`; OUT gets the shared library and a log for each source file.
The compiler flags are those of Transformer Engine's own setup. All of it is C++, about 30 files; the header files of torch,
cuDNN and NCCL come from torch's own installation, those of CUDA from a toolkit. Minutes on 16 cores, most of an hour on two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

#: torch 2.12's header files need C++20; `TE_STD` overrides it.
_STANDARD = "c++20" if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 12) else "c++17"


def main() -> int:
    """Compile and link; 1 when a file does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    source, out = arguments.source.resolve(), arguments.out.resolve()
    for folder in ("log", "objects"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # The largest first: they take longest.
    files = sorted((source / "csrc").rglob("*.cpp"), key=lambda path: -path.stat().st_size)
    command = [os.environ.get("CXX", "g++"), *_flags(source)]
    print(f"compiling {len(files)} files with {arguments.jobs} jobs against torch {torch.__version__}", flush=True)
    if arguments.jobs < len(files) / 2:
        command = _with_precompiled_header(command, source, out)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        compiled = list(pool.map(lambda file: _compile(command, source, file, out), files))
    if not all(compiled):
        return 1
    library = _link(command[0], [path for path in compiled if path], out)
    print(f"{library}: {library.stat().st_size / 1e6:.1f} MB in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _flags(source: Path) -> list[str]:
    packages = Path(torch.__file__).parent.parent / "nvidia"
    toolkit = _toolkit_headers()
    headers = source / "common_headers"
    include = [
        # In the order of Transformer Engine's own setup: `common.h` is a file of `common` first.
        headers, headers / "common", headers / "common" / "include", source / "csrc", toolkit, toolkit / "cccl",
        *(packages / name / "include" for name in ("cudnn", "nccl", "cu13")),
        *map(Path, cpp_extension.include_paths()), Path(sysconfig.get_path("include")),
    ]  # fmt: skip
    return [
        "-O3", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fno-strict-overflow", "-w",
        f"-std={os.environ.get('TE_STD', _STANDARD)}",
        "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=transformer_engine_torch",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{folder}" for folder in include if folder.is_dir()),
    ]  # fmt: skip


def _toolkit_headers() -> Path:
    """Those of a whole toolkit: the header files in torch's own packages lack `crt`."""
    homes = (os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME, "/usr/local/cuda")
    found = [Path(home) / "include" for home in homes if home and (Path(home) / "include" / "crt").is_dir()]
    if not found:
        sys.exit("no CUDA toolkit with header files: set CUDA_HOME")
    return found[0]


def _with_precompiled_header(command: list[str], source: Path, out: Path) -> list[str]:
    """The command with all of torch's header files compiled once: half the work, and no sooner where every file has a core."""
    header = out / "objects" / "header.h"
    header.write_text('#include "extensions.h"\n#include "pybind.h"\n')
    compiler, *flags = command
    compiled = Path(f"{header}.gch")
    if not compiled.is_file():
        subprocess.run([compiler, "-x", "c++-header", *flags, str(header), "-o", str(compiled)], check=True)
        print("  ok   precompiled header", flush=True)
    return [compiler, "-include", str(header), *flags]


def _compile(command: list[str], source: Path, file: Path, out: Path) -> Path | None:
    """The object file, taken as it is where a run before has made it; None when the file does not compile."""
    name = "_".join(file.relative_to(source / "csrc").with_suffix("").parts)
    target, started = out / "objects" / f"{name}.o", time.monotonic()
    if target.is_file():
        return target
    partial = target.with_suffix(".part")
    done = subprocess.run([*command, "-c", str(file), "-o", str(partial)], capture_output=True, text=True, check=False)
    (out / "log" / f"{name}.log").write_text(" ".join(done.args) + "\n" + done.stdout + done.stderr)
    print(f"  {'ok  ' if done.returncode == 0 else 'FAIL'} {name} {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode:
        print("\n".join([line for line in done.stderr.splitlines() if "error" in line][:5]), flush=True)
        return None
    partial.replace(target)
    return target


def _link(compiler: str, objects: list[Path], out: Path) -> Path:
    """Link against torch's CUDA libraries by name, so that symbols resolve in whatever order things are imported."""
    site = Path(torch.__file__).parent.parent
    runtime = sorted((site / "nvidia" / "cu13" / "lib").glob("libcudart.so.*"))
    library = out / f"transformer_engine_torch{sysconfig.get_config_var('EXT_SUFFIX')}"
    torch_libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-lc10_cuda", "-ltorch_cuda"]
    subprocess.run(
        [
            compiler, "-shared", "-s", *map(str, objects), f"-L{site / 'torch' / 'lib'}", "-Wl,--no-as-needed",
            *torch_libraries, *(map(str, runtime[:1]) if runtime else ["-lcudart"]), "-o", str(library),
        ],
        check=True,
    )  # fmt: skip
    return library


if __name__ == "__main__":
    sys.exit(main())
