"""Models of the sixth round: a field of colors and densities, and a language model that learns what is preferred."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.injected_captures.everyday.fifth_models import exact
from tools.injected_captures.everyday.more_models import TOKENS, Gpt
from tools.injected_captures.everyday.setting import Setting

#: Waves that a coordinate is encoded by, and parts that the rays of a batch are rendered in.
_WAVES, _PARTS = 8, 8

#: Half a side of the scene.
_SCENE = 4.0

#: How far answers may move from those of the reference.
_STRENGTH = 0.1


class Field(nn.Module):
    """Colors of rays through a scene: points on each go through dense layers, and are summed by density.

    With `read_inside`, rays that miss the scene are skipped, which Python asks for in each part. The last layer can be in
    float32.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.points, self.asks, self.exact = setting.length, setting.read_inside, setting.float_blocks > 0
        self.register_buffer("rates", 2.0 ** torch.arange(_WAVES))
        self.first, self.last = nn.Linear(6 * _WAVES, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(setting.layers))
        self.head = nn.Linear(width, 4)

    def forward(self, rays: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(torch.cat([self._colors(part) for part in rays.chunk(_PARTS)]), wanted)

    def _colors(self, rays: Tensor) -> Tensor:
        start, direction = rays[:, None].chunk(2, -1)
        depths = torch.linspace(0.0, 2.0, self.points, device=rays.device)[:, None]
        places = start + (depths + torch.rand(len(rays), self.points, 1, device=rays.device) / self.points) * direction
        if self.asks and not (places.abs() < _SCENE).any():
            return torch.zeros_like(rays[:, :3])
        waves = (places[..., None] * self.rates).flatten(-2)
        x = F.relu(self.first(torch.cat((waves.sin(), waves.cos()), -1)))
        for block in self.blocks:
            x = F.relu(block(x))
        with exact(x, self.exact):
            x = F.relu(self.last(x.float() if self.exact else x))
        density, colors = self.head(x).float().split((1, 3), -1)
        taken = F.softplus(density) / self.points
        left = torch.exp(taken - taken.cumsum(1))
        return (left * (1.0 - torch.exp(-taken)) * colors.sigmoid()).sum(1)


class Preference(nn.Module):
    """Two answers to each question, the better one in the first half of the batch.

    What a reference finds likely is computed as well; the reference is no part of the model.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.policy = Gpt(setting)
        # In a tuple, so that it is no submodule.
        self.references = (Gpt(setting).to(torch.bfloat16).requires_grad_(False),)
        self.rewards: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            usual = _likelihood(self.references[0], tokens)
        rewards = _STRENGTH * (_likelihood(self.policy, tokens) - usual).unflatten(0, (2, -1))
        self.rewards = rewards.detach()
        return -F.logsigmoid(rewards[0] - rewards[1]).mean()


def _likelihood(model: Gpt, tokens: Tensor) -> Tensor:
    """Logarithm of each sequence's probability."""
    x = model.norm(model.through(model.embed(tokens[:, :-1])))
    scores = F.linear(x, model.embed.weight).flatten(0, 1)
    return -F.cross_entropy(scores, tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1).sum(1)


SIXTH_MODELS = {"field": Field, "preference": Preference}


def batch(setting: Setting, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A batch for one of these models."""
    if setting.model == "field":
        return torch.randn(setting.batch, 6, generator=generator), torch.rand(setting.batch, 3, generator=generator)
    return (torch.randint(0, TOKENS, (setting.batch, setting.length + 1), generator=generator),)
