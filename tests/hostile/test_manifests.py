"""A manifest that is damaged, newer, or contradicts the captures is named, and the captures are read without it."""

import copy
import json
import math
import os

import pytest

from bridge_profiling.common.errors import TraceError
from bridge_profiling.manifest import RankCapture, read_manifest
from bridge_profiling.run import Run
from bridge_profiling.traces.discover import find_run
from tests.hostile.runs import FOLDER, change_manifest, manifest_of, trace_of, write_run

_ARTIFACT = "profilers__0__artifacts__0__path"


@pytest.fixture
def run(folder):
    return write_run(folder / "two")


def _nested(depth):
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        ({"status": "done"}, "manifest.status"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 1}, "rank 1 is not one of 1 ranks"),
        ({"window": {"start": 1}}, "manifest.window has no 'end'"),
        ({"other_windows": [[20, 10]]}, "other_windows"),
        ({_ARTIFACT: "torch\0"}, "path of an artifact"),
        ({"coordinates": {"tp": [4, 2]}}, "coordinates.tp"),
        ({"config": {"a": _nested(100)}}, "manifest.config"),
        ({"work__model_flops": math.nan}, "manifest.work.model_flops"),
        ({"durations_ns__duration_ns": [-1] * 9}, "durations_ns"),
        ({"schema_version": 2}, "newer release: its schema version is 2"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), ""),
        (lambda path: path.write_bytes(b"[" * 100_000), ""),
        (lambda path: (path.unlink(), os.mkfifo(path)), ""),
    ],
)
def test_a_manifest_that_no_rank_wrote_is_refused_by_name(run, change, entry):
    change(manifest_of(run, 1)) if callable(change) else change_manifest(run, 1, **change)
    with pytest.raises(TraceError, match=f"{manifest_of(run, 1)} is (not )?a (manifest|regular file).*{entry}"):
        read_manifest(manifest_of(run, 1))
    found = find_run(run)
    assert [capture.manifest is None for capture in found.captures] == [False, True]
    assert ("manifest_unreadable", str(manifest_of(run, 1))) in [(each.code, each.file) for each in found.caveats]


@pytest.mark.parametrize(
    ("change", "said", "used"),
    [
        (lambda run: change_manifest(run, 1, rank=0), "it is of rank 0, by its name of rank 1", False),
        (lambda run: trace_of(run, 1).write_bytes(trace_of(run, 0).read_bytes()), "it is of rank 1, and", False),
        (lambda run: change_manifest(run, 1, **{_ARTIFACT: f"torch/{FOLDER}/rank-0.pt.trace.json.gz"}), "it lists", False),
        (lambda run: change_manifest(run, 1, **{_ARTIFACT: "torch/none.json"}), "rank-1.json lists", False),
        (lambda run: change_manifest(run, 1, profilers=[], status="failed", reason="it broke"), "failed: it broke", False),
        (lambda run: change_manifest(run, 1, captured__iterations=[7, 8]), "iterations 7 to 8 were captured, not", False),
        (lambda run: change_manifest(run, 1, captured__iterations=[0, 1, 2]), "iteration 2 was captured", True),
        (lambda run: change_manifest(run, 1, world_size=4), "the job has 4 ranks, the capture 2", True),
    ],
)
def test_a_manifest_that_contradicts_the_captures_is_named(typed, run, change, said, used):
    change(run)
    for command in (("report", "two", "--no-page"), ("analyze", "two"), ("analyze", "two", "--json")):
        done = typed(*command)
        assert done.returncode == 0
        assert said in done.stdout
        assert "two/manifest/iter-0-2/rank-1.json" in done.stdout
    with Run(run) as read:
        assert [manifest.rank for manifest in read.facts.manifests] == ([0, 1] if used else [0])


def test_a_rank_that_captured_nothing_is_named_with_its_reason(typed, run):
    trace_of(run, 1).unlink()
    change_manifest(run, 1, profilers=[], status="failed", reason="it broke")
    assert "rank 1: nothing was captured: it broke" in typed("report", "two", "--no-page").stdout


#: What an entry may hold instead.
WRONG = [None, True, -1, 1.5, 10**9, 10**30, math.inf, "x", "\0", "\ud800", [], [[]], [None], [[1]], {}, {"a": []}]


def test_whatever_an_entry_holds_the_manifest_is_refused_by_name_or_can_be_used(run):
    path = manifest_of(run, 1)
    content = json.loads(path.read_text())
    accepted, unnamed = [], 0
    for place in _places(content):
        for wrong in WRONG:
            changed = entry = copy.deepcopy(content)
            for key in place[:-1]:
                entry = entry[key]
            entry[place[-1]] = wrong
            path.write_text(json.dumps(changed))
            try:
                capture = RankCapture(run, FOLDER, read_manifest(path))
            except TraceError as error:
                unnamed += str(path) not in str(error)
                continue
            accepted.append(place)
            capture.durations_ns(profiled=False)
            capture.mfu(profiled=True)
            assert all(len(each) == 2 for each in (*capture.manifest.coordinates.values(), *capture.manifest.other_windows))
            assert not any(artifact.exists() for artifact in capture.artifacts if artifact != trace_of(run, 1))
    assert unnamed == 0
    assert 0 < len(accepted) < len(WRONG) * len(list(_places(content))) / 2


def _places(content, place=()):
    """The path to each entry, and to the first of each list."""
    items = content.items() if isinstance(content, dict) else enumerate(content[:1]) if isinstance(content, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from _places(value, (*place, key))


def test_captures_that_are_out_of_reach_or_gone_were_captured_all_the_same(typed, run, monkeypatch):
    scandir, closed = os.scandir, f"torch/{FOLDER}"

    def refused(path):
        if str(path).endswith(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        done = typed("report", "two", "--no-page")
        assert (done.returncode, done.stderr) == (1, f"error: two/{closed} cannot be read: Permission denied\n")
    for rank in (0, 1):
        trace_of(run, rank).unlink()
    done = typed("report", "two", "--no-page")
    assert "No capture was found.\nRanks 0-1: the listed files are not there.\n" in done.stdout
    assert all(f"rank {rank}: two/manifest/{FOLDER}/rank-{rank}.json lists" in done.stdout for rank in (0, 1))


@pytest.mark.parametrize("damage", [b"garbage", b""])
def test_a_rank_whose_capture_cannot_be_read_is_named_and_the_others_are_answered(typed, run, damage):
    trace_of(run, 1).write_bytes(damage)
    for command in (("report", "two", "--no-page"), ("analyze", "two")):
        done = typed(*command)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert str(trace_of(run, 1).relative_to(run.parent)) in done.stderr
    found = json.loads(typed("analyze", "two", "--json").stdout)
    assert [each["rank"] for each in found["ranks"]] == [0]
    assert [each["ranks"] for each in found["caveats"] if each["code"] == "rank_unreadable"] == [[1]]


def test_a_cycle_that_a_run_lacks_is_an_invalid_request(typed, run):
    done = typed("report", "two", "--no-page", "--cycle", "2")
    assert (done.returncode, done.stderr) == (2, "error: --cycle 2 is not in two; it holds one cycle.\n")


@pytest.mark.parametrize("columns", [{"phase": ["f", "g"]}, {"peak_bytes": []}, {"before_bytes": ["x"]}, {"phase": [["f"]]}])
def test_what_a_framework_measured_is_left_out_where_it_is_not_a_table(typed, run, columns):
    change_manifest(run, 1, **{f"framework__phase_memory__{name}": column for name, column in columns.items()})
    assert typed("report", "two", "-o", "page.html").returncode == 0
