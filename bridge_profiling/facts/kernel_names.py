"""What the name of a compute kernel says: its precision, and whether it is part of attention or converts a layout.

Names are those of cuBLAS, CUTLASS, cuDNN, PyTorch and Triton. A name that does not say what is asked gives None or False:
nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

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

#: nvjet names its types in letters: those of the factors come first, t is bf16, h fp16, q and o fp8, s fp32.
_TF32 = re.compile(r"tf32|[_<]s1688(?!\w*(?:b?f16|bf16))|nvjet_(?:sm\d+_)?(?!sm\d)s[a-z]+_", re.IGNORECASE)

_FP64 = re.compile(
    r"dgemm|d884|f64f64|gem[mv]\w*kernel\w*<(?:int, )*double|gemmSN_\w+<double|"
    r"convolve_\w*<double|[dw]grad_(?:engine|alg\w*)<double",
    re.IGNORECASE,
)

_FP32 = re.compile(
    r"sgemm|scudnn|c?f32c?f32_f32f32_c?f32|\bfft2d_[rc]2[rc]|winograd\w*<float|"
    r"gem[mv]\w*kernel\w*<(?:int, )*float, float, float|gemmSN_\w+<float|"
    r"convolve_\w*<float|[dw]grad_(?:engine|alg\w*)<float|conv_depthwise\w+<float|fmha_cutlass[FB]_f32",
    re.IGNORECASE,
)

_REDUCED = re.compile(r"bf16|f16|half|bfloat|e4m3|e5m2|fp8|nvjet_(?:sm\d+_)?[thqo]|s16816|h1688|h16816|hgemm", re.IGNORECASE)

SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
#: Of log_softmax, which a loss takes; the fifth argument of torch's own kernels says whether they are it.
LOG_SOFTMAX = re.compile(
    r"log_?softmax|cross_?entropy|softmax_warp_\w+<[^<>]*?, *(?:\(int\))?\d+, *(?:true|\(bool\)1)", re.IGNORECASE
)

FUSED_ATTENTION = re.compile(r"flash|fmha|sdpa|flex_attention|fused_attention|attn_(?:fwd|bwd)", re.IGNORECASE)

_LAYOUT = re.compile(r"nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw", re.IGNORECASE)

_CONVOLUTION = re.compile(r"conv(?!ert)|implicit_gemm|fprop|[dw]grad|winograd|scudnn|\bfft2d_", re.IGNORECASE)

#: torch copies with this kernel where the two tensors differ in strides; others copy several elements at a time.
_STRIDED_COPY = re.compile(r"at::native::elementwise_kernel<.*direct_copy_kernel")

_ELEMENTWISE = re.compile(
    r"(?:at::native|cudnn::).*(?:elementwise|reduce_kernel|softmax|norm|dropout|pool|CatArray|nhwc|nchw)", re.IGNORECASE
)

#: torch's kernels for one tensor; those for lists of tensors are multi_tensor_apply_kernel.
_ONE_TENSOR = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(?:vectorized_|unrolled_)?(?:elementwise|reduce)_kernel")
_OF_PARAMETERS = re.compile(r"lerp_|addcmul|addcdiv|Norm\w*Ops")
_SCALES, _ADDS = re.compile(r"MulFunctor"), re.compile(r"CUDAFunctor(?:OnSelf)?_add")

_CHANNELS_FIRST_NORM = re.compile(r"at::native::batch_norm_(?!\w*channels_last)")
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
    """`fp64`, `fp32`, `tf32` or `reduced` (16 or 8 bits) for a product or a convolution whose name says it, else None."""
    if not is_product_or_attention(name):
        return None
    if _FP64.search(name):
        return "fp64"
    if _TF32.search(name):
        return "tf32"
    if _FP32.search(name) and not re.search(r"bf16|__half|bfloat|f16", name):
        return "fp32"
    return "reduced" if _REDUCED.search(name) else None


@lru_cache(maxsize=_NAMES)
def is_softmax(name: str) -> bool:
    """Whether it computes a softmax by itself: not that of a loss, and not inside fused attention."""
    return bool(SOFTMAX.search(name)) and not (LOG_SOFTMAX.search(name) or FUSED_ATTENTION.search(name))


@lru_cache(maxsize=_NAMES)
def converts_layout(name: str) -> bool:
    """Whether it copies an image between channels first and channels last."""
    return bool(_LAYOUT.search(name))


@lru_cache(maxsize=_NAMES)
def is_convolution(name: str) -> bool:
    """Whether it is a convolution or a gradient of one."""
    return is_product(name) and bool(_CONVOLUTION.search(name))


@lru_cache(maxsize=_NAMES)
def is_strided_copy(name: str) -> bool:
    """Whether torch copies a tensor to one with other strides, such as an image to the other memory format."""
    return bool(_STRIDED_COPY.search(name))


@lru_cache(maxsize=_NAMES)
def is_channels_first_norm(name: str) -> bool:
    """Whether it normalizes a batch of images in channels first."""
    return bool(_CHANNELS_FIRST_NORM.search(name))


@lru_cache(maxsize=_NAMES)
def is_fp32_elementwise(name: str) -> bool:
    """Whether it is one of torch's kernels that memory bounds, on fp32 as far as its name says."""
    return bool(_ELEMENTWISE.search(name)) and not _NOT_FP32.search(name)


@lru_cache(maxsize=_NAMES)
def is_fp64_elementwise(name: str) -> bool:
    """Whether it is one of torch's kernels that memory bounds, on fp64."""
    return bool(_ELEMENTWISE.search(name)) and "<double" in name


@lru_cache(maxsize=_NAMES)
def is_of_one_tensor(name: str) -> bool:
    """Whether torch launches it for one tensor, element by element."""
    return bool(_ONE_TENSOR.search(name))


def update_parameters(names: Iterable[str]) -> bool:
    """Whether these kernels update or measure parameters: steps of optimizers, moving averages, norms."""
    names = list(names)
    average = any(map(_SCALES.search, names)) and any(map(_ADDS.search, names))
    return average or any(map(_OF_PARAMETERS.search, names))
