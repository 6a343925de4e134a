"""`bridge-profiling compare` as it is typed: what it prints, the page, and the exit code a CI job relies on."""

import re

import pytest

from tests.compare.compared_runs import WrittenRun, quiet


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A base, a slower run, one of two iterations, one without, and one of more work: each is read once."""
    folder = tmp_path_factory.mktemp("runs")
    quiet().write(folder / "base")
    quiet(1.2, kernels={"gemm": [360.0, 360.0], "softmax": [50.0]}, seed=2).write(folder / "slower")
    WrittenRun(iterations=2, seed=3).write(folder / "short")
    WrittenRun(iterations=1, marked=False).write(folder / "unmarked")
    quiet(shapes="[[128, 64], [64, 64]]").write(folder / "more_work")
    return folder


@pytest.fixture(autouse=True)
def runs(typed, written, monkeypatch):
    """The working directory has these runs."""
    monkeypatch.chdir(written)
    return written


def test_the_answer_is_the_first_sentence_and_the_page_says_the_same(typed, runs):
    lines = typed("compare", "base", "slower", "-o", "page.html").stdout.splitlines()
    assert lines[0] == "base → slower"
    answer = "slower is slower: the median iteration takes 6 ms instead of 5 ms, +1.0 ms (+20.0%), speed-up 0.83×"
    assert lines[1].startswith(answer)
    page = (runs / "page.html").read_text()
    assert "slower is slower: the median iteration takes 6 ms" in page
    assert re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page) is None


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("base slower --fail-over 5%", 3, "slower by more than 5%"),
        # Iterations enough on one side alone: a gate that was not looked at must say so.
        ("base short --fail-over 5%", 0, "warning: --fail-over 5% cannot be judged"),
        ("base short --fail-over 5% --strict", 4, "3 per side. Let both trainings run 50 iterations beyond the window"),
        ("base unmarked --fail-over 5% --strict", 4, "Mark iterations in both runs"),
        ("base more_work --fail-over 5% --strict", 4, "not comparable (shapes of matrix products). Capture a new baseline"),
        # The last of several runs is judged, against the first or the previous one.
        ("base base slower --fail-over 5%", 3, "slower by more than 5%"),
        ("base slower slower --fail-over 5% --against previous", 0, ""),
        ("base slower base --also-base base --also-other base", 2, "--also-base and --also-other with 3 runs"),
    ],
)
def test_the_exit_code_says_whether_the_gate_was_passed(typed, line, code, said):
    done = typed("compare", *line.split())
    assert done.returncode == code
    assert said in done.stderr


def test_a_damaged_capture_is_named_and_ends_with_1(typed, runs):
    trace = next(WrittenRun(ranks=2, seed=5).write(runs / "damaged").rglob("rank-1*.gz"))
    trace.write_bytes(trace.read_bytes()[:200])
    done = typed("compare", "base", "damaged", "--fail-over", "5%", "--strict")
    assert done.returncode == 1
    assert "--fail-over 5% cannot be judged: a capture could not be read" in done.stderr
    assert "rank-1.pt.trace.json" in done.stderr


def test_several_runs_are_one_table_a_sentence_per_change_and_a_line_on_the_page(typed, runs):
    for night, (factor, host_us) in enumerate([(1.0, 100.0), (1.0, 100.0), (1.12, 700.0), (1.12, 700.0)]):
        quiet(factor, host_us=host_us, seed=night).write(runs / f"nightly/{night}/profiles")
    nights = [f"nightly/{night}/profiles" for night in range(4)]
    lines = typed("compare", *nights, "-o", "page.html").stdout.splitlines()
    assert lines[:3] == [
        "0/profiles → 3/profiles, 4 runs",
        "Run 4 is 12% slower than run 1 (0.89×): host launch delay +0.6 ms.",
        "Run 3 is 12% slower than run 2 (0.89×): host launch delay +0.6 ms.",
    ]
    assert 'id="figure-series"' in (runs / "page.html").read_text()
