"""Names of kernels, of ranges and of runtime calls, and what they show.

Names of kernels are those of cuBLAS, CUTLASS, cuDNN, PyTorch, CUB and Triton. A name that does not say what is asked gives None
or False: nothing is guessed. Each kernel is also in a group: that of the first pattern in a table that its name matches.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.traces.kinds import COMMUNICATION, kernel_kind

#: Names whose answers are kept: the ranks that a process reads have the same kernels.
_NAMES = 1 << 13

#: Matrix products and convolutions.
MATRIX_PRODUCT = re.compile(
    r"gemm|gemv|nvjet|xmma|cutlass|wgmma|matmul|\bmm_|_mm\b|fused_\w*mm_|splitk|Cijk_|convolve|scudnn|winograd|"
    r"[dw]grad_(?:engine|alg)|conv_depthwise|(?:conv|[dw]grad)2d_c1_k1|\bfft2d_",
    re.IGNORECASE,
)

#: Precisions of matrix products that 16 bits make much faster, as `product_precision` names them.
FULL_PRECISIONS = ("fp64", "fp32", "tf32")

#: Precisions and names of their products; the first one that matches counts. nvjet names its types in letters: those of the
#: factors come first, t is bf16, h fp16, q and o fp8, s fp32.
_PRECISIONS = {
    precision: re.compile(pattern, re.IGNORECASE)
    for precision, pattern in {
        "fp64": r"dgemm|d884|f64f64|gem[mv]\w*kernel\w*<(?:int, )*double|gemmSN_\w+<double|"
        r"convolve_\w*<double|[dw]grad_(?:engine|alg\w*)<double",
        "tf32": r"tf32|[_<]s1688(?!\w*(?:b?f16|bf16))|nvjet_(?:sm\d+_)?(?!sm\d)s[a-z]+_",
        "fp32": r"(?-i:^(?!.*(?:bf16|__half|bfloat|f16))).*(?:sgemm|scudnn|c?f32c?f32_f32f32_c?f32|"
        r"\bfft2d_[rc]2[rc]|winograd\w*<float|"
        r"gem[mv]\w*kernel\w*<(?:int, )*float, float, float|gemmSN_\w+<float|"
        r"convolve_\w*<float|[dw]grad_(?:engine|alg\w*)<float|conv_depthwise\w+<float|fmha_cutlass[FB]_f32)",
        "fp8": r"e4m3|e5m2|fp8|nvjet_(?:sm\d+_)?[qo]",
        "bf16": r"bf16|bfloat|nvjet_(?:sm\d+_)?t|s16816",
        "fp16": r"f16|half|nvjet_(?:sm\d+_)?h|hgemm|h1688|h16816",
    }.items()
}

SOFTMAX = re.compile(r"softmax", re.IGNORECASE)

#: Of log_softmax, which a loss takes; the fifth argument of torch's own kernels says whether they are it.
LOG_SOFTMAX = re.compile(
    r"log_?softmax|cross_?entropy|softmax_warp_\w+<[^<>]*?, *(?:\(int\))?\d+, *(?:true|\(bool\)1)", re.IGNORECASE
)

FUSED_ATTENTION = re.compile(r"flash|fmha|sdpa|flex_attention|fused_attention|attn_(?:fwd|bwd)", re.IGNORECASE)

#: Copies of an image between channels first and channels last.
LAYOUT = re.compile(r"nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw", re.IGNORECASE)

_CONVOLUTION = re.compile(r"conv(?!ert)|implicit_gemm|fprop|[dw]grad|winograd|scudnn|\bfft2d_", re.IGNORECASE)

#: torch copies with this kernel where the two tensors differ in strides; others copy several elements at a time.
STRIDED_COPY = re.compile(r"at::native::elementwise_kernel<.*direct_copy_kernel")

_ELEMENTWISE = re.compile(
    r"(?:at::native|cudnn::).*(?:elementwise|reduce_kernel|softmax|norm|dropout|pool|CatArray|nhwc|nchw)", re.IGNORECASE
)

#: torch's kernels for one tensor; those for lists of tensors are multi_tensor_apply_kernel.
OF_ONE_TENSOR = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(?:vectorized_|unrolled_)?(?:elementwise|reduce)_kernel")

_OF_PARAMETERS = re.compile(r"lerp_|addcmul|addcdiv|Norm\w*Ops")

_SCALES, _ADDS = re.compile(r"MulFunctor"), re.compile(r"CUDAFunctor(?:OnSelf)?_add")

#: Normalization of a batch of images in channels first.
CHANNELS_FIRST_NORM = re.compile(r"at::native::batch_norm_(?!\w*channels_last)")

_NOT_FP32 = re.compile(r"bfloat16|half|double|multi_tensor", re.IGNORECASE)


@lru_cache(maxsize=_NAMES)
def is_product(name: str) -> bool:
    """Whether it is a matrix product or a convolution, and not one inside fused attention."""
    return bool(MATRIX_PRODUCT.search(name)) and not FUSED_ATTENTION.search(name)


@lru_cache(maxsize=_NAMES)
def is_product_or_attention(name: str) -> bool:
    """Whether it is a matrix product, a convolution or fused attention."""
    return bool(MATRIX_PRODUCT.search(name) or FUSED_ATTENTION.search(name))


@lru_cache(maxsize=_NAMES)
def product_precision(name: str) -> str | None:
    """The precision of a product or a convolution whose name says it, else None."""
    found = (precision for precision, pattern in _PRECISIONS.items() if pattern.search(name))
    return next(found, None) if is_product_or_attention(name) else None


@lru_cache(maxsize=_NAMES)
def is_softmax(name: str) -> bool:
    """Whether it computes a softmax by itself: not that of a loss, and not inside fused attention."""
    return bool(SOFTMAX.search(name)) and not (LOG_SOFTMAX.search(name) or FUSED_ATTENTION.search(name))


@lru_cache(maxsize=_NAMES)
def is_convolution(name: str) -> bool:
    """Whether it is a convolution or a gradient of one."""
    return is_product(name) and bool(_CONVOLUTION.search(name))


@lru_cache(maxsize=_NAMES)
def is_fp32_elementwise(name: str) -> bool:
    """Whether it is one of torch's kernels that memory bounds, on fp32 as far as its name says."""
    return bool(_ELEMENTWISE.search(name)) and not _NOT_FP32.search(name)


