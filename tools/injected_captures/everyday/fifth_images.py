"""Models of the fifth round that see images or a state: a mixer, a net on volumes, an adversarial pair, a policy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.injected_captures.everyday.fifth_models import exact
from tools.injected_captures.everyday.setting import Setting

CLASSES, PATCH = 1000, 16

#: Tissues of a volume.
TISSUES = 8

#: Numbers that a generated image is made from, and groups of its channels in a norm.
LATENT, GROUPS = 128, 16

#: Numbers that a policy sees, and joints that it moves.
SEEN, JOINTS = 128, 32


class MixerBlock(nn.Module):
    """Dense layers over patches, then over channels; each is scaled as if it were dropped now and then, at a given rate."""

    #: Share of the time that a layer would be dropped: a number of Python, as libraries keep it.
    rate = 0.0

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width, patches = setting.width, (setting.length // PATCH) ** 2
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        kept = 1.0 - self.rate
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2) * kept
        return x + self.within(self.norm2(x)) * kept


class Mixer(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH**2, setting.width)
        self.blocks = nn.ModuleList(MixerBlock(setting) for _ in range(setting.layers))
        self.norm, self.head = nn.LayerNorm(setting.width), nn.Linear(setting.width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pieces = images.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.patches(pieces.to(torch.bfloat16) / 255.0)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels)


def _solid(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm3d(outputs), nn.ReLU(inplace=True))


class Volume(nn.Module):
    """Tissues of a volume: convolutions at three sizes, down and up again."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        w = setting.width
        self.first = nn.Sequential(_solid(1, w), _solid(w, w))
        self.down1 = nn.Sequential(nn.Conv3d(w, 2 * w, 2, stride=2), _solid(2 * w, 2 * w), _solid(2 * w, 2 * w))
        self.down2 = nn.Sequential(nn.Conv3d(2 * w, 4 * w, 2, stride=2), _solid(4 * w, 4 * w), _solid(4 * w, 4 * w))
        self.up1, self.join1 = nn.ConvTranspose3d(4 * w, 2 * w, 2, stride=2), _solid(4 * w, 2 * w)
        self.up2, self.join2 = nn.ConvTranspose3d(2 * w, w, 2, stride=2), _solid(2 * w, w)
        self.head = nn.Conv3d(w, TISSUES, 1)
        self.scores: Tensor | None = None

    def forward(self, volumes: Tensor, tissues: Tensor) -> Tensor:
        fine = self.first(volumes)
        middle = self.down1(fine)
        x = self.join1(torch.cat([self.up1(self.down2(middle)), middle], 1))
        scores = self.head(self.join2(torch.cat([self.up2(x), fine], 1)))
        self.scores = scores.detach()
        # A row for each voxel: channels are last already.
        rows = scores.permute(0, 2, 3, 4, 1).reshape(-1, TISSUES)
        return F.cross_entropy(rows, tissues.flatten().long())


class Step(nn.Module):
    """A convolution, a norm and an activation; the convolution can be in float32."""

    def __init__(self, inputs: int, outputs: int, setting: Setting, *, stride: int = 1, exactly: bool = False) -> None:
        super().__init__()
        self.exactly = exactly
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, outputs) if setting.group_norm else nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        with exact(x, self.exactly):
            x = self.conv(x.float() if self.exactly else x)
        return F.leaky_relu(self.norm(x), 0.2, inplace=True)


