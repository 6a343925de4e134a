"""The cache is only a shortcut: an entry that is damaged, stale or foreign is rebuilt, never an error and never an answer."""

import json
import os
import shutil
from unittest import mock

import pyarrow as pa
import pytest

from bridge_profiling.facts import captures
from bridge_profiling.facts.rank import rank_facts
from bridge_profiling.run import Run
from bridge_profiling.traces import cache, kineto
from bridge_profiling.traces.cache import SEAL, load, user_secret
from bridge_profiling.traces.discover import Capture, find_run
from tests.cli.conftest import write
from tests.traces.conftest import contents, values
from tests.traces.kineto_files import kernel


@pytest.fixture
def capture(write_trace):
    return Capture(write_trace([kernel("k", 1, 1)], "rank-3.json"), "kineto", 3, "file name")


@pytest.fixture
def entry(capture, tmp_path):
    """The entry of the capture."""
    return load(capture, directory=tmp_path / "cache").entry


def _edit(name, change):
    def edit(entry):
        [path] = entry.glob(name)
        path.write_bytes(change(path.read_bytes()))

    return edit


def _edit_seal(**changed):
    return _edit(SEAL, lambda text: json.dumps(json.loads(text) | changed).encode())


def _other_rows(entry):
    """Other rows, whole Parquet."""
    path = entry / "device_events.parquet"
    cache.write_blocks([], cache.ParquetTable(path).read().schema, path)


def _replaced(make, name="device_events.parquet"):
    def replace(entry):
        [path] = entry.glob(name)
        path.unlink()
        make(path)

    return replace


