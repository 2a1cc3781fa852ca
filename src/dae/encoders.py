"""Observations to one embedding: vectors, small images, 84x84 frames, and dicts of these.

Every encoder takes [N, stack, *shape] and is widened by the factor m (`width`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dae.errors import ConfigError
from dae.lstm import HAS_TRITON

Kind = Literal["mlp", "cnn", "impala"]


@dataclass(frozen=True)
class ObsPart:
    """One part of an observation, as it is stored: `shape` is of a single frame, images channel-first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    """What a stored number is multiplied with before it is encoded: 1/255 for pictures of bytes."""


ObsSpec = Mapping[str, ObsPart]


def encoder_kind(part: ObsPart, wanted: str) -> Kind:
    """By shape: no picture is an MLP's, a picture of up to 32 pixels a small CNN's, a larger one IMPALA's."""
    image = len(part.shape) == 3
    if wanted != "auto":
        if wanted != "mlp" and not image:
            raise ConfigError(f"encoder={wanted}: needs pictures, but an observation has the shape {part.shape}")
        return wanted  # type: ignore[return-value]
    if not image:
        return "mlp"
    return "cnn" if max(part.shape[1:]) <= 32 else "impala"


class VectorEncoder(nn.Module):
    """MLP with one hidden layer. Numbers of any size are welcome: they pass through sign(x) log(1 + |x|) first."""

    def __init__(self, size: int, width: float, embedding_dim: int):
        super().__init__()
        hidden = round(128 * width)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, embedding_dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.sign() * x.abs().log1p())


class SmallCNN(nn.Module):
    """Two 3x3 convolutions at full resolution, for pictures such as 10x10xC."""

    def __init__(self, channels: int, height: int, width_px: int, width: float, embedding_dim: int):
        super().__init__()
        first, second = round(16 * width), round(32 * width)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1), nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(second * height * width_px, embedding_dim),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1, 2))


class _Residual(nn.Module):
    def __init__(self, channels: int, skipinit: bool):
        super().__init__()
        self.branch = nn.Sequential(
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip
        self.factor = nn.Parameter(torch.zeros(())) if skipinit else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.branch(x)


class Impala(nn.Module):
    """The 15-layer residual network of Espeholt et al. 2018, widths (16, 32, 32) m, and a linear layer."""

    def __init__(self, channels: int, height: int, width_px: int, width: float, embedding_dim: int, skipinit: bool = False):
        super().__init__()
        layers: list[nn.Module] = []
        for wide in (round(16 * width), round(32 * width), round(32 * width)):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            layers += [_Residual(wide, skipinit), _Residual(wide, skipinit)]
            channels, height, width_px = wide, math.ceil(height / 2), math.ceil(width_px / 2)
        layers += [nn.ReLU(), nn.Flatten(), nn.Linear(channels * height * width_px, embedding_dim)]
        self.layers = nn.Sequential(*layers)

        self.stem: Literal["auto", "reference", "padded", "triton"] = "reference"
        """How bytes are taken in, where products are in 16 bits; `fast` sets it. auto: by a kernel where it can run, else padded."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1, 2))

    def takes_bytes(self, x: Tensor) -> bool:
        """Whether `of_bytes` is the way for `x`."""
        return self.stem != "reference" and x.dtype == torch.uint8 and torch.is_autocast_enabled(x.device.type)

    def takes_kernel(self, x: Tensor) -> bool:
        """Whether `of_bytes` leaves the stem to Triton."""
        if self.stem != "auto":
            return self.stem == "triton"
        if not (x.device.type == "cuda" and HAS_TRITON and torch.cuda.get_device_capability(x.device) >= (8, 0)):
            return False
        from dae.stem_triton import fits

        return fits(x.shape[1] * x.shape[2], len(self.layers[0].weight))  # type: ignore[arg-type]

    def of_bytes(self, x: Tensor, scale: float) -> Tensor:
        """The same of `scale` times the bytes `x`, [N, stack, c, h, w], in autocast's 16 bits.

        Bytes are exact in them, so that the weights are scaled in place of the pictures. Tensor cores want channels by the eight. And
        the bias may wait for the pooling, which leaves a quarter of the pixels: rounding, like the bias, keeps the largest the largest.
        """
        conv, pool = self.layers[0], self.layers[1]
        assert isinstance(conv, nn.Conv2d) and conv.bias is not None
        dtype = torch.get_autocast_dtype(x.device.type)
        if self.takes_kernel(x):
            from dae.stem_triton import conv_pool  # here, for `import dae` shall not need Triton

            return self.layers[2:](conv_pool(x.flatten(1, 2), conv.weight, conv.bias, scale, dtype))
        weight = conv.weight * scale
        missing = (0, 0, 0, 0, 0, -weight.shape[1] % 8)
        pooled = pool(F.conv2d(F.pad(x.flatten(1, 2).to(dtype), missing), F.pad(weight, missing), padding=1))
        return self.layers[2:](pooled + conv.bias.to(dtype)[:, None, None])


class Encoder(nn.Module):
    """All parts of an observation, each by its own encoder; the sum of their embeddings, RMS-normalised without a gain."""

    def __init__(
        self, spec: ObsSpec, frame_stack: int, embedding_dim: int, width: float, kind: str = "auto", skipinit: bool = False
    ):
        super().__init__()
        self.names, self.scales = tuple(spec), tuple(part.scale for part in spec.values())
        self.parts = nn.ModuleList()
        for part in spec.values():
            found = encoder_kind(part, kind)
            if found == "mlp":
                self.parts.append(VectorEncoder(frame_stack * math.prod(part.shape), width, embedding_dim))
                continue
            channels, height, width_px = part.shape
            if found == "cnn":
                self.parts.append(SmallCNN(frame_stack * channels, height, width_px, width, embedding_dim))
            else:
                self.parts.append(Impala(frame_stack * channels, height, width_px, width, embedding_dim, skipinit))

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """{name: [N, stack, *shape]} -> [N, d]"""
        parts = zip(self.names, self.scales, self.parts, strict=True)
        embeddings = [
            encode.of_bytes(obs[name], scale) if takes_bytes(encode, obs[name]) else encode(obs[name].float() * scale)
            for name, scale, encode in parts
        ]
        return rms_norm(sum(embeddings[1:], start=embeddings[0]))


def takes_bytes(encode: nn.Module, x: Tensor) -> TypeGuard[Impala]:
    """Whether an encoder takes pictures as they are stored."""
    return isinstance(encode, Impala) and encode.takes_bytes(x)


def rms_norm(x: Tensor) -> Tensor:
    """Without a gain, so that squared distance and cosine say the same (App. B.4) and targets can't shrink."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
