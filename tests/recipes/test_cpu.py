"""Settings that megatron-core gets on a machine without CUDA, and none where CUDA is available."""

from __future__ import annotations

import pytest

from bridge_profiling import ProfilingConfigError

pytestmark = pytest.mark.needs("megatron")
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from recipes.megatron import cpu  # noqa: E402
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu  # noqa: E402
from recipes.megatron.train import pretrain  # noqa: E402
from recipes.models import gpt_125m, gpt_tiny  # noqa: E402
from tests.forked_ranks import LAUNCHER_VARIABLES  # noqa: E402


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
def test_the_name_cuda_means_the_cpu_inside_and_is_counted():
    with megatron_on_cpu() as mode:
        tensor = torch.zeros(2, device="cuda")
        assert tensor.device.type == "cpu"
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.synchronize()
    assert mode.rewrites == {"zeros": 1, "cuda": 1, "type": 1}


@pytest.mark.usefixtures("no_cuda")
def test_torch_is_as_it_was_afterwards_also_after_an_error():
    before = torch.cuda.current_device, torch.cuda.synchronize
    with pytest.raises(RuntimeError, match="training failed"), megatron_on_cpu():
        raise RuntimeError("training failed")
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_nothing_is_changed_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with megatron_on_cpu() as mode:
        assert mode is None
        assert torch.cuda.current_device is before
        assert torch.zeros(1).type() == "torch.FloatTensor"


def test_cuda_only_settings_are_changed_and_named():
    config = gpt_125m()
    config.model.tensor_model_parallel_size = 2
    config.model.hidden_dropout = 0.1
    changed = adapt_to_cpu(config)
    assert changed == [
        "model.use_cpu_initialization=true",
        "model.batch_p2p_comm=false",
        "model.bias_activation_fusion=false",
        "model.bias_dropout_fusion=false",
        "model.hidden_dropout=0.0",
    ]
    assert adapt_to_cpu(config) == []


@pytest.mark.parametrize(("setting", "value"), [("recompute_granularity", "selective"), ("optimizer_cpu_offload", True)])
def test_what_has_no_form_without_cuda_is_refused(setting, value):
    config = gpt_tiny()
    setattr(config.model if hasattr(config.model, setting) else config.optimizer, setting, value)
    with pytest.raises(ProfilingConfigError, match=f"{setting} is set, and there is no GPU here"):
        adapt_to_cpu(config)


@pytest.mark.usefixtures("no_cuda")
def test_where_transformer_engine_is_installed_without_a_gpu_none_of_its_kernels_is_called(monkeypatch):
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    def kernel(*arguments, **more):
        raise RuntimeError("this is a CUDA kernel")

    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "HAVE_TE", True)
    bound = [(clip_grads, name) for name in ("l2_norm_impl", "multi_tensor_applier", "multi_tensor_scale_impl")]
    for module, name in [*bound, (optimizer, "Adam"), (optimizer.optimizer, "multi_tensor_applier")]:
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    config = gpt_tiny()
    config.train.train_iters = 2
    # Small enough that every step clips.
    config.optimizer.clip_grad = 1e-3
    assert len(pretrain(config)) == 2
    assert clip_grads.l2_norm_impl is kernel
    assert (optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.USING_TE_OPTIMIZER) == (False, True)
