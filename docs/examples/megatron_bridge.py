"""A GPT in Megatron Bridge 0.6, profiled by our hook: `torchrun --nproc-per-node 8 megatron_bridge.py train.train_iters=50`."""

import sys

from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from bridge_profiling.frameworks.megatron_bridge import ProfilingCallback

config = vanilla_gpt_pretrain_config()
config.train.train_iters = 100
config.profiling.use_pytorch_profiler = True
config.profiling.profile_step_start = 10
config.profiling.profile_step_end = 12
config = process_config_with_overrides(config, cli_overrides=sys.argv[1:])

# After the last change of the config: it is checked here, and Bridge's built-in profiling is switched off.
with ProfilingCallback(config, profile_ranks="all") as profiling:
    pretrain(config, forward_step, callbacks=[profiling])
