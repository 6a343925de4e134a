"""Every training of the GPU tests, by name: a covering set of layouts, profilers and endings, each as short as it can be."""

from typing import Any

from tests.gpu.jobs import BridgeSpec, JobSpec, devices

#: GPUs of a job that runs on one as well as on two: data parallelism is not what its tests are about.
_ONE_OR_TWO = 1 if len(devices()) == 1 else 2

#: Megatron-core's own layers: left alone, a recipe takes Transformer Engine's where that is installed.
_LOCAL = "model.transformer_impl=local"
#: 20 iterations with a window of 4 in their midst, and layers enough for every stage.
_GPT = (_LOCAL, "train.train_iters=20", "model.num_layers=4", "model.seq_length=1024", "train.micro_batch_size=2")
_DP2 = (*_GPT, "train.global_batch_size=8")
_TP2 = (*_DP2, "model.tensor_model_parallel_size=2")
_PP2 = (*_DP2, "model.pipeline_model_parallel_size=2")
#: One layer on one GPU: what a layer's execution changes shows in full.
_LAYER = (_LOCAL, "train.train_iters=20", "model.num_layers=1", "model.seq_length=1024", "train.global_batch_size=4")
#: More than can be done before the signal comes, and few enough that data for them are indexed at once.
_ENDLESS = ("train.train_iters=3000",)

#: How a layer may be executed, by name.
EXECUTIONS = {
    "eager": (),
    "cuda_graphs": ("model.cuda_graph_impl=local",),
    "full_recompute": (
        "model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"
    ),
    "selective_recompute": ("model.recompute_granularity=selective",),
    "compiled": ("model.torch_compile=true",),
}  # fmt: skip

#: Micro-batches of an iteration of these.
EXECUTION_MICROBATCHES = 2

#: Transformer Engine's layers: what each case sets, and the GPUs that it takes. Four layers of gpt_125m.
_TE = (*_GPT, "train.global_batch_size=8", "model.transformer_impl=transformer_engine")
_TE_TP2 = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")
TRANSFORMER_ENGINE = {
    "te_bf16": (_ONE_OR_TWO, ()),
    "te_fp8_delayed": (_ONE_OR_TWO, ("model.fp8=hybrid", "model.fp8_recipe=delayed")),
    "te_sequence_parallel": (2, _TE_TP2),
    "te_context_parallel": (2, ("model.context_parallel_size=2",)),
    "te_cuda_graphs": (1, ("model.cuda_graph_impl=local",)),
}
#: Besides torch, these are captured by nsys.
TE_UNDER_NSYS = ("te_bf16", "te_fp8_delayed", "te_cuda_graphs")

#: What makes two runs equal to the last bit. Otherwise fused attention adds up its gradients in any order, cuBLAS may where
#: streams share a workspace, and the compiler of fused kernels takes the reduction that was fastest in a trial.
_DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


def _transformer_engine() -> dict[str, JobSpec]:
    """Each case unprofiled and under torch on all ranks, some under nsys."""
    found = {}
    for name, (gpus, settings) in TRANSFORMER_ENGINE.items():
        options = {"environment": _DETERMINISTIC}
        everyone = {"selected": tuple(range(gpus)), **options}
        found[name] = JobSpec("gpt_125m", gpus, (*_TE, *settings), **options)
        found[f"{name}-torch"] = JobSpec("gpt_125m", gpus, (*_TE, *settings), "torch", **everyone)
        if name in TE_UNDER_NSYS:
            found[f"{name}-nsys"] = JobSpec("gpt_125m", gpus, (*_TE, *settings), "nsys", **everyone)
    return found


def _bridge(profiler: str = "none", *settings: str, gpus: int = _ONE_OR_TWO, **options: object) -> BridgeSpec:
    """A training in Megatron Bridge's own loop, under our callback."""
    selected = tuple(range(gpus)) if profiler != "none" else (0,)
    return BridgeSpec("bridge", gpus, settings, profiler, selected=selected, environment=_DETERMINISTIC, **options)


def _gpt(
    gpus: int, settings: tuple[str, ...], profiler: str = "none", selected: tuple[int, ...] = (0,), **known: Any
) -> JobSpec:
    return JobSpec("gpt_125m", gpus, settings, profiler, selected=selected, **known)


_BOTH = (0, 1)
_SAVED, _LOADED = ("checkpoint.save={folder}/saved", "checkpoint.save_interval=10"), ("checkpoint.load={folder}/saved",)
_SHAPES, _MEMORY, _SHAPES_AND_MEMORY = ("--record-shapes",), ("--memory",), ("--record-shapes", "--memory")
_UNTIL_SIGTERM = {"window": (4, 3000), "terminate_at": 8}


def _fault(text: str) -> dict[str, str]:
    return {"PLANTED_FAULT": text}


JOBS: dict[str, JobSpec] = {
    # -- two GPUs: the chain -------------------------------------------------------------------------------------------
    "tp2": _gpt(2, (*_TP2, *_SAVED)),
    "tp2-nsys": _gpt(2, _TP2, "nsys", _BOTH),
    "tp2-torch-shapes-memory": _gpt(2, _TP2, "torch", _BOTH, options=_SHAPES_AND_MEMORY),
    "tp2-torch-resumed": _gpt(2, (*_TP2, *_LOADED), "torch", (1,), needs="tp2", resumes_at=10),
    "pp2": _gpt(2, _PP2),
    "pp2-torch-memory": _gpt(2, _PP2, "torch", _BOTH, ranks="pp", options=_MEMORY),
    "pp2-nsys-shapes": _gpt(2, _PP2, "nsys", _BOTH, options=_SHAPES),
    "dp2": _gpt(2, _DP2),
    "dp2-torch": _gpt(2, _DP2, "torch", (1,)),
    # -- two GPUs, and one; the longest first, since they are started in this order ----------------------------------
    **{
        f"{execution}-{profiler}": _gpt(1, (*_LAYER, *settings), profiler)
        for execution, settings in EXECUTIONS.items()
        for profiler in ("torch", "nsys")
    },
    "failing-torch": _gpt(2, _DP2, "torch", _BOTH, environment=_fault("fail * 10")),
    "one-fails-torch": _gpt(2, _DP2, "torch", _BOTH, environment=_fault("fail 1 10")),
    "one-fails-nsys": _gpt(2, _DP2, "nsys", _BOTH, environment=_fault("fail 1 10")),
    "terminated-torch": _gpt(2, (*_DP2, *_ENDLESS), "torch", _BOTH, **_UNTIL_SIGTERM),
    "terminated-nsys": _gpt(2, (*_DP2, *_ENDLESS), "nsys", _BOTH, **_UNTIL_SIGTERM),
    **_transformer_engine(),
    "bridge": _bridge(),
    "bridge-torch-memory": _bridge("torch", options=_MEMORY),
    "bridge-nsys": _bridge("nsys"),
    "bridge_tp2": _bridge("none", "model.tensor_model_parallel_size=2", gpus=2),
    "bridge_tp2-torch": _bridge("torch", "model.tensor_model_parallel_size=2", gpus=2),
    "out-of-memory": _gpt(1, _LAYER, "torch", options=_MEMORY, environment=_fault("leak * 10"), alone=True),
    "terminated-alone-torch": _gpt(1, (*_LAYER, *_ENDLESS), "torch", direct=True, **_UNTIL_SIGTERM),
    "terminated-alone-nsys": _gpt(1, (*_LAYER, *_ENDLESS), "nsys", direct=True, **_UNTIL_SIGTERM),
}
