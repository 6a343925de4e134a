"""Ranks and coordinates agree with megatron-core's own parallel_state."""

import itertools

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.layout import ParallelLayout, name_ranks
from bridge_profiling.settings.window import select_ranks

LAYOUTS = [
    {"world_size": 16, "tp": 2, "pp": 2, "cp": 2},
    {"world_size": 16, "tp": 2, "pp": 2, "ep": 2, "etp": 1},
    {"world_size": 16, "tp": 1, "pp": 4, "ep": 4},
    {"world_size": 16, "tp": 4, "pp": 2, "ep": 2, "etp": 2},
]


@pytest.mark.parametrize(
    ("sizes", "order"), list(itertools.product(LAYOUTS, ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-dp-cp-ep-pp"]))
)
def test_coordinates_are_megatron_cores(sizes, order):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    layout = ParallelLayout(order=order, **sizes)
    dense = parallel_state.RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    expert_tp = sizes.get("etp", layout.tp)
    expert = parallel_state.RankGenerator(
        tp=expert_tp, ep=layout.ep, dp=layout.world_size // (expert_tp * layout.ep * layout.pp), pp=layout.pp, cp=1, order=order
    )
    for name, generator in [*((name, dense) for name in ("tp", "dp", "pp", "cp")), ("ep", expert)]:
        for group in generator.get_ranks(name):
            for place, rank in enumerate(group):
                assert layout.coordinates(rank)[name] == (place, len(group)), (name, rank)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_pp_means_one_rank_per_stage_at_the_origin_of_the_others(sizes):
    layout = ParallelLayout(**sizes)
    ranks = select_ranks("pp", layout)
    places = [layout.coordinates(rank) for rank in ranks]
    assert [place["pp"][0] for place in places] == list(range(layout.pp))
    assert all(place[name][0] == 0 for place in places for name in ("tp", "cp", "dp", "ep"))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [({"world_size": 6, "tp": 4}, "multiple of 4"), ({"tp": 0}, "tp=1 or more"), ({"order": "tp-xx"}, "tp-cp-ep-dp-pp")],
)
def test_a_layout_that_cannot_be_is_refused(sizes, told):
    with pytest.raises(ProfilingConfigError, match=told):
        ParallelLayout(**sizes)


def test_of_many_scattered_ranks_the_first_are_named_and_the_others_counted():
    assert name_ranks([7, 0, 1, 2, 1]) == "ranks 0-2, 7"
    assert name_ranks([*range(0, 24, 2), 30, 31, 32]) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 3 more"
