"""Nobody else gets in: run directories that others can write to, messages of others, forged messages, and locks."""

import fcntl
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from bridge_profiling.capture.control import client
from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.messages import AcceptedCapture, CaptureRequest
from bridge_profiling.common.atomic import create_exclusively, make_directory, write_atomically, write_json
from bridge_profiling.common.errors import CaptureError, ProfilingConfigError
from bridge_profiling.nsys import supervisor
from tests.capture.conftest import run
from tests.capture.control.conftest import STATUS

__all__ = ["run"]

#: Another user of the machine, and a group that it is in.
STRANGER, TEAM = 54321, 54322

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")

REQUEST = CaptureRequest(iterations=2)
ACCEPTED = AcceptedCapture(
    **asdict(REQUEST) | {"start": 120, "ranks": [0], "profilers": ["torch"], "run": "run-1"},
    end=122, launch="", attempt=0, accepted_at_iteration=1,
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "profiles").mkdir(mode=0o755)
    return tmp_path / "profiles"


WRITERS: dict[str, Callable[[Path], object]] = {
    "write_json": lambda path: write_json(path, {"a": 1}),
    "write_atomically": lambda path: write_atomically(path, lambda temporary: temporary.write_text("ours")),
    "create_exclusively": lambda path: create_exclusively(path, "ours"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("to", ["secret", "missing"])
def test_a_link_under_any_name_that_was_used_before_is_not_followed(root, write, to, monkeypatch):
    """In a second write, the file's own name, those that a first one used and those of earlier releases are links."""
    (secret := root.with_name("secret")).write_text("secret")
    names = set()
    for real in (os.open, os.mkdir):
        noted = lambda path, *a, real=real, **k: (names.add(Path(path).name), real(path, *a, **k))[1]  # noqa: E731
        monkeypatch.setattr(os, real.__name__, noted)
    write(root / "file")
    monkeypatch.undo()
    assert names
    assert os.listdir(root) == ["file"]
    (root / "file").unlink()
    for name in {*names, "file", ".file.tmp", f".file.{os.getpid()}.tmp", "file.tmp", f".file.{os.getpid()}.json"}:
        (root / name).symlink_to(secret.with_name(to))
    write(root / "file")
    assert (root / "file").is_symlink() == (write is WRITERS["create_exclusively"])
    assert secret.read_text() == "secret"
    assert not secret.with_name("missing").exists()


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_nothing_is_left_behind_and_nothing_is_open_to_everyone_whatever_the_umask(root, write):
    before = os.umask(0)
    try:
        make_directory(root / "new" / "deep")
        write(root / "new" / "deep" / "file")
        with pytest.raises((OSError, ZeroDivisionError)):
            write_atomically(root / "new" / "other", lambda temporary: 1 / 0)
    finally:
        os.umask(before)
    paths = list(root.rglob("*"))
    assert sorted(path.name for path in paths) == ["deep", "file", "new"]
    assert not [path for path in paths if path.stat().st_mode & 0o002]


@as_root
@pytest.mark.parametrize(("owner", "allowed"), [(0, True), (STRANGER, False)])
@pytest.mark.parametrize("place", ["torch", "torch/iter-10-12"])
def test_a_link_of_a_stranger_in_place_of_a_directory_is_refused(root, tmp_path, owner, allowed, place):
    (tmp_path / "elsewhere").mkdir()
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).symlink_to(tmp_path / "elsewhere")
    os.chown(root / place, owner, owner, follow_symlinks=False)
    if allowed:
        make_directory(root / "torch" / "iter-10-12")
        return
    with pytest.raises(PermissionError, match=f"a link that user {STRANGER} made"):
        write_json(root / "torch" / "iter-10-12" / "file", {})
    assert not list((tmp_path / "elsewhere").rglob("file"))


# -- what is read --------------------------------------------------------------------------------------------------------

FORGED_ACCEPTED = {
    "end": "9", "iterations": 10**9, "start": -1, "ranks": [], "profilers": [], "settings": {"output_dir": 1}, "id": "another",
    "run": "x" * 2000, "kind": "x", "reason": 5,
}  # fmt: skip
FORGED_STATUS = {"poll_seconds": float("nan"), "profilers": "x", "train_iters": 1 << 70, "completed": True}


@pytest.mark.parametrize(
    ("name", "message", "key", "value"),
    [
        *(("accepted", ACCEPTED, key, value) for key, value in FORGED_ACCEPTED.items()),
        *(("progress", STATUS, key, value) for key, value in FORGED_STATUS.items()),
        ("progress", STATUS, "open", [asdict(ACCEPTED) | {"iterations": 10**9}]), ("accepted", ACCEPTED, "attempt", 10**400),
    ],
)  # fmt: skip
def test_a_forged_message_is_no_message(root, name, message, key, value):
    requests = RequestDirectory(root)
    read, file = {
        "accepted": (lambda: next(iter(requests.accepted()), None), f"accepted/{ACCEPTED.id}"),
        "progress": (requests.status, "progress"),
    }[name]
    write_json(requests.path / f"{file}.json", message)
    assert read() == message
    (requests.path / f"{file}.json").write_text(json.dumps(asdict(message) | {key: value}))
    assert read() is None


def _to_stranger(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: None, ""),
        (lambda path: path.symlink_to(path.rename(path.with_name("moved"))), "symbolic link"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
        (lambda path: path.write_text(path.read_text() + " " * (1 << 17)), "bytes"),
        (lambda path: path.chmod(0o666), "can be written by every user"),
        pytest.param(_to_stranger, f"belongs to user {STRANGER}", marks=as_root),
        pytest.param(lambda path: (_to_stranger(path), _to_stranger(path.parents[1])), "", marks=as_root),
    ],
)
def test_a_request_counts_from_its_job_s_user_the_directory_s_owner_and_root(root, change, reason):
    requests = RequestDirectory(root)
    requests.open()
    (requests.path / "request.json").write_text(json.dumps(asdict(REQUEST)))
    change(requests.path / "request.json")
    text, problem = requests.take()
    assert (bool(text), reason in problem, bool(problem)) == (not reason, True, bool(reason))
    assert set(os.listdir(requests.path)) <= {"moved", "withdrawn"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: None, None), (lambda root: root.chmod(0o1777), "every user"),
        (lambda root: (root / "on-demand").chmod(0o777), "by everyone"), (lambda root: root.parent.chmod(0o777), "every user"),
        (lambda root: root.parent.chmod(0o1777), None), (lambda root: _as_link(root / "on-demand"), "is a link"),
        pytest.param(lambda root: os.chown(root / "on-demand", STRANGER, 0), f"user {STRANGER}", marks=as_root),
        pytest.param(lambda root: os.chown(root, STRANGER, 0), None, marks=as_root),
    ],
)  # fmt: skip
def test_a_directory_that_everyone_can_write_to_takes_no_requests(root, change, reason):
    requests = RequestDirectory(root)
    requests.write("progress.json", STATUS)
    change(root)
    try:
        if reason is None:
            requests.check()
            assert client.find_requests(root) == requests
        else:
            with pytest.raises(CaptureError, match=reason):
                requests.check()
            with pytest.raises(ProfilingConfigError, match=reason):
                client.find_requests(root)
    finally:
        root.parent.chmod(0o755)


