"""The training loop on real ranks: every layout trains, and what should not change a loss does not change a bit of it."""

import json

import pytest

from tests.frameworks.captured import Captured
from tests.recipes.trainings import run_cases, window
from tests.system.jobs import trace_iterations

pytestmark = pytest.mark.integration
pytest.importorskip("megatron.core")

LLAMA = (
    "--recipe=llama32_1b model.num_layers=2 model.hidden_size=64 model.num_attention_heads=4 model.num_query_groups=2"
    " model.ffn_hidden_size=96 model.vocab_size=128 model.seq_length=64 train.global_batch_size=8"
    " scheduler.lr_warmup_iters=1 optimizer.lr=1e-3"
)
WATCHED = (
    f"{window(1, 4)} profiling.record_shapes=true profiling.nvtx_ranges=true monitor.jsonl=true"
    " monitor.interval=0.1 train.manual_gc=true train.manual_gc_interval=2"
)
ONE_RANK = {
    "plain": "",
    "evaluated": "train.eval_interval=2",
    "watched": f"train.eval_interval=2 {WATCHED}",
    "bf16": "model.bf16=true ddp.use_distributed_optimizer=true",
    "masked": "dataset.reset_attention_mask=true dataset.reset_position_ids=true dataset.eod_mask_loss=true",
    "llama": LLAMA,
    "around_an_evaluation": f"{window(2, 4)} train.eval_interval=3",
}

PIPELINE = "model.pipeline_model_parallel_size=2"
OVERLAPPED = "ddp.use_distributed_optimizer=true ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true"
TWO_RANKS = {
    "dp_overlapped": f"{window(1, 3)} profiling.profile_ranks=[1] {OVERLAPPED} train.eval_interval=2",
    "tp": f"{window(1, 3)} profiling.profile_ranks=pp model.tensor_model_parallel_size=2",
    "pp": f"{window(1, 3)} profiling.profile_ranks=pp {PIPELINE} train.eval_interval=3",
    "pp_interleaved": f"{PIPELINE} model.virtual_pipeline_model_parallel_size=2 model.num_layers=4"
    " ddp.overlap_grad_reduce=true",
}
#: The ranks of each that are profiled.
CAPTURED = {"dp_overlapped": [1], "tp": [0], "pp": [0, 1], "pp_interleaved": []}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    return folder, *run_cases(folder, ONE_RANK)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, run_cases(folder, TWO_RANKS, ranks=2)[0]


def test_a_process_without_a_launcher_trains_alone_and_evaluations_and_watching_change_no_bit_of_any_loss(one_rank):
    one = one_rank[1]
    for name in ("plain", "masked", "llama"):
        assert list(one[name].train) == list(range(6))
        assert one[name].values[-1] < one[name].values[0] - 0.2
        assert name == "plain" or one[name].train != one["plain"].train
    # With the distributed optimizer.
    assert one["bf16"].values == pytest.approx(one["plain"].values, abs=0.02)
    assert list(one["evaluated"].evaluation) == [1, 3, 5]
    assert one["watched"].evaluation == one["evaluated"].evaluation
    assert one["watched"].train == one["evaluated"].train == one["plain"].train


def test_a_monitored_rank_logs_its_iterations_tokens_and_waiting_for_data(one_rank):
    folder = one_rank[0] / "watched" / "monitor"
    records = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    sample = [record for record in records if record["kind"] == "sample"][-1]
    training = sample["training"]
    assert (sample["rank"], training["iteration"]) == (0, 5)
    assert training["unavailable"]["loss"] == "the loop does not report it"
    assert training["tokens_per_second"] > 0 < training["data_loading_ratio"] < 1
    assert not (one_rank[0] / "plain" / "monitor").exists()


def test_every_phase_is_named_and_an_evaluation_inside_the_window(one_rank):
    names = Captured(one_rank[0] / "around_an_evaluation", "iter-2-4").ranges()
    # Two iterations of four microbatches, and an evaluation of as many.
    assert [names.count(phase) for phase in ("optimizer", "evaluation")] == [2, 1]
    assert [names.count(phase) for phase in ("forward-backward", "data-loading")] == [2, 16]


def test_a_layout_gives_the_losses_of_one_rank_and_pipeline_stages_train_and_evaluate_together(one_rank, two_ranks):
    one, losses = one_rank[1], two_ranks[1]
    for layout in ("dp_overlapped", "tp"):
        assert losses[layout].values == pytest.approx(one["plain"].values, abs=5e-5)
    for layout in ("pp", "pp_interleaved"):
        assert list(losses[layout].train) == list(range(6))
        assert losses[layout].values[-1] < losses[layout].values[0] - 0.3
    # Evaluations, over a pipeline and with overlapped gathers.
    assert list(losses["pp"].evaluation) == [2, 5]
    overlapped, alone = losses["dp_overlapped"].evaluation, one["evaluated"].evaluation
    assert list(map(float.fromhex, overlapped.values())) == pytest.approx(list(map(float.fromhex, alone.values())), abs=5e-5)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_exactly_the_ranks_asked_for_are_captured(two_ranks, layout):
    folder, expected = two_ranks[0] / layout, [f"rank-{rank}" for rank in CAPTURED[layout]]
    traces = sorted((folder / "torch").glob("iter-1-3/*.json.gz"))
    assert [trace.name.partition(".")[0] for trace in traces] == expected
    assert [trace_iterations(trace) for trace in traces] == [[1, 2]] * len(expected)
    assert sorted(path.stem for path in (folder / "manifest").glob("iter-1-3/rank-*")) == expected
