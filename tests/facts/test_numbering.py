"""Numbers of iterations that the ranks' captures do not have in common."""

import pytest

from bridge_profiling.traces.types import Caveat
from tests.facts.ranks_in_hand import values, work, write_rank

_MS = 1_000_000


def _write(folder, rank, first, count, code="iterations_inferred", late_ns=0):
    """A rank's iterations of 10 ms, numbered from the first that it captured."""
    begins = [(first + place) * 10 * _MS + late_ns for place in range(count)]
    rows = {
        "iterations": [
            {"iteration": number, "start_ns": begin, "end_ns": begin + 9 * _MS, "boundary": False}
            for number, begin in enumerate(begins)
        ],
        "device_events": [
            work("compute", begin + _MS, begin + 9 * _MS, begin + 1000, iteration=number) for number, begin in enumerate(begins)
        ],
    }
    return write_rank(folder, rank, rows, caveats=[Caveat(code, "")])


def _by_rank(run):
    found = values(run.facts.iterations, "rank", "iteration")
    return [[number for rank, number in found if rank == mine] for mine in (0, 1)]


def test_inferred_iterations_that_end_together_have_the_same_number(tmp_path, run_of):
    _write(tmp_path, 0, 1, 4)
    _write(tmp_path, 1, 3, 3, late_ns=_MS)
    run = run_of(tmp_path)
    assert _by_rank(run) == [[0, 1, 2, 3], [2, 3, 4]]
    assert run.events(1, iterations=[3, 4])["iteration"].to_pylist() == [3, 4]


@pytest.mark.parametrize("known", [{"code": "else"}, {"late_ns": 4 * _MS}])
def test_numbers_stay_where_ranges_give_them_or_where_no_iterations_end_together(tmp_path, run_of, known):
    _write(tmp_path, 0, 1, 4)
    _write(tmp_path, 1, 3, 3, **known)
    assert _by_rank(run_of(tmp_path)) == [[0, 1, 2, 3], [0, 1, 2]]


def test_iterations_of_hosts_alone_keep_their_numbers(tmp_path, run_of):
    for rank in (0, 1):
        rows = [
            {"iteration": place, "start_ns": place * _MS, "end_ns": (place + 1) * _MS, "boundary": False} for place in (0, 1)
        ]
        write_rank(tmp_path, rank, {"iterations": rows[rank:]}, caveats=[Caveat("iterations_inferred", "")])
    assert _by_rank(run_of(tmp_path)) == [[0, 1], [1]]
