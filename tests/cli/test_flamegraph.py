"""`bridge-profiling flamegraph` as it is typed."""

import json

from tests.cli.ranks import write


def test_it_writes_speedscope_or_folded_text_and_says_what_was_not_recorded(typed, folder):
    write(folder / "run" / "rank-1.json.gz", 1)
    done = typed("flamegraph", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("flamegraph.speedscope.json: 4 stacks by host time. Open it at https://www.speedscope.app\n")
    assert "- ranks 0-1: no Python stacks were recorded" in done.stdout
    document = json.loads((folder / "flamegraph.speedscope.json").read_text())
    assert [profile["weights"] for profile in document["profiles"]] == [[1796, 4]] * 2
    done = typed("flamegraph", "run", "--folded", "--weight", "device", "--ranks", "1", "-q")
    assert (done.returncode, done.stdout) == (0, "")
    assert (folder / "flamegraph.folded.txt").read_text() == "rank 1;thread 1;ProfilerStep 500000\n"
