"""The `monitor` section: what a training's ranks tell while they train, and that their losses do not change."""

from __future__ import annotations

import json

import pytest

from bridge_profiling import ProfilingConfigError

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from bridge_profiling.overrides import apply_overrides  # noqa: E402
from recipes.finalize import finalize  # noqa: E402
from recipes.models import gpt_tiny  # noqa: E402

MONITORED = ["monitor.jsonl=true", "monitor.tensorboard=true", "monitor.interval=0.1"]


@pytest.fixture(scope="module")
def losses(tmp_path_factory, run_cases):
    cases = {"plain": [], "monitored": [*MONITORED, "train.eval_interval=3"]}
    return run_cases(tmp_path_factory.mktemp("monitored"), cases)[0]


def test_a_rank_logs_its_iterations_tokens_and_waiting_for_data(losses):
    folder = losses["monitored"].folder / "monitored" / "monitor"
    records = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    samples = [record for record in records if record["kind"] == "sample"]
    assert {sample["rank"] for sample in samples} == {0}
    last = samples[-1]["training"]
    assert last["iteration"] == 5
    assert last["tokens_per_second"] > 0
    assert 0 < last["data_loading_ratio"] < 1
    assert last["unavailable"]["loss"] == "the loop does not report it"
    assert samples[-1]["processes"][0]["resident_memory_bytes"] > 50 << 20
    assert [file.stat().st_size > 0 for file in (folder / "tensorboard" / "rank-0").iterdir()] == [True]


def test_it_changes_no_loss(losses):
    assert losses["monitored"].train == losses["plain"].train
    assert not (losses["plain"].folder / "plain" / "monitor").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("monitor.interval=0", "monitor.interval=0.0 is too small; it must be greater than 0"),
        ("monitor.port=70000", "monitor.port=70000 is not a port"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(override, message):
    config = gpt_tiny()
    apply_overrides(config, [override])
    with pytest.raises(ProfilingConfigError, match=message):
        finalize(config, 1)
