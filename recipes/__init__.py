"""Configurations, executors, and the megatron-core training loop. Not part of the wheel."""

import logging
import warnings

from recipes.releases import hide_old_async_checkpoints

# Half a dozen modules of megatron-core warn at import that an optional CUDA package is missing, which would bury the first
# progress line. These recipes are written for the fallbacks.
warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex)\b.* not installed", category=UserWarning)

# On a GPU the loop sets that variable; without a GPU, tensor parallelism would still warn once per rank.
warnings.filterwarnings(
    "ignore", message=r"When using async grad allreduce .*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning
)

# From megatron-core 0.19: about a multi-modal model that is not used here, and a single process without a rank.
warnings.filterwarnings("ignore", message=r"MimoModelConfig is experimental", category=UserWarning)
warnings.filterwarnings("ignore", message=r"Could not determine rank from torch\.distributed", category=UserWarning)

# Also from 0.19, which recommends HybridModel; all supported releases have GPTModel.
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
    lambda record: not str(record.msg).startswith("GPTModel IS DEPRECATED")
)

# A CUDA build of torch logs this if it finds a CUDA toolkit and no GPU; nothing is compiled here.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not str(record.msg).startswith("No CUDA runtime is found")
)

hide_old_async_checkpoints()