DAMAGE = {
    "no seal": lambda entry: (entry / SEAL).unlink(),
    "seal of another engine": _edit_seal(engine="0"),
    "seal of another rank": _edit_seal(capture="7 order"),
    "edited info": _edit(cache.INFO, lambda text: text.replace(b'"rank":3', b'"rank":4')),
    "no table": lambda entry: (entry / "device_events.parquet").unlink(),
    "cut table": _edit("device_events.parquet", lambda raw: raw[: len(raw) // 2]),
    "one bit of a table": _edit("device_events.parquet", lambda raw: raw[:60] + bytes([raw[60] ^ 1]) + raw[61:]),
    "other rows": _other_rows,
    "table that is a pipe": _replaced(os.mkfifo),
    "entry that is a file": lambda entry: (shutil.rmtree(entry), entry.write_text("x")),
}


#: The kept answers, next to an entry.
ANSWERS = "../facts-*.arrow"
ANSWERS_DAMAGE = [
    _edit(ANSWERS, lambda raw: raw[:-9]),
    _edit(ANSWERS, lambda raw: raw.replace(b'"caveats":[', b'"caveats":[{"code":"x","text":"x"}', 1)),
    _replaced(os.mkfifo, ANSWERS),
]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_entry_that_does_not_fit_is_rebuilt(capture, entry, damage, monkeypatch):
    expected = contents(load(capture, cached=False))
    damage(entry)
    rebuilt = load(capture, directory=entry.parent)
    assert (contents(rebuilt), rebuilt.info.rank, rebuilt.entry) == (expected, 3, entry)
    with monkeypatch.context() as patch:
        patch.setattr(kineto, "read", None)
        assert contents(load(capture, directory=entry.parent)) == expected
    assert [path.name for path in entry.parent.iterdir()] == [entry.name]


@pytest.mark.parametrize("size", [100, 300_000], ids=["short", "long"])
@pytest.mark.parametrize("rename", [False, True], ids=["in place", "renamed over"])
def test_a_file_with_its_old_size_and_time_and_other_content_is_read_again(write_trace, tmp_path, size, rename):
    name = "rank-3.json"
    path = write_trace([kernel("first", 1, 1, text=" " * size), kernel("a", 3, 1), kernel("last", 5, 1, text=" " * size)], name)
    capture, before = Capture(path, "kineto", 3, "order"), path.stat()
    assert values(load(capture, directory=tmp_path / "cache")["device_events"], "name") == ["first", "a", "last"]
    other = path.read_text().replace('"a"', '"b"')
    if rename:
        path.rename(tmp_path / "before")
    path.write_text(other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert values(load(capture, directory=tmp_path / "cache")["device_events"], "name") == ["first", "b", "last"]


def test_a_file_that_changes_while_it_is_read_is_not_kept(capture, tmp_path, monkeypatch):
    read = kineto.read

    def changed(path, **rank):
        tables = read(path, **rank)
        path.write_text(path.read_text().replace('"k"', '"x"'))
        return tables

    with monkeypatch.context() as patch:
        patch.setattr(kineto, "read", changed)
        assert load(capture, directory=tmp_path / "cache").entry is None
    assert values(load(capture, directory=tmp_path / "cache")["device_events"], "name") == ["x"]


def test_the_cache_is_next_to_the_capture_where_possible_and_no_capture_itself(capture):
    (found,) = find_run(capture.path.parent).captures
    load(found)
    assert list(capture.path.parent.glob(f"{cache.FOLDER}/*/device_events.parquet"))
    assert [each.path for each in find_run(capture.path.parent).captures] == [capture.path]


def _link(name, target):
    def make(folder):
        (folder / name).symlink_to(folder / target)
        return folder / name if name.endswith(".gz") else folder / "run"

    return make


def _with_a_trace(cached):
    def make(folder):
        write(folder / "run" / "rank-0.json.gz", 0)
        cached(folder / "run" / cache.FOLDER, folder / "far")
        return folder / "run"

    return make


#: Makes what is named of a folder with a capture in `far`.
NAMED = {
    "a file": lambda folder: folder / "far" / "rank-0.json.gz",
    "a link to a file": _link("run/x.json.gz", "far/rank-0.json.gz"),
    "a folder with a link to a folder": _link("run/torch", "far"),
    "a folder whose cache is a link": _with_a_trace(lambda path, far: path.symlink_to(far)),
    "a folder that cannot have a cache": _with_a_trace(lambda path, _: path.touch()),  # root may write anywhere
}


@pytest.mark.parametrize("environment", [{"XDG_CACHE_HOME": "{}/home/.cache"}, {"HOME": "{}/home", "XDG_CACHE_HOME": "x"}])
@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_a_cache_is_below_what_was_named_or_the_users(tmp_path, monkeypatch, named, environment):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cache.DIRECTORY_VARIABLE, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    write(tmp_path / "far" / "rank-0.json.gz", 0)
    (tmp_path / "run").mkdir()
    path = named(tmp_path)
    before = set(tmp_path.rglob("*"))
    (found,) = find_run(path).captures
    assert load(found).entry.is_relative_to(tmp_path / "home" / ".cache" / "bridge_profiling")
    assert {each for each in set(tmp_path.rglob("*")) - before if not each.is_relative_to(tmp_path / "home")} == set()


def test_an_entry_that_comes_with_a_run_is_read_from_the_capture(tmp_path, monkeypatch):
    """Its seal fits, as everybody can seal an entry; the answers next to it fit too."""
    monkeypatch.delenv(cache.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "attacker"))
    write(tmp_path / "run" / "rank-0.json.gz", 0)

    def names():
        with Run(tmp_path / "run") as run:
            return run.facts.kernels_by_rank["name"].to_pylist()

    (real,) = set(names())
    (found,) = find_run(tmp_path / "run").captures
    tables = load(found, cached=False)
    events = tables["device_events"]
    column = pa.array(["planted"] * events.num_rows).cast(events.schema.field("name").type)
    tables.tables = {**tables.tables, "device_events": events.set_column(events.schema.get_field_index("name"), "name", column)}
    (entry,) = (tmp_path / "run" / cache.FOLDER).glob("*/")
    shutil.rmtree(entry.parent)
    cache.write(tables, entry, found, cache.Origin.of(found.path).with_content())
    assert set(names()) == {"planted"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for _ in range(2):
        assert set(names()) == {real}
    assert list((tmp_path / "run" / cache.FOLDER).glob("*/")) == [entry], "it was replaced"


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_bytes(b""), os.unlink, lambda path: (path.unlink(), os.mkfifo(path))]
)
def test_a_secret_that_is_not_one_is_made_again(tmp_path, monkeypatch, spoil):
    """As a full disk leaves it, for example."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, path = user_secret(), tmp_path / "bridge_profiling" / "secret"
    assert (path.stat().st_mode & 0o777, len(first), user_secret()) == (0o600, 32, first)
    spoil(path)
    assert len(user_secret()) == 32
    assert user_secret() != first


def test_an_entry_is_whole_or_not_there(capture, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    load(capture, directory=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("damage", [_other_rows, *ANSWERS_DAMAGE])
def test_no_command_answers_from_a_damaged_entry_or_calls_it_an_error(typed, folder, damage):
    expected = typed("analyze", "run", BRIDGE_PROFILING_CACHE="cache")
    [entry] = (folder / "cache").glob("*/")
    damage(entry)
    done = typed("analyze", "run", BRIDGE_PROFILING_CACHE="cache")
    assert (done.returncode, done.stdout, done.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@pytest.mark.parametrize("goes", [lambda entry: shutil.rmtree(entry.parent), DAMAGE["no table"], DAMAGE["cut table"]])
@pytest.mark.parametrize("after", ["breakdown", "ranks"], ids=["of captures", "of the database"])
def test_a_cache_that_disappears_while_it_is_used_changes_no_answer(folder, monkeypatch, goes, after):
    monkeypatch.setenv("BRIDGE_PROFILING_CACHE", "cache")
    write(folder / "run" / "rank-1.json.gz", 1)
    names = ("kernels_by_rank", "ranks", "clock_offsets", "idle_causes")

    def answers(goes=lambda entry: None):
        with Run("run") as run:
            getattr(run.facts, after)
            goes(next((folder / "cache").glob("*/")))
            count = run.merge("merged.json", findings=False)
            return [
                count,
                (folder / "merged.json").read_text(),
                run.facts.errors,
                run.facts.capture_caveats,
                *(getattr(run.facts, name) for name in names),
            ]

    expected = answers()
    (next((folder / "cache").glob("facts-*"))).unlink()
    assert answers(goes) == expected


@pytest.mark.parametrize("path", ["run", "tables"])
def test_a_question_that_fails_about_one_rank_is_answered_about_the_others(typed, folder, monkeypatch, path):
    write(folder / "run" / "rank-1.json.gz", 1)
    typed("analyze", "run", "--parquet", "tables")
    asked = []

    def failing(tables, options):
        asked.append(tables.info.rank)
        if tables.info.rank == 1:
            raise ZeroDivisionError
        return rank_facts(tables, options)

    monkeypatch.setattr(captures, "rank_facts", failing)
    for kept in (*(folder / "tables").glob("facts-*"), *(folder / "tables").glob("*.facts")):
        kept.unlink()
    with Run(path, parquet="tables") as run:
        assert [info.rank for info in run.facts.every_info] == [0, 1]
        assert set(run.facts.breakdown["rank"].to_pylist()) == {0}
        assert ["ZeroDivisionError" in error and "rank-1" in error for error in run.facts.errors] == [True]
        assert asked == [0, 1], "nothing was read again"
        assert (1,) in [each.ranks for each in run.caveats if each.code == "rank_unreadable"]


@pytest.mark.parametrize("damage", [_other_rows, DAMAGE["no seal"], DAMAGE["cut table"]])
def test_tables_that_a_user_names_are_refused_where_they_are_damaged(typed, folder, damage):
    assert typed("analyze", "run", "--parquet", "tables").returncode == 0
    [entry] = (folder / "tables").glob("*/")
    assert typed("analyze", "tables").returncode == 0
    damage(entry)
    done = typed("analyze", "tables")
    assert (done.returncode, f"error: tables/{entry.name} holds no tables" in done.stderr) == (1, True)
