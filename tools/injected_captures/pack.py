"""Packs what runs captured as the repository keeps it: small, and nothing in it that names a machine or a user.

A run's folder keeps its layout. What changes: captures lose what no reader reads (`lean.py`, which refuses to lose more) and
become xz; manifests list them by their new names and sizes; paths and host names become neutral ones. nsys' own reports are
left out where their SQLite export is there.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tools.injected_captures import lean

ROOT = Path(__file__).resolve().parents[2]

#: Shorter names are words that occur in captures by themselves.
_SHORTEST_HOST = 5

#: Files beside the captures that are kept.
_BESIDE = ("planted.json", "losses.jsonl")

_PACKING = {".gz": gzip.decompress, ".xz": lzma.decompress}

#: What no packed file may hold: directories of machines, and what users and services call themselves.
TELLING = re.compile(
    r"(?<![\w./-])/(?:root|home|work|tmp|opt|mnt|Users|scratch|data)/[\w.-]+|GPU-[0-9a-f]{8}-"
    r"|(?<![a-z.])[a-z.]{2,32}+@[a-z-]{2,32}\.[a-z]{2}"
)


class Neutral:
    """Replaces what names a machine or a user, wherever it stands as a whole name or as the beginning of a path.

    Args:
        scratch: the folder that the runs lie in.
    """

    def __init__(self, scratch: Path) -> None:
        paths = {str(scratch): "/planted", str(ROOT): "/checkout"}
        for place, path in enumerate(dict.fromkeys(filter(os.path.isdir, [*sys.path, sys.prefix, sys.base_prefix]))):
            # The system's own directories are the same on every machine.
            if not path.startswith(("/usr", "/lib")) and path != "/":
                paths.setdefault(os.path.abspath(path), f"/python{place}")
        nsys = shutil.which("nsys")
        if nsys is not None and not nsys.startswith("/usr"):
            paths.setdefault(str(Path(nsys).resolve().parents[1]), "/nsys")
        home = os.path.expanduser("~")
        if home not in ("/", "~", "/root"):
            paths.setdefault(home, "/home/user")
        host = socket.gethostname()
        self._rename(paths | ({host: "node-0"} if len(host) >= _SHORTEST_HOST else {}))

    @classmethod
    def of(cls, names: dict[str, Any]) -> Neutral:
        """For captures of another machine.

        Args:
            names: `paths`, directories of that machine, that of the runs first and that of the checkout second.
        """
        neutral = cls.__new__(cls)
        places = {path: f"/python{place}" for place, path in enumerate(dict.fromkeys(names["paths"]))}
        runs, checkout = names["paths"][:2]
        neutral._rename(
            {path: new for path, new in places.items() if not path.startswith(("/usr", "/lib"))}
            | {runs: "/everyday", checkout: "/checkout"}
        )
        return neutral

    def _rename(self, new: dict[str, str]) -> None:
        self._new = new
        longest_first = sorted(self._new, key=len, reverse=True)
        self._old = re.compile("|".join(rf"(?<![\w-]){re.escape(old)}(?![\w-])" for old in longest_first))

    def __call__(self, text: str) -> str:
        """The text with other names in it."""
        return self._old.sub(lambda found: self._new[found[0]], text)


def pack_runs(runs: Sequence[tuple[str, Path]], target: Path, scratch: Path) -> dict[str, list[tuple[str, int]]]:
    """Pack the profiles of each run.

    Args:
        runs: each case's name and the folder it ran in.
        target: where a folder for each case is made; emptied first.
        scratch: the folder that the runs lie in.

    Returns:
        Each case's files, relative to its folder, and their bytes.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    neutral = Neutral(scratch)
    jobs = []
    for case, folder in runs:
        profiles = folder / "profiles"
        # Manifests follow; requests for captures were none.
        captures = (path for kind in ("torch", "nsys", "memory") for path in profiles.glob(f"{kind}/**/*"))
        files = sorted(path for path in captures if path.is_file())
        exported = {path.with_suffix("") for path in files if path.suffix == ".sqlite"}
        for path in files:
            hidden = any(part.startswith(".") for part in path.relative_to(profiles).parts)
            if not hidden and not (path.suffix == ".nsys-rep" and path.with_suffix("") in exported):
                jobs.append((path, target / case / path.relative_to(profiles).parent / _packed_name(path.name), neutral))
        for name in _BESIDE:
            if (folder / name).is_file():
                (target / case).mkdir(parents=True, exist_ok=True)
                (target / case / name).write_text(neutral((folder / name).read_text(encoding="utf-8")), encoding="utf-8")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 32)) as workers:
        list(workers.map(_pack_file, jobs))
    for case, folder in runs:
        for path in sorted((folder / "profiles").rglob("manifest/*/rank-*.json")):
            place = target / case / path.relative_to(path.parents[2])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(_packed_manifest(path, target / case, neutral), encoding="utf-8")
    return {
        case: [
            (str(path.relative_to(target / case)), path.stat().st_size)
            for path in sorted((target / case).rglob("*"))
            if path.is_file()
        ]
        for case, _ in runs
    }


def _packed_name(name: str) -> str:
    return f"{Path(name).stem if Path(name).suffix in _PACKING else name}.xz"


def _pack_file(job: tuple[Path, Path, Neutral]) -> None:
    """Pack one capture.

    Raises:
        ValueError: the readers do not make of it what they make of the whole one, or it names a machine.
    """
    path, target, neutral = job
    raw = _PACKING.get(path.suffix, bytes)(path.read_bytes())
    plain = Path(path.stem if path.suffix in _PACKING else path.name)
    small = lean.lean(raw, plain.suffix, neutral)
    if told := TELLING.search(small.decode("utf-8", "replace")):
        raise ValueError(f"{path} names what is of one machine: {told[0]!r}")
    with tempfile.TemporaryDirectory() as scratch:
        whole, fresh = Path(scratch, plain), Path(scratch, f"{plain.name}.xz")
        whole.write_bytes(raw)
        fresh.write_bytes(lean.packed(small))
        lean.check(whole, fresh, lean.SOURCES[plain.suffix], neutral)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fresh, target)


def _packed_manifest(path: Path, target: Path, neutral: Neutral) -> str:
    manifest = json.loads(neutral(path.read_text(encoding="utf-8")))
    host, manifest["host"] = manifest["host"], "node-0"
    for profiler in manifest["profilers"]:
        kept = []
        for artifact in profiler["artifacts"]:
            packed = Path(artifact["path"]).with_name(_packed_name(Path(artifact["path"]).name))
            if (target / packed).is_file():
                kept.append({"path": str(packed), "bytes": (target / packed).stat().st_size})
        profiler["artifacts"] = kept
        profiler["notes"] = [note.replace(f".{host}.", ".node-0.") for note in profiler["notes"]]
    return json.dumps(manifest, indent=1) + "\n"
