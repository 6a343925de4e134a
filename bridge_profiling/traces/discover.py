"""Finds the captures of a run, ours or of any origin, with their ranks and manifests, and chooses those of one window."""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge_profiling.common.errors import TraceError, require
from bridge_profiling.common.printable import shell_path
from bridge_profiling.common.regular_files import modified_ns
from bridge_profiling.manifest import RankCapture, find_captures, read_manifest
from bridge_profiling.traces import files
from bridge_profiling.traces.types import Caveat, RankSource, Source, caveat

#: Codes of caveats that say which of several windows is shown.
WHICH_WINDOW = frozenset(("captures_skipped", "several_windows", "newer_captured_nothing"))

#: Codes of caveats about a manifest that is not used or differs from its capture, and about captures that are not there.
ABOUT_MANIFESTS = frozenset(
    ("manifest_unreadable", "manifest_contradicts", "manifest_differs", "captures_missing", "captured_nothing")
)

#: Other folders that a caveat names.
_NAMED_FOLDERS = 6

#: Files of other tools that an error names.
_NAMED_OTHERS = 3

#: No job has a million ranks: a longer number is of something else, such as a time or a test.
_LAST_NUMBER = re.compile(r"[-_](\d{1,6})$")

#: The time in the names of torch's tensorboard_trace_handler, in ms or ns since 1970: host_process.time.
_WRITTEN = re.compile(r"\.(\d{13,19})$")

#: By the profilers' names, which are also those of their folders.
_SOURCES: dict[str, Source] = {"torch": "kineto", "nsys": "nsys", "memory": "memory"}


@dataclass(frozen=True)
class Capture:
    """One profiler's file of one rank, of any origin."""

    path: Path
    source: Source
    rank: int
    rank_source: RankSource
    manifest: RankCapture | None = None  # the rank's manifest, when it lists the file
    run: Path | None = None  # the directory that was named: a cache may be written below it


@dataclass
class FoundRun:
    """The captures in a directory or file."""

    root: Path
    captures: list[Capture]  # one per rank and source, by rank
    caveats: list[Caveat] = field(default_factory=list)  # files skipped for others, and ranks that are guesses
    errors: list[str] = field(default_factory=list)  # folders that cannot be read


def find_run(root: Path, cycle: int | None = None) -> FoundRun:
    """Every capture under a directory, of any origin, or the one in a file.

    A rank comes from the trace, else from the manifest, else from the file's name (`rank-3`, `rank3`, `snapshot_3.pickle`),
    else from the files' order. Of several captures of one rank by one profiler, those in the newest folder count. Of those in
    one folder, and in folders of a rank or a host each, every rank has one of the same cycle of a schedule that repeats.

    Args:
        root: what to search.
        cycle: the cycle, from 1 for the oldest; None for the newest.

    Raises:
        TraceError: `root` does not exist, or holds no capture.
        ProfilingConfigError: it holds no such cycle.
    """
    if not root.exists():
        raise TraceError(f"{root} does not exist")
    if root.is_file():
        file = files.named_file(root)
        _, manifests, unusable = _read_manifests(root.absolute().parents[:3][-1].glob("manifest/*/rank-*.json"))
        captures, differing = _with_ranks([file], manifests, root.parent)
        _newest(captures, root, cycle)
        return FoundRun(root, captures, [*unusable, *differing])
    listed = files.RunFiles(root)
    # For the folder of one window, the manifests next to it that describe it.
    written = listed.manifests or list(root.absolute().parent.parent.glob(f"manifest/{root.absolute().name}/rank-*.json"))
    usable, manifests, unusable = _read_manifests(written)
    # A damaged manifest looks like a damaged trace.
    described = set(written)
    found_files, left = files.listed_files(path for path in listed.files if path not in described)
    if not found_files:
        nothing = f"{root} holds no capture: no Kineto trace, nsys report or memory snapshot is under it"
        if packed := next((path for path in left if files.NAMED_RANK.search(path.name) and ".trace." in path.name), None):
            nothing += f"; {packed} is of no known format: if it is packed, unpack it"
        others = [text for path in (*left, *listed.folders) if (text := files.other_format(path))]
        others = others or [f"{path} is no capture" for path in left]
        if len(others) > _NAMED_OTHERS:
            others[_NAMED_OTHERS:] = [f"and {len(others) - _NAMED_OTHERS} more"]
        raise TraceError("; ".join([nothing, *others, *listed.errors, *(caveat.text for caveat in listed.caveats)]))
    found, differing = _with_ranks(found_files, manifests, root)
    captures, skipped = _newest(found, root, cycle)
    caveats = [*listed.caveats, *_newer_nothing(written, captures), *skipped, *_several_windows(captures, root)]
    caveats += [*unusable, *differing, *differences(usable, captures)]
    guessed = [capture for capture in captures if capture.rank_source == "order"]
    if guessed:
        caveats.append(caveat("ranks_guessed", count=len(guessed), name=guessed[0].path.name))
    errors = [*listed.errors, *files.unknown_formats([*left, *listed.folders], [each.path for each in captures])]
    below = [replace(capture, run=root) for capture in captures]
    return FoundRun(root, sorted(below, key=lambda capture: (capture.rank, capture.source)), caveats, errors)


