"""The recipes: what they describe, and how a command line finds them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bridge_profiling import ProfilingConfigError

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

from recipes.gpt import RECIPES, get_recipe, gpt_125m, gpt_tiny  # noqa: E402


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_recipe_fits_together(name, world_size):
    get_recipe(name)().finalize(world_size)


def test_each_call_gives_a_configuration_of_its_own():
    first = gpt_tiny()
    first.train.train_iters = 3
    assert gpt_tiny().train.train_iters == 20


def test_gpt_125m_has_the_shape_its_name_says():
    model = gpt_125m().model
    embeddings = (model.vocab_size + model.seq_length) * model.hidden_size
    layer = 12 * model.hidden_size**2 + 13 * model.hidden_size
    assert 120e6 < embeddings + model.num_layers * layer + 2 * model.hidden_size < 130e6
    assert model.bf16


def test_a_wrong_name_is_told_the_nearest():
    with pytest.raises(ProfilingConfigError, match=r"'gpt_tny'; the recipes are gpt_tiny, gpt_125m\. Type gpt_tiny"):
        get_recipe("gpt_tny")


def test_importing_the_loop_says_nothing_and_loads_no_nemo_run():
    code = "import sys, recipes.megatron.train; sys.exit('nemo_run' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
