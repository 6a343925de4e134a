"""What to train: configurations, executors, and the Megatron-Core training loop. Not part of the wheel."""

import logging
import warnings

from recipes.releases import hide_old_async_checkpoints

# Half a dozen modules of megatron-core each say at import that an optional CUDA package is missing; between them the
# first line of progress would be lost. The fallbacks they announce are the ones these recipes are written for.
warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex)\b.* not installed", category=UserWarning)

# On a GPU the loop sets that variable; without one, tensor parallelism would still say once a rank that it is missing.
warnings.filterwarnings(
    "ignore", message=r"When using async grad allreduce .*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning
)

# Of megatron-core 0.19: a multi-modal model that nothing here uses is experimental; a process alone has no rank.
warnings.filterwarnings("ignore", message=r"MimoModelConfig is experimental", category=UserWarning)
warnings.filterwarnings("ignore", message=r"Could not determine rank from torch\.distributed", category=UserWarning)

# Also of 0.19, in each job: use HybridModel instead. GPTModel is what all supported releases have.
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
    lambda record: not str(record.msg).startswith("GPTModel IS DEPRECATED")
)

# A CUDA build of torch says so when it finds a CUDA toolkit and no GPU: nothing is compiled here.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not str(record.msg).startswith("No CUDA runtime is found")
)

hide_old_async_checkpoints()