def _read_manifests(paths: Iterable[Path]) -> tuple[list[RankCapture], dict[Path, RankCapture], list[Caveat]]:
    """Manifests, the same by the files they list, and a caveat for each that cannot be used or lists another one's file."""
    found: list[RankCapture] = []
    by_file: dict[Path, RankCapture] = {}
    caveats = []
    for path in sorted(paths):
        try:
            manifest = read_manifest(path)
        except TraceError as error:
            caveats.append(caveat("manifest_unreadable", file=path, error=error))
            continue
        if (named := files.NAMED_RANK.fullmatch(path.stem)) and int(named[1]) != manifest.rank:
            caveats.append(caveat("manifest_contradicts.named", file=path, rank=manifest.rank, named=named[1]))
            continue
        found.append(RankCapture(path.parents[2], path.parent.name, manifest))
    for capture in found:
        for path in map(files.resolved, capture.artifacts):
            first = by_file.setdefault(path, capture)
            # One nsys around a launcher writes one report of several ranks.
            if first is not capture and files.SUFFIXES.get(files.split(path)[1]) != "nsys":
                caveats.append(caveat("manifest_contradicts.twice", file=capture.path, path=path, other=first.path))
    return found, by_file, caveats


def differences(manifests: Iterable[RankCapture], captures: list[Capture]) -> list[Caveat]:
    """Caveats on files that manifests list and that are not there, and on files that their manifests do not list."""
    shown = {(each.manifest.root, each.manifest.folder) for each in captures if each.manifest is not None}
    present = {(capture.rank, capture.source, files.split(capture.path)[0]) for capture in captures}
    unlisted = {(files.resolved(each.path.parent), each.rank): each.path for each in captures if each.manifest is None}
    ranks = {capture.rank for capture in captures}
    caveats = []
    for each in manifests:
        why = each.manifest.reason or "the manifest gives no reason"
        for kind in _SOURCES if each.manifest.status != "missed" else ():
            if path := unlisted.get((files.resolved(each.root / kind / each.folder), each.rank)):
                status = f", because the capture {each.manifest.status}: {why}" if each.manifest.status == "failed" else ""
                caveats.append(caveat("manifest_contradicts.unlisted", file=each.path, path=path, status=status))
        if shown and (each.root, each.folder) not in shown:
            continue
        for profiler in each.manifest.profilers:
            listed = [each.root / artifact.path for artifact in profiler.artifacts]
            # A file that was packed or moved since has kept its name.
            named = {(each.rank, _SOURCES.get(profiler.name), files.split(path)[0]) for path in listed}
            if listed and named.isdisjoint(present) and not any(map(os.path.exists, listed)):
                caveats.append(caveat("captures_missing", (each.rank,), each.path, path=listed[0]))
        if shown and each.rank not in ranks and not each.artifacts and each.manifest.status in ("failed", "missed"):
            caveats.append(caveat("captured_nothing", (each.rank,), why=why))
    return caveats


