"""Models as people write them: a transformer, a residual convolution net, a transformer with experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tools.injected_captures.everyday import more_models, third_models
from tools.injected_captures.everyday.setting import Setting

VOCABULARY = 8192
HEAD = 64
EXPERTS = 8
CLASSES = 1000


class Attention(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.fused = setting.attention == "fused"
        self.qkv = nn.Linear(setting.width, 3 * setting.width)
        self.out = nn.Linear(setting.width, setting.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1) / HEAD**0.5).masked_fill(later, float("-inf"))
            mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Sequential):
    def __init__(self, setting: Setting) -> None:
        super().__init__(nn.Linear(setting.width, 4 * setting.width), nn.GELU(), nn.Linear(4 * setting.width, setting.width))


class Block(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(setting.width), nn.LayerNorm(setting.width)
        self.attention = Attention(setting)
        self.feed_forward = Experts(setting) if setting.model == "experts" else FeedForward(setting)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.recompute = setting.recompute
        self.embed = nn.Embedding(VOCABULARY, setting.width)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.norm, self.head = nn.LayerNorm(setting.width), nn.Linear(setting.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


class _Exchange(torch.autograd.Function):
    """All-to-all of tokens, and of their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = received, sent
        result = tokens.new_empty(sum(received), *tokens.shape[1:])
        dist.all_to_all_single(result, tokens.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(gradient, *ctx.sizes), None, None


class Experts(nn.Module):
    """Experts behind a router; with 2 ranks, each rank holds half of them.

    Which token goes where is drawn, not learned, so that a case decides how even it is.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.routing, self.second_half = setting.routing, setting.second_half
        self.spread = setting.ranks if setting.strategy == "ddp" else 1
        self.router = nn.Linear(setting.width, EXPERTS)
        self.local = nn.ModuleList(FeedForward(setting) for _ in range(EXPERTS // self.spread))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(dim=-1)
        if self.routing == "capacity":
            chosen = torch.arange(len(tokens), device=x.device) % EXPERTS
        else:
            half = torch.rand(len(tokens), device=x.device) < self.second_half
            chosen = torch.randint(0, EXPERTS // 2, (len(tokens),), device=x.device) + half * (EXPERTS // 2)
        if self.routing == "nonzero":
            mixed = self._one_by_one(tokens, chosen)
        else:
            order = chosen.argsort(stable=True)
            results = self._sorted(tokens[order], chosen)
            mixed = torch.empty_like(results).index_copy(0, order, results)
        return (mixed * weights.gather(1, chosen[:, None])).view_as(x)

    def _one_by_one(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.local):
            places = (chosen == number).nonzero().squeeze(-1)
            mixed = mixed.index_copy(0, places, expert(tokens[places]).to(mixed.dtype))
        return mixed

    def _sorted(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """The experts' results for tokens that are sorted by their expert."""
        counts = [len(tokens) // EXPERTS] * EXPERTS
        if self.routing == "sizes":
            counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
        if self.spread == 1:
            return self._by_expert(tokens, [counts])
        sent = [sum(counts[: EXPERTS // 2]), sum(counts[EXPERTS // 2 :])]
        received = self._received(counts, tokens.device)
        arrived = _Exchange.apply(tokens, sent, [sum(each) for each in received])
        return _Exchange.apply(self._by_expert(arrived, received), [sum(each) for each in received], sent)

    def _received(self, counts: list[int], device: torch.device) -> list[list[int]]:
        """Numbers of tokens for each local expert, by the rank that sends them."""
        if self.routing == "capacity":
            return [counts[: len(self.local)]] * self.spread
        mine = torch.tensor(counts, device=device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        return theirs.view(self.spread, -1).tolist()

    def _by_expert(self, tokens: Tensor, counts: list[list[int]]) -> Tensor:
        pieces = tokens.split([count for each in counts for count in each])
        number, senders = len(self.local), len(counts)
        done = [None] * len(pieces)
        for place, expert in enumerate(self.local):
            mine = [pieces[sender * number + place] for sender in range(senders)]
            for sender, result in enumerate(expert(torch.cat(mine)).split([len(piece) for piece in mine])):
                done[sender * number + place] = result
        return torch.cat(done)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class FormatSwitch(nn.Module):
    """A custom layer in NCHW between layers in NHWC."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x.contiguous() * self.scale).contiguous(memory_format=torch.channels_last)


class Convolution(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.recompute = setting.recompute
        self.stem = nn.Conv2d(3, setting.width, 7, stride=4, padding=3)
        after = [FormatSwitch] if setting.switch_formats else []
        self.blocks = nn.ModuleList(
            nn.Sequential(Residual(setting.width), *(layer(setting.width) for layer in after)) for _ in range(setting.layers)
        )
        self.head = nn.Linear(setting.width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


def build(setting: Setting) -> nn.Module:
    """The model, on the host."""
    others = more_models.MODELS | third_models.THIRD_MODELS
    if setting.model in others:
        return others[setting.model](setting)
    return Convolution(setting) if setting.model == "convolution" else Transformer(setting)
