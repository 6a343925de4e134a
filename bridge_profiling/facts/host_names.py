"""Names that show what a host does: of ranges, as regular expressions, and of runtime calls."""

from __future__ import annotations

import re

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
