"""A recipe as a NeMo-Run task builds the very config it came from, and can still be edited."""

from __future__ import annotations

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from bridge_profiling.doctor.request import SETTINGS_KEY
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins.task import STARTS_NSYS_KEY, starts_nsys
from launch.tasks import pretrain_partial, pretrain_script
from recipes.tasks import as_config


@pytest.mark.needs("megatron")
@pytest.mark.parametrize("name", ["gpt_tiny", "gpt_125m", "llama32_1b", "llama3_8b", "qwen3_30b_a3b"])
def test_a_recipe_survives_the_way_to_the_job_finalized_or_not(name):
    from recipes.catalog import RANKS, get_recipe
    from recipes.finalize import finalize

    serializer = ZlibJSONSerializer()
    task = pretrain_partial(name, ["train.train_iters=60"])
    config = fdl.build(serializer.deserialize(serializer.serialize(task)).config)
    expected = get_recipe(name)()
    expected.train.train_iters = 60
    assert config == expected
    finalize(config, RANKS[name])
    rebuilt = fdl.build(as_config(config))
    finalize(rebuilt, RANKS[name])
    assert rebuilt.model.ffn_hidden_size == config.model.ffn_hidden_size


@pytest.mark.needs("megatron")
def test_what_cannot_be_sent_to_the_job_is_refused():
    from tests.recipes.builders import tiny

    with pytest.raises(ProfilingConfigError, match=r"torch\.bfloat16"):
        pretrain_partial(lambda: tiny("model.params_dtype=bfloat16"))


@pytest.mark.needs("megatron")
def test_doctor_finds_the_settings_of_the_recipe_in_both_kinds_of_task():
    from recipes.catalog import known_settings
    from tests.recipes.builders import recipe

    assert pretrain_script("gpt_125m").metadata[SETTINGS_KEY].split() == known_settings(recipe("gpt_125m"))
    lengths = pretrain_partial("gpt_125m").config.train.__arguments__
    assert lengths.items() >= {"train_iters": 50, "micro_batch_size": 2, "global_batch_size": 32}.items()


@pytest.mark.needs("megatron")
def test_both_kinds_of_task_say_by_a_mark_that_they_start_nsys_and_others_do_not():
    assert starts_nsys(pretrain_script("gpt_tiny"))
    assert starts_nsys(pretrain_partial("gpt_tiny"))
    assert not starts_nsys(run.Script(path="a.py", metadata={STARTS_NSYS_KEY: "no"}))
    assert not starts_nsys(run.Partial(print))
