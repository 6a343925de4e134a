"""What differs between releases of megatron-core, whichever of them is installed."""

import importlib
import importlib.metadata
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bridge_profiling import megatron_versions  # noqa: E402
from recipes import releases  # noqa: E402
from recipes.megatron import train  # noqa: E402
from tests.forked_ranks import run_ranks  # noqa: E402
from tests.recipes.builders import tiny  # noqa: E402


@pytest.mark.parametrize(("version", "hidden"), [("0.5.0rc1", True), ("0.6rc2", False), ("0.6.0", False), (None, False)])
def test_asynchronous_checkpoints_that_megatron_core_refuses_are_hidden_from_it(monkeypatch, version, hidden):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(sys, "modules", {name: one for name, one in sys.modules.items() if name != releases._ASYNC_CHECKPOINTS})
    releases.hide_old_async_checkpoints()
    assert (releases._ASYNC_CHECKPOINTS in sys.modules) == hidden
    if hidden:
        with pytest.raises(ImportError):
            importlib.import_module(releases._ASYNC_CHECKPOINTS)


def shares() -> None:
    """A rank's part: data-parallel ranks keep whole sequences, context-parallel ones a part of each half."""
    from megatron.core import parallel_state

    from recipes.megatron.cpu import megatron_on_cpu

    halves = [[0, 1, 6, 7], [2, 3, 4, 5]][torch.distributed.get_rank()]
    for context, mine in ((1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, halves)):
        with megatron_on_cpu():
            parallel_state.initialize_model_parallel(context_parallel_size=context)
            share = releases.context_parallel_share({"tokens": torch.arange(8).reshape(1, 8)})
            parallel_state.destroy_model_parallel()
        assert share["tokens"].tolist() == [mine]


@pytest.mark.integration
def test_sequences_are_divided_among_context_parallel_ranks_alone(tmp_path):
    run_ranks(shares, folder=tmp_path, ranks=2, check=True)


def test_groups_are_found_by_their_structure_alone_and_nothing_else_is_removed():
    left = {"wd_mult": 1.0, "is_expert_parallel": False, "step": 3}
    configured = {"max_lr": 1e-3, "min_lr": 0.0, "start_wd": 0.1, "end_wd": 0.1}
    own, first, second = [left | configured], [left | configured], [left | configured | {"max_lr": 2.0}]
    saved = {0: {"optimizer": {"param_groups": first}}, "optimizer": {"param_groups": second, "state": {}}}
    releases.find_groups_by_structure(own, saved)
    assert (own, first, second) == ([left], [left], [left])
    assert saved["optimizer"]["state"] == {}


@pytest.mark.integration
def test_a_release_that_was_never_tested_trains_with_one_line_in_the_log(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.megatron.core, "__version__", "0.20.0")
    assert len(train.pretrain(tiny("train.train_iters=1"))) == 1
    message = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    problem = megatron_versions.untested("0.20.0")
    assert message == [f"warning: {problem}; if the training fails, type pip install {megatron_versions.tested_requirement()}"]
