"""Settings that megatron-core gets on a machine without CUDA, and none where CUDA is available."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from bridge_profiling import ProfilingConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from recipes.megatron import cpu, train  # noqa: E402
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu  # noqa: E402
from tests.recipes.builders import recipe, tiny  # noqa: E402


@pytest.mark.usefixtures("alone")
def test_the_name_cuda_means_the_cpu_inside_and_is_counted():
    with megatron_on_cpu() as mode:
        tensor = torch.zeros(2, device="cuda")
        assert tensor.device.type == "cpu"
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.synchronize()
    assert mode.rewrites == {"zeros": 1, "cuda": 1, "type": 1}


@pytest.mark.usefixtures("alone")
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
        assert (mode, torch.cuda.current_device, torch.zeros(1).type()) == (None, before, "torch.FloatTensor")


def test_cuda_only_settings_are_changed_and_named():
    config = recipe("gpt_125m", "model.tensor_model_parallel_size=2", "model.hidden_dropout=0.1")
    assert adapt_to_cpu(config) == [
        "model.use_cpu_initialization=true",
        "model.batch_p2p_comm=false",
        "model.bias_activation_fusion=false",
        "model.bias_dropout_fusion=false",
        "model.hidden_dropout=0.0",
    ]
    assert adapt_to_cpu(config) == []


@pytest.mark.parametrize("setting", ["model.recompute_granularity=selective", "optimizer.optimizer_cpu_offload=true"])
def test_what_has_no_form_without_cuda_is_refused(setting):
    with pytest.raises(ProfilingConfigError, match=f"{setting.partition('=')[0]} is set, and there is no GPU here"):
        adapt_to_cpu(tiny(setting))


@pytest.mark.integration
@pytest.mark.usefixtures("alone")
def test_what_is_rewritten_for_the_cpu_is_what_megatron_core_is_known_to_need(monkeypatch):
    with megatron_on_cpu() as mode:
        monkeypatch.setattr(train, "megatron_on_cpu", nullcontext)
        train.pretrain(tiny("train.train_iters=1"))
    # The first training of a process makes the causal mask, with ones; megatron-core keeps it for those that follow.
    assert mode.rewrites.keys() | {"ones"} == {"zeros", "ones", "tensor", "type"}


@pytest.mark.integration
@pytest.mark.usefixtures("alone")
def test_where_transformer_engine_is_installed_without_a_gpu_none_of_its_kernels_is_called(monkeypatch):
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    def kernel(*arguments, **more):
        raise RuntimeError("this is a CUDA kernel")

    monkeypatch.setattr(cpu, "HAVE_TE", True)
    bound = [(clip_grads, name) for name in ("l2_norm_impl", "multi_tensor_applier", "multi_tensor_scale_impl")]
    for module, name in [*bound, (optimizer, "Adam"), (optimizer.optimizer, "multi_tensor_applier")]:
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    # Small enough that every step clips.
    assert len(train.pretrain(tiny("train.train_iters=2", "optimizer.clip_grad=1e-3"))) == 2
    assert clip_grads.l2_norm_impl is kernel
    assert (optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.USING_TE_OPTIMIZER) == (False, True)