def _with_ranks(
    found_files: list[files.CaptureFile], manifests: dict[Path, RankCapture], root: Path
) -> tuple[list[Capture], list[Caveat]]:
    """Captures with their ranks and manifests, and a caveat for each manifest of another rank than its capture."""
    captures, unnamed, caveats = [], [], []
    writers = _cycles_of_one_process(file for file in found_files if _rank(file, None, root, numbered=False) is None)
    for file in found_files:
        path, source = file.path, file.source
        manifest = manifests.get(files.resolved(path))
        named = _rank(file, manifest, root, numbered=path not in writers)
        if manifest is not None and named is not None and named[0] != manifest.rank:
            other = {"path": path, "other": named[0]}
            caveats.append(caveat("manifest_contradicts.rank", file=manifest.path, rank=manifest.rank, **other))
            manifest = None
        together = _ranks_in(path) if source == "nsys" else []
        if len(together) > 1:  # one nsys around a launcher: its report holds all ranks that it started
            captures += [
                Capture(path, source, rank, "order", manifest if manifest is not None and manifest.rank == rank else None)
                for rank in together
            ]
        elif named is None:
            unnamed.append((path, source, manifest))
        else:
            captures.append(Capture(path, source, *named, manifest))
    for source in dict.fromkeys(source for _, source, _ in unnamed):
        taken = {capture.rank for capture in captures if capture.source == source}
        free = (rank for rank in itertools.count() if rank not in taken)
        numbers: dict[Path, int] = {}  # by the process that wrote them: several can be its cycles
        for path, kind, manifest in unnamed:
            if kind == source:
                writer = writers.get(path) or path.with_name(
                    _WRITTEN.sub("", files.split(path)[0]) if _WRITTEN.search(files.split(path)[0]) else path.name
                )
                if writer not in numbers:
                    numbers[writer] = next(free)
                captures.append(Capture(path, source, numbers[writer], "order", manifest))
    return captures, caveats


def _ranks_in(path: Path) -> list[int]:
    """The ranks in one exported report; empty when it cannot be read: its reader will say why."""
    if files.split(path)[1] != ".sqlite":
        return []
    try:
        from bridge_profiling.traces.nsys.report import ranks_in_report  # on use: it imports pyarrow

        return ranks_in_report(path)
    except (ImportError, TraceError):
        return []


def _cycles_of_one_process(found_files: Iterable[files.CaptureFile]) -> dict[Path, Path]:
    """What stands for the process that wrote each of some traces, where numbers in their names are steps, and no ranks.

    Traces of one folder and one name but for its numbers are cycles of one process if it is the same in each, and no step is in
    two of them: ranks are other processes, or capture the same steps.
    """
    alike: defaultdict[Path, list[Path]] = defaultdict(list)
    for file in found_files:
        if file.source == "kineto" and _LAST_NUMBER.search(files.split(file.path)[0]):
            alike[file.path.with_name(re.sub(r"\d+", "#", file.path.name))].append(file.path)
    found: dict[Path, Path] = {}
    for writer, paths in alike.items():
        process, seen = None, frozenset[int]()
        for path in paths if len(paths) > 1 else ():  # those of ranks differ in the first two: the others are not read
            wrote, steps = files.steps_of(path)
            if not steps or steps & seen or wrote != (process or wrote):
                break
            process, seen = wrote, seen | steps
        else:
            found |= dict.fromkeys(paths if process else (), writer)
    return found


def _rank(
    file: files.CaptureFile, manifest: RankCapture | None, root: Path, *, numbered: bool = True
) -> tuple[int, RankSource] | None:
    """The rank of a file; `numbered` says that the last number in its name can be one."""
    path = file.path
    if file.rank is not None:
        return file.rank, "trace"
    if manifest is not None:
        return manifest.rank, "manifest"
    folders = path.relative_to(root).parent.parts if path.is_relative_to(root) else ()
    for part in (files.split(path)[0], *reversed(folders)):
        if named := files.NAMED_RANK.findall(part):
            return int(named[-1]), "file name"
    if numbered and (number := _LAST_NUMBER.search(files.split(path)[0])):
        return int(number[1]), "file name"
    return None