@lru_cache(maxsize=_NAMES)
def is_fp64_elementwise(name: str) -> bool:
    """Whether it is one of torch's kernels that memory bounds, on fp64."""
    return bool(_ELEMENTWISE.search(name)) and "<double" in name


def update_parameters(names: Iterable[str]) -> bool:
    """Whether these kernels update or measure parameters: steps of optimizers, moving averages, norms."""
    names = list(names)
    average = any(map(_SCALES.search, names)) and any(map(_ADDS.search, names))
    return average or any(map(_OF_PARAMETERS.search, names))


#: Names a TOML file whose table `groups` has more patterns, which come first: `"my group" = "regular expression"`.
VARIABLE = "BRIDGE_PROFILING_KERNEL_GROUPS"

#: Kernels that no pattern knows.
OTHER = "other"

#: Copies, and kernels that copy.
COPY = "copy"

_CONVOLUTIONS = re.compile(r"conv|[dw]grad_(?:engine|alg)|winograd|scudnn|fft2d_|implicit_gemm", re.IGNORECASE)

#: Group, and the pattern of its kernels' names, by convention of cuBLAS, CUTLASS, cuDNN, PyTorch, CUB, Triton, Apex and TE.
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", FUSED_ATTENTION),
    ("loss", LOG_SOFTMAX),
    ("loss", re.compile(r"nll_loss|mse_(?:kernel|loss)|_loss_", re.IGNORECASE)),
    ("attention", SOFTMAX),
    ("optimizer", re.compile(r"multi_tensor|adam|lamb_|_sgd|foreach", re.IGNORECASE)),
    ("convolution", _CONVOLUTIONS),
    ("matrix product", MATRIX_PRODUCT),
    ("normalization", re.compile(r"(?:layer|rms|batch|group|instance)_?norm|GammaBeta|\bbn_[fb]w", re.IGNORECASE)),
    ("sort and scan", re.compile(r"\bcub::|radix_?sort|bitonic|DeviceScan|topk|_scan_", re.IGNORECASE)),
    ("indexing", re.compile(r"embedding|index|gather|scatter|compute_grad_weight|krn_partial|partial_segments", re.IGNORECASE)),
    (COPY, re.compile(r"copy_kernel|CatArray|transpose|nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw|_cast_", re.IGNORECASE)),
    ("reduction", re.compile(r"reduce|triton_(?:red|per)_|welford", re.IGNORECASE)),
    ("elementwise", re.compile(r"elementwise|triton_poi_|dropout|triu_tril|gelu|silu|swiglu|rope|rotary", re.IGNORECASE)),
)


