"""Says which functions dynamo takes up where a compiled layer sets a GPU's random state, before and after `compile_layers`.

In a process of its own: what dynamo has once skipped, it skips for good.
"""

import json

import torch
from torch._dynamo import convert_frame

from recipes.megatron.layers import compile_layers, random


class Generator:
    """A GPU's generator, as far as dynamo sees one: it cannot be traced."""

    def set_state(self, state: torch.Tensor) -> None:
        torch._dynamo.graph_break()


def taken_up() -> list[str]:
    def layer(hidden: torch.Tensor) -> torch.Tensor:
        random._set_cuda_rng_state(hidden)
        return hidden + 1

    torch._dynamo.reset()
    convert_frame.input_codes.clear()
    torch.compile(layer, backend="eager")(torch.ones(2))
    return [code().co_name for code in convert_frame.input_codes.seen]


random._lazy_call = lambda call: call()
torch.cuda.current_device = lambda: 0
torch.cuda.default_generators = (Generator(),)
before = taken_up()
compile_layers(torch.nn.ModuleList())
compile_layers(torch.nn.ModuleList())
print(json.dumps({"before": before, "after": taken_up()}))