class Generator(nn.Module):
    """Images from random numbers, in three stages that each double the size."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.side, w = setting.length // 8, setting.width
        self.start = nn.Linear(LATENT, 8 * w * self.side**2)
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Upsample(scale_factor=2.0), Step(2 * wide, wide, setting),
                *(Step(wide, wide, setting) for _ in range(setting.layers)),
            )
            for wide in (4 * w, 2 * w, w)
        )  # fmt: skip
        self.head = nn.Conv2d(w, 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.start(latents).view(len(latents), self.side, self.side, -1).permute(0, 3, 1, 2)
        for stage in self.stages:
            x = stage(x)
        return torch.tanh(self.head(x))


class Judge(nn.Module):
    """How real images look; the last convolution can be in float32."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        w = setting.width
        self.stem = nn.Conv2d(3, w, 3, padding=1)
        exactly = setting.float_blocks > 0
        self.stages = nn.ModuleList(
            nn.Sequential(
                *(Step(wide, wide, setting) for _ in range(setting.layers - 1)),
                Step(wide, wide, setting, exactly=exactly and wide == 4 * w),
                Step(wide, 2 * wide, setting, stride=2),
            )
            for wide in (w, 2 * w, 4 * w)
        )  # fmt: skip
        self.head = nn.Linear(8 * w, 1)
        self.features: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        x = F.leaky_relu(self.stem(images), 0.2)
        for place, stage in enumerate(self.stages):
            x = stage(x)
            if place == 0:
                self.features = x.detach()
        return self.head(x.mean((2, 3))).squeeze(-1).float()


class Pair(nn.Module):
    """A generator and the judge of its images; `fifth_trainings.py` trains them in turns."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.generator, self.judge = Generator(setting), Judge(setting)

    @property
    def blocks(self) -> list[nn.Module]:
        """Stages of both."""
        return [*self.generator.stages, *self.judge.stages]


class Policy(nn.Module):
    """What to do in a state, and how good the state is; and a world on the device that this is done in.

    Worlds that have ended start anew, all in one operation or by their row numbers. The critic can be in float32.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width, small = setting.width, setting.width // 4
        self.by_rows, self.exact = setting.resets == "rows", setting.float_blocks > 0
        self.first, self.mean = nn.Linear(SEEN, width), nn.Linear(width, JOINTS)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(setting.layers))
        self.spread = nn.Parameter(torch.full((JOINTS,), -1.0))
        self.critic = nn.Sequential(nn.Linear(SEEN, small), nn.ELU(), nn.Linear(small, small), nn.ELU(), nn.Linear(small, 1))
        self.register_buffer("inertia", torch.randn(SEEN, SEEN) * SEEN**-0.5)
        self.register_buffer("reach", torch.randn(JOINTS, SEEN) * JOINTS**-0.5)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the actions (worlds, joints), and the values of the states (worlds), of what is seen in each world."""
        x = F.elu(self.first(seen))
        for block in self.blocks:
            x = F.elu(block(x))
        with exact(seen, self.exact):
            value = self.critic(seen)
        return self.mean(x).float(), value.squeeze(-1).float()

    def likelihood(self, mean: Tensor, action: Tensor) -> Tensor:
        """Logarithm of an action's density, without what is constant."""
        return (-0.5 * ((action - mean) / self.spread.exp()) ** 2 - self.spread).sum(-1)

    def advance(self, state: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state, the reward and whether a world has ended."""
        state = torch.tanh(torch.addmm(state @ self.inertia, action, self.reach)).float()
        miss = (state - target).square().mean(1)
        ended = miss > 2.0
        if self.by_rows:
            rows = ended.nonzero().squeeze(-1)
            if len(rows) > 0:
                state = state.index_copy(0, rows, target[rows])
        else:
            state = torch.where(ended[:, None], target, state)
        return state, -miss, ended


IMAGE_MODELS = {"mixer": Mixer, "volume": Volume, "pair": Pair, "policy": Policy}


def batch(setting: Setting, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A batch for one of these models."""
    size, length = setting.batch, setting.length

    def small_numbers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, dtype=torch.uint8)

    if setting.model == "policy":
        return (torch.randn(size, SEEN, generator=generator),)
    if setting.model == "volume":
        return torch.randn(size, 1, length, length, length, generator=generator), small_numbers(TISSUES, size, *[length] * 3)
    images = small_numbers(255, size, 3, length, length)
    if setting.model == "pair":
        return (images,)
    return images, torch.randint(0, CLASSES, (size,), generator=generator)