@cache
def group_of(name: str, kind: str) -> str:
    """The group of a kernel, by its name and `kind` in `device_events`.

    Raises:
        ProfilingConfigError: the file that `VARIABLE` names cannot be used.
    """
    if kind == COMMUNICATION:
        return f"communication: {kernel_kind(name).operation or OTHER}"
    return next((group for group, pattern in (*_more(), *GROUPS) if pattern.search(name)), OTHER)


@cache
def _more() -> tuple[tuple[str, re.Pattern[str]], ...]:
    path = os.environ.get(VARIABLE)
    if not path:
        return ()
    try:
        written = tomllib.loads(Path(path).read_text(encoding="utf-8"))["groups"]
        return tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in written.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, re.error) as error:
        raise ProfilingConfigError(
            f"{path}, which {VARIABLE} names, cannot be used",
            why=str(error),
            instead='Write a TOML file: [groups], then lines such as "my group" = "my_kernel|other_kernel"',
        ) from error


#: Names of ranges in which a program waits for its data. `enumerate(DataLoader)#…` is torch's, batch-generator Megatron's
#: timer. A Python frame is named "file(line): function".
DATA_LOADING = (
    r"(?<![a-z])(?:data[-_ ]?load(?:er|ing)?|load(?:ing)?[-_ ]?(?:data|batch)|batch[-_ ]?generator|"
    r"(?:get|next|fetch|read)[-_ ]?(?:micro[-_ ]?)?batch|data[-_ ]?(?:fetch|wait|iter(?:ator)?|time)|input[-_ ]?pipeline)"
    r"(?![a-z])|torch/utils/data/\S*: (?:__next__|_next_data|_get_data)"
)

#: Names of ranges in which a program writes a checkpoint. Activation checkpointing is recomputation and does not match.
CHECKPOINT = (
    r"(?<![a-z])(?:(?:save|saving|write|writing|async)[-_ ]?(?:a[-_ ])?(?:checkpoint|ckpt|state[-_ ]?dict)(?:s|ing)?|"
    r"(?:checkpoint|ckpt)[-_ ]?(?:sav(?:e|ing)|writ(?:e|ing)|stall)|save[-_ ]?(?:model|weights|pretrained))(?![a-z])|"
    r"^(?:checkpoint|checkpointing|ckpt|(?:torch\.)?sav(?:e|ing))$|safetensors/\S*: save_file|"
    r"torch/serialization\S*: (?:save|_save)|torch/distributed/checkpoint/\S*: \w*save\w*|dist_checkpointing/\S*: \w*save\w*"
)

#: Names of ranges in which Python collects garbage; the first is the hook's. Automatic collections leave no frame in a stack.
GARBAGE = r"garbage[-_ ]collect(?:ion|ing)|(?<![a-z])gc[-_. ]collect(?![a-z])|<built-in function collect>|^gc$"

#: Names of ranges in which torch.compile works: those of `torch._dynamo.utils.dynamo_timed`, and frames of its stacks.
COMPILING = (
    r"\(dynamo_timed\)|torch/_dynamo/convert_frame\S*: _?compile|torch/_inductor/compile_fx\S*: compile_fx|"
    r"triton/compiler/\S*: compile|torch/_inductor/\S*: benchmark_all_configs"
)

#: Names of ranges in which an optimizer steps, as torch records them.
OPTIMIZING = r"^Optimizer\.step#"

#: Names of calls that put work on the device.
ENQUEUING = re.compile("Launch|Mem(?:cpy|set)")

#: Calls that return when the device has finished.
SYNCHRONIZING = tuple(
    prefix + name
    for prefix, names in (
        ("cuda", ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "Memcpy2D")),
        ("cu", ("StreamSynchronize", "CtxSynchronize", "EventSynchronize", "MemcpyHtoD_v2", "MemcpyDtoH_v2")),
        ("hip", ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "MemcpyWithStream")),
    )
    for name in names
)

#: Calls that give memory back to the driver, and wait for the device.
FREEING = (
    *("cudaFree", "cudaFreeHost", "cudaHostUnregister", "cuMemFree_v2", "cuMemRelease", "cuMemUnmap"),
    *("hipFree", "hipHostFree"),
)

#: Calls that get memory from the driver or give it back.
ALLOCATING = (
    *FREEING,
    *("cudaMalloc", "cudaHostAlloc", "cudaMallocHost", "cudaHostRegister"),
    *("cuMemAlloc_v2", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    *("hipMalloc", "hipHostMalloc"),
)

#: A name for ranges in which operators on the CPU prepare a batch.
PREPARING = "operators on the CPU, before a copy to the device"