def _newest(captures: list[Capture], root: Path, cycle: int | None) -> tuple[list[Capture], list[Caveat]]:
    """Of each source, the captures of one cycle in the newest place.

    Captures of one rank in several places, or of several windows by their manifests, are never shown together.
    """
    kept: list[Capture] = []
    caveats = []
    most = 1
    for source in sorted({capture.source for capture in captures}):
        mine = [capture for capture in captures if capture.source == source]
        ranks = {capture.rank for capture in mine}
        windows = {(capture.manifest.root, capture.manifest.folder) for capture in mine if capture.manifest is not None}
        if len(mine) > len(ranks) or len(windows) > 1:
            age = _age_of(mine)
            place = max(_places(mine), key=lambda place: max(map(age, place)))
            cycles = _cycles(place, age)
            most = max(most, len(cycles))
            number = _complete(cycles) if cycle is None else 1 if len(cycles) == 1 else cycle
            chosen = list(cycles[number - 1].values()) if number <= len(cycles) else []
            skipped = [capture for capture in mine if capture not in chosen]
            if chosen and skipped:
                caveats.append(_skipped(source, chosen, number, len(cycles), skipped, root, age))
            mine = chosen
        kept += mine
    cycles_in_words = "one cycle" if most == 1 else f"cycles 1 to {most}"
    require(cycle is None or 1 <= cycle <= most, f"--cycle {cycle} is not in {root}", why=f"it holds {cycles_in_words}")
    return kept, caveats


def _places(captures: list[Capture]) -> list[list[Capture]]:
    """Captures that can be of one window together: those of a folder, or of folders that hold a rank or a host each."""
    described = {capture.path.parent for capture in captures if capture.manifest is not None}
    others = [capture for capture in captures if capture.path.parent not in described]
    of_rank = defaultdict(set)
    for capture in others:
        of_rank[capture.rank].add(capture.path.parent)
    apart = all(len(folders) == 1 for folders in of_rank.values())
    groups: defaultdict[str, list[Capture]] = defaultdict(list)
    for capture in captures:
        folder = str(capture.path.parent)
        pattern = "" if apart else re.sub(r"\d+", "#", folder)
        groups[folder if capture.path.parent in described else pattern].append(capture)
    places: list[list[Capture]] = []
    for group in groups.values():
        folders: defaultdict[Path, list[Capture]] = defaultdict(list)
        for capture in group:
            folders[capture.path.parent].append(capture)
        of_one_rank = all(len({capture.rank for capture in held}) == 1 for held in folders.values())
        places += [group] if apart or of_one_rank else list(folders.values())
    return places


#: Compares captures by age.
_Age = Callable[[Capture], tuple[Any, str]]


def _age_of(captures: Iterable[Capture]) -> _Age:
    """When captures were written: TensorBoard's names say it, or numbers if paths differ by them alone. Copies keep both."""
    alike = {re.sub(r"\d+", "#", str(capture.path)) for capture in captures}
    ordered = len(alike) == 1 and all(capture.manifest is None for capture in captures)

    def age(capture: Capture) -> tuple[Any, str]:
        named = _WRITTEN.search(files.split(capture.path)[0])
        if named:
            return int(named[1].ljust(19, "0")), str(capture.path)
        if ordered:
            return [int(number) for number in re.findall(r"\d+", files.NAMED_RANK.sub("", str(capture.path)))], str(
                capture.path
            )
        return modified_ns(capture.path), str(capture.path)

    return age


def _worker(path: Path) -> str:
    """What names the process that wrote a file, apart from which of its files this is."""
    stem = files.split(path)[0]
    return _WRITTEN.sub("", stem) if _WRITTEN.search(stem) else re.sub(r"\d+", "#", stem)


#: A capture of each rank. A copy's content can give another rank than its name: both are kept, and their reader says which
#: is whole.
_Cycle = dict[tuple[int, str | None], Capture]