def _as_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize(
    ("mode", "group", "listens", "said"),
    [
        (0o777, None, False, "no captures on demand: .*every user of the machine can write"),
        pytest.param(0o775, TEAM, True, f"every member of group {TEAM} can request", marks=as_root),
        pytest.param(0o775, 0, True, None, marks=as_root),
    ],
)
def test_a_training_whose_directory_others_can_write_to_says_so(run, caplog, mode, group, listens, said):
    run.root.mkdir()
    if group is not None:
        os.chown(run.root, 0, group)
    run.root.chmod(mode)
    run.listen(range(60))
    warnings = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert [bool(re.search(said, warning)) for warning in warnings] == ([True] if said else [])
    assert (run.root / "on-demand" / "progress.json").exists() == listens


# -- the lock of nsys --------------------------------------------------------------------------------------------------


@pytest.fixture
def locks(tmp_path: Path, monkeypatch) -> Path:
    """The folder of the lock, which is not there yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"bridge_profiling-{os.getuid()}"


@pytest.mark.parametrize(
    "squat",
    [
        lambda folder: (folder.mkdir(), folder.chmod(0o777)),
        pytest.param(lambda folder: (folder.mkdir(mode=0o700), _to_stranger(folder)), marks=as_root),
        lambda folder: (folder.mkdir(mode=0o700), (folder / "nsys.lock").symlink_to(folder.parent / "secret")),
    ],
    ids=["open", "stranger", "lock is a link"],
)
def test_there_is_no_lock_in_a_folder_that_is_not_this_user_s_alone(locks, capsys, squat):
    squat(locks)
    with supervisor.one_start_at_a_time():
        pass
    assert "without waiting for other ranks" in capsys.readouterr().err
    assert not locks.with_name("secret").exists()


def test_a_lock_that_is_held_keeps_others_waiting_but_not_forever(locks, monkeypatch, capsys):
    with supervisor.one_start_at_a_time():
        pass
    assert (locks.stat().st_mode & 0o777, (locks / "nsys.lock").stat().st_mode & 0o777) == (0o700, 0o600)
    with open(locks / "nsys.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        release = threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN))
        release.start()
        with supervisor.one_start_at_a_time():
            assert not capsys.readouterr().err
        release.join()
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(supervisor, "_LOCK_SECONDS", 0.3)
        with supervisor.one_start_at_a_time():
            assert "was locked for 0 s" in capsys.readouterr().err
