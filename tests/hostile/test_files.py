"""Files in a run's directory: a rank's that cannot be read is an error that names it, and what we made is no rank's."""

import gzip
import json
import os
import shutil

import pytest

from bridge_profiling.traces import files
from bridge_profiling.traces.discover import find_run
from tests.cli.conftest import write
from tests.traces.kineto_files import packed, steps

RANK = "run/rank-1.json.gz"


def _replace(make):
    return lambda path: (path.unlink(), make(path))


#: What happens to a good file.
DAMAGE = {
    "zero head": lambda path: path.write_bytes(bytes(512) + path.read_bytes()[512:]),
    "cut in the head": lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:12])),
    "text": lambda path: path.write_bytes(b"<html>404</html>"),
    "dangling": _replace(lambda path: path.symlink_to("nowhere")),
    "pipe": _replace(os.mkfifo),
    "junk behind": lambda path: path.write_bytes(path.read_bytes() + b"JUNK" * 50),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("command", ["analyze", "merge"])
def test_a_rank_that_cannot_be_read_is_named_and_gives_exit_code_1(typed, folder, command, damage):
    write(folder / RANK, 1)
    damage(folder / RANK)
    done = typed(command, "run")
    assert done.returncode == 1
    assert f"error: {RANK}" in done.stderr
    assert "Traceback" not in done.stderr


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


@pytest.mark.parametrize("command", ["merge . --no-findings -o run/rank-2.json.gz", "report ."])
def test_what_we_made_is_no_rank(typed, folder, command):
    write(folder / "run" / "rank-1.json.gz", 1)
    typed(*command.split())
    for each in (*folder.glob("*.*"), *(folder / "run").glob("*rank-2*")):
        shutil.copy(each, folder / "run" / f"rank-3{''.join(each.suffixes)}")
    assert [capture.rank for capture in find_run(folder).captures] == [0, 1]
    done = typed("report", ".", "--no-page")
    assert (done.returncode, "oth ranks" in done.stdout) == (0, True)


@pytest.mark.parametrize("command", ["report", "merge", "flamegraph", "compare"])
def test_a_capture_is_never_replaced(typed, folder, command):
    before = (folder / "run" / "rank-0.json.gz").read_bytes()
    other = ["run"] if command == "compare" else []
    done = typed(command, "run", *other, "-o", "run/rank-0.json.gz")
    assert done.returncode == 2
    assert (folder / "run" / "rank-0.json.gz").read_bytes() == before


#: Links in a run's directory, the ranks found through them, and what is said about those that are not followed.
LINKS = [
    ({"torch": "../far"}, [0, 1], ""),
    ({"a": "../far", "b": "../far", "run0": "../run", "same": "."}, [0, 1], "same -> "),
    ({"up": "..", "root": "/"}, [0], "it links to a folder that contains it; to search that folder, pass its path"),
    ({"a": "b", "b": "a", "torch": "/nowhere/torch"}, [0], "torch -> /nowhere/torch: what it links to does not exist"),
    ({"iter-2-4.1": "gone", "latest.log": "gone.log"}, [0], "iter-2-4.1 -> "),
    ({"rank-1.json.gz": "../far/rank-1.json.gz", "manifest": "../far"}, [0, 1], ""),
    ({"a": "../many", "b": "../far"}, [0, 1], "links lead to more than 40 files"),
    *(
        (
            {"rank-1.json": target, "torch": "../far"},
            [0, 1],
            f"rank-1.json -> {os.path.realpath(target)}: it leads into the kern",
        )
        for target in ("/proc/1/environ", "/proc/self/root/proc/1/environ", "/sys/kernel/notes", "/dev/zero")
    ),
    ({"a": "b", "b": "/proc/self/cwd/far", "c": "/proc/self/task", "d": "/dev", "e": "/sys/class"}, [0], "a -> "),
]


@pytest.mark.parametrize(("links", "ranks", "said"), LINKS, ids=lambda one: repr(one)[:60])
def test_a_linked_folder_is_read_once_or_named(typed, folder, monkeypatch, links, ranks, said):
    monkeypatch.setattr(files, "_MAX_LINKED_NAMES", 40)
    write(folder / "far" / "rank-1.json.gz", 1)
    write(folder / "farther" / "rank-2.json.gz", 2)
    (folder / "many").mkdir()
    for number in range(60):
        (folder / "many" / f"{number}.txt").touch()
    for name, target in links.items():
        (folder / "run" / name).symlink_to(target)
    found = find_run(folder / "run")
    assert [capture.rank for capture in found.captures] == ranks
    assert [caveat.code for caveat in found.caveats if caveat.code != "captures_skipped"] == ["links_not_followed"] * bool(said)
    done = typed("analyze", "run")
    assert (done.returncode, said in done.stdout) == (0, True)


def test_a_path_that_is_not_utf_8_is_an_error_of_its_rank(typed, folder):
    write(folder / "run" / "rank-1\udcff.json.gz", 1)
    done = typed("report", "run", "--no-page")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "error: run/rank-1\\udcff.json.gz has a path that is not UTF-8" in done.stderr


def test_a_rank_outside_its_job_is_named(typed, folder):
    for rank in (3, 9):
        trace = packed(steps(250), distributedInfo={"rank": rank, "world_size": 8})
        (folder / "run" / f"rank-{rank}.json.gz").write_bytes(trace)
    done = typed("analyze", "run", "--json")
    (caveat,) = (each for each in json.loads(done.stdout)["caveats"] if each["code"] == "rank_outside_world")
    assert caveat["ranks"] == [9]
    assert caveat["text"].endswith("run/rank-9.json.gz is of rank 9, in a job of 8 ranks: one of the two is wrong")


def _references(path):
    """Ten lines that stand for 10^10 values."""
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11))]
    path.write_text("\n".join(lines))


#: What --config names.
SETTINGS = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": os.mkdir,
    "a large file": lambda path: (path.touch(), os.truncate(path, 5 << 30)),
    "references": _references,
    "nested": lambda path: path.write_text("a: " + "[" * 5000),
    "not UTF-8": lambda path: path.write_bytes(b"a: \xc3("),
}


@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("command", ["doctor --config settings", "run --config settings t.py", "trigger --config settings run"])
def test_settings_are_read_from_a_file_of_their_size_alone(typed, folder, command, make):
    (folder / "t.py").touch()
    make(folder / "settings")
    done = typed(*command.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "settings" in done.stderr