def _cycles(place: list[Capture], age: _Age) -> list[_Cycle]:
    """The captures of each cycle of a schedule that repeats, by time."""
    by_key: defaultdict[tuple[int, str | None], list[Capture]] = defaultdict(list)
    cycles: list[_Cycle] = [{}]
    for capture in sorted(place, key=age):
        key = capture.rank, (files.NAMED_RANK.findall(files.split(capture.path)[0]) or [None])[-1]
        by_key[key].append(capture)
        if key in cycles[-1]:
            cycles.append({})
        cycles[-1][key] = capture
    if len(set(map(len, by_key.values()))) == 1:
        # Clocks of hosts differ: where all ranks wrote equally many, the first of each are of one cycle, and so on.
        return [dict(zip(by_key, each, strict=True)) for each in zip(*by_key.values(), strict=True)]
    return cycles


def _complete(cycles: list[_Cycle]) -> int:
    """The number of the newest cycle, from 1, or of an older one of the same processes that holds more ranks."""
    found = len(cycles)
    for number in range(len(cycles) - 1, 0, -1):
        older, newer = cycles[number - 1], cycles[found - 1]
        if older.keys() > newer.keys() and all(_worker(older[key].path) == _worker(newer[key].path) for key in newer):
            found = number
    return found


def _skipped(
    source: Source, chosen: list[Capture], number: int, cycles: int, skipped: list[Capture], root: Path, age: _Age
) -> Caveat:
    """The folder and the cycle shown, the others, and how to see one of those."""
    shown = {capture.path.parent for capture in chosen}
    newest = max(map(age, chosen)) > max(map(age, skipped))
    others: dict[Path, tuple[Any, str]] = {}
    for capture in skipped:
        if capture.path.parent not in shown:
            others[capture.path.parent] = max(age(capture), others.get(capture.path.parent, age(capture)))
    names = [str(folder.relative_to(root)) for folder in sorted(others, key=lambda folder: others[folder], reverse=True)]
    captures = "capture" if len(skipped) == 1 else "captures"
    folder = Path(os.path.commonpath(shown)).relative_to(root)
    within = "" if folder == Path() else f" in {folder}"
    text = f"showing {folder}" if cycles == 1 else f"showing cycle {number} of {cycles}{within}"
    text += ", the newest" if newest else ""
    text += f"; {len(skipped)} {'older' if newest else 'other'} {source} {captures} skipped"
    if names:
        more = f" and {len(names) - _NAMED_FOLDERS} more" if len(names) > _NAMED_FOLDERS else ""
        text += f", in {', '.join(names[:_NAMED_FOLDERS])}{more}"
    if cycles > 1:
        text += f". To read another cycle: bridge-profiling report {shell_path(root)} --cycle {number - 1 or number + 1}"
    elif names:
        text += f". To read the next one, pass {shell_path(root / names[0])}"
    return Caveat("captures_skipped", text)


def _newer_nothing(written: list[Path], captures: list[Capture]) -> list[Caveat]:
    """A caveat when the newest attempt captured nothing, and an older one is shown.

    Not for a restart past the window: it misses the window that it finds captured.
    """
    shown = {capture.manifest.folder.partition(".")[0] for capture in captures if capture.manifest is not None}
    newest = max(written, key=modified_ns, default=None)
    if newest is None or not shown or newest.parent.name.partition(".")[0] in shown:
        return []
    try:
        attempt = find_captures(newest.parents[2], newest.parent.name)
    except TraceError:
        return []
    if any(each.artifacts for each in attempt):
        return []
    reason = next((f": {each.manifest.reason}" for each in attempt if each.manifest.reason), "")
    return [caveat("newer_captured_nothing", attempt=newest.parent.name, reason=reason)]


def _several_windows(captures: Iterable[Capture], root: Path) -> list[Caveat]:
    """A caveat when profilers captured different windows or runs: their figures are not of one time."""
    windows = {capture.source: capture.manifest for capture in captures if capture.manifest is not None}
    if len({(manifest.root, manifest.folder) for manifest in windows.values()}) < 2:
        return []
    several = len({manifest.root for manifest in windows.values()}) > 1
    named = {
        source: os.path.relpath(manifest.root / manifest.folder, root) if several else manifest.folder
        for source, manifest in sorted(windows.items())
    }
    origins = ", ".join(f"{source} from {name}" for source, name in named.items())
    return [caveat("several_windows", origins=origins)]
