"""Files in a run's directory: a rank's that cannot be read is an error that names it, and what we made is no rank's."""

import gzip
import json
import lzma
import os
import shutil
from pathlib import Path

import pytest

from bridge_profiling.traces.discover import find_run
from tests.cli.conftest import folder, typed
from tests.cli.ranks import write

__all__ = ["folder", "typed"]

RANK = "run/rank-1.json.gz"


def _zero_head(path):
    path.write_bytes(bytes(512) + path.read_bytes()[512:])


def _replace(make):
    return lambda path: (path.unlink(), make(path))


#: What happens to a good file.
DAMAGE = {
    "zero head": _zero_head,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "cut in the head": lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:12])),
    "cut packed head": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "text": lambda path: path.write_bytes(b"<html>404</html>"),
    "dangling": _replace(lambda path: path.symlink_to("nowhere")),
    "loop": _replace(lambda path: path.symlink_to(path.name)),
    "pipe": _replace(os.mkfifo),
    "device": _replace(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("command", ["report", "analyze", "merge"])
def test_a_rank_that_cannot_be_read_is_named_and_gives_exit_code_1(typed, folder, command, damage):
    write(folder / RANK, 1)
    damage(folder / RANK)
    done = typed(command, "run", *(["--no-page"] if command == "report" else []))
    assert done.returncode == 1
    assert f"error: {RANK}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rank-1.json", b'{"schemaVersi'),
        ("rank-1.json", bytes(512)),
        ("rank-1.json", b"{" + bytes(1 << 19)),
        ("rank-1.json", b"[" * 100_000),
        ("host_1.9.pt.trace.json", bytes(512)),
        ("trace_1.json", bytes(512)),  # named like trace_0.json, which is a trace
        ("rank-1.json.zst", b"\x28\xb5\x2f\xfd"),
        ("rank-1.pt.trace.json.bz2", b"BZh9"),
        ("rank-1.json.xz", lzma.compress(b'{"schemaVersi')),
        ("rank-1.sqlite", bytes(512)),
        ("rank-1.nsys-rep", b""),
        ("rank-1.pickle", bytes(512)),
    ],
)
def test_whatever_looks_like_a_rank_and_is_none_is_named(typed, folder, name, content):
    (folder / "run" / "trace_0.json").write_bytes(gzip.decompress((folder / "run" / "rank-0.json.gz").read_bytes()))
    (folder / "run" / name).write_bytes(content)
    done = typed("analyze", "run", PATH="")
    assert done.returncode == 1
    assert f"error: run/{name}" in done.stderr


def test_a_folder_that_cannot_be_read_is_named(typed, folder, monkeypatch):
    scandir, closed = os.scandir, folder / "run" / "closed"
    closed.mkdir()

    def refused(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    done = typed("report", "run", "--no-page")
    assert (done.returncode, done.stderr) == (1, "error: run/closed cannot be read: Permission denied\n")


#: Where rank 1 is, links with what they lead to, the ranks that are then found, and the link that is named with the reason.
LINKS = {
    "elsewhere": ("scratch", {"run/torch": "../scratch"}, [0, 1], None, ""),
    "twice": ("run/iter-2-4", {"run/a": "iter-2-4", "run/latest": "iter-2-4"}, [0, 1], None, ""),
    "circle": ("b", {"run/b": "../b", "b/c": "../run"}, [0, 1], None, ""),
    "behind a link": ("c", {"run/b": "../b", "b/c": "../c"}, [0, 1], None, ""),
    "around": (".", {"run/up": ".."}, [0], "run/up", "it leads to a directory around run"),
    "nowhere": (".", {"run/torch": "/nowhere"}, [0], "run/torch", "it leads nowhere"),
    "itself": (".", {"run/torch": "torch"}, [0], "run/torch", "it leads nowhere"),
    "large": ("data", {"run/data": "../data"}, [0], "run/data", "more than 20 files are behind it"),
}


@pytest.mark.parametrize(("place", "links", "ranks", "named", "why"), LINKS.values(), ids=LINKS)
def test_links_to_directories_are_followed_or_named(folder, monkeypatch, place, links, ranks, named, why):
    monkeypatch.setattr("bridge_profiling.folders._BEHIND_A_LINK", 20)
    monkeypatch.chdir(folder)
    write(Path(place, "rank-1.json.gz"), 1)
    for link, target in links.items():
        Path(link).parent.mkdir(exist_ok=True)
        Path(link).symlink_to(target)
    for number in range(20 if place == "data" else 0):
        Path("data", str(number)).touch()
    found = find_run(Path("run"))
    assert [capture.rank for capture in found.captures] == ranks
    told = [(each.file, each.text) for each in found.caveats if each.code == "link_not_followed"]
    assert [file for file, _ in told] == [named] * bool(named)
    assert all(f"a link that was not followed: {why}." in text for _, text in told)


@pytest.mark.parametrize("name", ["config.json", "log_1.json", "rank-1.json", "notes.txt"])
def test_other_documents_are_no_captures(folder, name):
    (folder / "run" / name).write_text(json.dumps({"ranks": [1], "text": '"ph": "bridge_profiling"'}))
    assert [capture.rank for capture in find_run(folder / "run").captures] == [0]


@pytest.mark.parametrize(
    "command",
    [
        ("merge", "."),
        ("merge", ".", "-o", "all_ranks.json"),
        ("merge", ".", "--no-findings", "-o", "run/rank-2.json.gz"),
        ("report", "."),
        ("report", ".", "-o", "run/rank-2.json"),
        ("memory", "run/rank-0.json.gz", "-o", "run/rank-2.json"),
        ("flamegraph", ".", "-o", "run/rank-2.json"),
        ("flamegraph", ".", "--folded", "-o", "run/flamegraph.folded.txt"),
    ],
    ids=" ".join,
)
def test_what_we_made_is_no_rank(typed, folder, command):
    write(folder / "run" / "rank-1.json.gz", 1)
    typed(*command)
    for each in (*folder.glob("*.*"), *(folder / "run").glob("*rank-2*")):
        shutil.copy(each, folder / "run" / f"rank-3{''.join(each.suffixes)}")
    assert [capture.rank for capture in find_run(folder).captures] == [0, 1]
    done = typed("report", ".", "--no-page")
    assert (done.returncode, "oth ranks" in done.stdout) == (0, True)


def test_a_merged_trace_alone_says_what_it_is(typed, folder):
    typed("merge", "run", "-o", "rank-0.json.gz")
    for place in ("rank-0.json.gz", "only"):
        (folder / "only").mkdir(exist_ok=True)
        shutil.copy("rank-0.json.gz", "only")
        done = typed("report", place, "--no-page")
        assert done.returncode == 1
        assert ("made it from captures" if place != "only" else "holds no capture") in done.stderr


def test_a_trace_that_quotes_our_mark_stays_a_capture(folder):
    path = folder / "run" / "rank-0.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    marks = ['{"bridge_profiling": "merged trace"', '<!doctype html><meta name="generator" content="bridge-profiling']
    trace = {"user": {"bridge_profiling": "merged trace"}, "marks": marks} | trace
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert [capture.rank for capture in find_run(folder).captures] == [0]


@pytest.mark.parametrize("command", ["report", "merge", "flamegraph", "compare"])
def test_a_capture_is_never_replaced(typed, folder, command):
    before = (folder / "run" / "rank-0.json.gz").read_bytes()
    other = ["run"] if command == "compare" else []
    done = typed(command, "run", *other, "-o", "run/rank-0.json.gz")
    assert done.returncode == 2
    assert (folder / "run" / "rank-0.json.gz").read_bytes() == before
