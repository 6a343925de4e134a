"""What differs between releases of megatron-core, whichever of them is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import pytest

pytestmark = pytest.mark.needs("megatron")
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bridge_profiling import ProfilingConfigError, megatron_versions  # noqa: E402
from bridge_profiling.overrides import apply_overrides  # noqa: E402
from recipes import checks, releases  # noqa: E402
from recipes.megatron import train  # noqa: E402
from recipes.models import gpt_tiny  # noqa: E402
from tests.forked_ranks import run_ranks  # noqa: E402


@pytest.mark.parametrize(
    ("version", "hidden"),
    [("0.4.1", True), ("0.5.0rc1", True), ("0.6rc2", False), ("0.6.0", False), ("0.7.1", False), (None, False)],
)
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


def whole_sequences() -> None:
    """A rank's part: data-parallel ranks keep whole sequences, whatever a missing group means to this megatron-core."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    share = releases.context_parallel_share({"tokens": torch.arange(8).reshape(1, 8)})
    assert share["tokens"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    parallel_state.destroy_model_parallel()


def halves() -> None:
    """A rank's part: a context-parallel rank has one quarter from the front and one from the back."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    share = releases.context_parallel_share({"tokens": torch.arange(8).reshape(1, 8)})
    mine = [[0, 1, 6, 7], [2, 3, 4, 5]][torch.distributed.get_rank()]
    assert share["tokens"].tolist() == [mine]
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("part", [whole_sequences, halves])
def test_sequences_are_divided_among_context_parallel_ranks_alone(tmp_path, part):
    ended = run_ranks(on_cpu, part, folder=tmp_path, ranks=2)
    assert ended.exit_codes == [0, 0], ended.stderr


def on_cpu(part) -> None:
    """Run a rank's part with device names answered for the CPU."""
    from recipes.megatron.cpu import megatron_on_cpu

    with megatron_on_cpu():
        part()


def test_groups_are_found_by_their_structure_alone_and_nothing_else_is_removed():
    def group(lr):
        return {
            "max_lr": lr,
            "min_lr": 0.0,
            "start_wd": 0.1,
            "end_wd": 0.1,
            "wd_mult": 1.0,
            "is_expert_parallel": False,
            "step": 3,
        }

    own = [group(1e-3)]
    saved = {0: {"optimizer": {"param_groups": [group(1e-4)]}}, "optimizer": {"param_groups": [group(2.0)], "state": {}}}
    releases.find_groups_by_structure(own, saved)
    left = {"wd_mult": 1.0, "is_expert_parallel": False, "step": 3}
    assert own == [left]
    assert saved == {0: {"optimizer": {"param_groups": [left]}}, "optimizer": {"param_groups": [left], "state": {}}}


@pytest.mark.parametrize("setting", ["model.use_mup=true", "ddp.num_buckets=4", "optimizer.optimizer_cuda_graph=true"])
def test_what_a_release_adds_and_the_loop_cannot_do_is_refused(setting):
    config = gpt_tiny()
    section, name = setting.partition("=")[0].split(".")
    if not hasattr(getattr(config, section), name):
        pytest.skip(f"this megatron-core has no {setting.partition('=')[0]}")
    apply_overrides(config, [setting])
    with pytest.raises(ProfilingConfigError, match=f"{setting} is not supported"):
        checks.check_supported(config)


def test_a_release_that_was_never_tested_trains_with_one_line_in_the_log(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.megatron.core, "__version__", "0.20.0")
    config = gpt_tiny()
    config.train.train_iters = 1
    assert len(train.pretrain(config)) == 1
    message = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    problem = megatron_versions.untested("0.20.0")
    assert message == [f"warning: {problem}; if the training fails, type pip install {megatron_versions.tested_requirement()}"]
