"""Files of facts: written by the command, read in place of the traces, and never of another capture, code or user."""

import pytest

from bridge_profiling.facts import captures, store
from bridge_profiling.facts.__main__ import main
from bridge_profiling.traces import cache, kineto
from tests.traces.kineto_files import steps


@pytest.fixture
def run(write_trace, tmp_path, monkeypatch):
    """A run of ours with two ranks, and its files of facts."""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "manifest" / "iter-0-2").mkdir(parents=True)
    (tmp_path / "torch" / "iter-0-2").mkdir(parents=True)
    for rank in range(2):
        name = f"torch/iter-0-2/rank-{rank}.pt.trace.json.gz"
        write_trace(steps(100 + rank, 200 + rank, operators=True), name, distributedInfo={"rank": rank})
    return tmp_path, [tmp_path / "facts" / "iter-0-2" / f"rank-{rank}.torch.facts" for rank in range(2)]


def test_the_command_writes_facts_next_to_the_manifests_and_nothing_else(run, capsys, monkeypatch):
    folder, files = run
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path) for path in files]
    assert [path.is_file() for path in files] == [True, True]
    assert not (folder / "cache").exists()
    assert main([str(folder / "torch" / "iter-0-2" / "rank-1.pt.trace.json.gz")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(files[1])]


def test_facts_in_files_are_those_of_the_traces_which_are_not_read(run, run_of, monkeypatch):
    folder, _ = run
    expected = run_of(folder).to_json()
    (folder / "cache").rename(folder / "gone")
    assert main([str(folder)]) == 0
    monkeypatch.setattr(kineto, "read", None)
    assert run_of(folder).to_json() == expected


def _one_bit(patch, files):
    content = bytearray(files[0].read_bytes())
    content[-5] ^= 1
    files[0].write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, _: patch.setattr(store, "_code", lambda: "another release"),
        lambda patch, _: patch.setattr(store, "user_secret", lambda: b"another user's"),
        lambda _, files: files[0].write_bytes(files[1].read_bytes()),
        _one_bit,
    ],
    ids=["code", "user", "rank", "one bit"],
)
def test_facts_of_anything_else_are_computed_again(run, run_of, monkeypatch, change):
    folder, files = run
    expected = run_of(folder).to_json()
    (folder / "cache").rename(folder / "gone")
    assert main([str(folder)]) == 0
    change(monkeypatch, files)
    read, read_rank = [], captures.read_rank
    monkeypatch.setattr(captures, "read_rank", lambda task: read.append(task.path) or read_rank(task))
    assert run_of(folder).to_json() == expected
    assert read


def test_a_trace_that_cannot_be_read_is_one_error_and_the_others_have_facts(run, capsys):
    folder, files = run
    (folder / "torch" / "iter-0-2" / "rank-0.pt.trace.json.gz").write_bytes(b"no trace")
    assert main([str(folder), str(folder / "nothing")]) == 1
    done = capsys.readouterr()
    assert done.out.splitlines() == [str(files[1])]
    assert len(done.err.splitlines()) == 2
