"""What to train: configurations, executors, and the Megatron-Core training loop. Not part of the wheel."""

import warnings

# Half a dozen modules of megatron-core each say at import that an optional CUDA package is missing; between them the
# first line of progress would be lost. The fallbacks they announce are the ones these recipes are written for.
warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex)\b.* not installed", category=UserWarning)

# On a GPU the loop sets that variable; without one, tensor parallelism would still say once a rank that it is missing.
warnings.filterwarnings(
    "ignore", message=r"When using async grad allreduce .*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning
)
