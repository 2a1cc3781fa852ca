"""The stem of IMPALA (first convolution, bias, max-pool) as one GPU kernel forward and one backward, from the bytes of pictures.

Between the two lies the largest tensor of the network, 84x84 numbers in each channel of each frame, of which pooling throws away three
quarters: here it is never written. Each pooled pixel is worked out from the bytes around it, its nine convolutions one after another,
and only the largest is kept, with its place for the way back. A pixel's four frames are one 32-bit word, so that pictures are read as
words; bytes are exact in 16 bits, and their scale goes into the weights.

The backward pass has no gradient of pictures to find. Each program sums the weights' gradient over its own pixels, and the programs'
sums are added up at the end: no atomics, the same bits every time.

Only language built-ins are used, as in `lstm_triton.py`. `encoders.py:Impala.of_bytes` is what decides, and what plain PyTorch does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHANNELS = 4
"""Of the pictures: a word of bytes."""
PIXELS = 64
"""Pooled ones in one product."""
TAPS = 16
"""9 of a 3x3 kernel, and nothing in the rest: with 4 channels each, the 64 that a product likes."""
PROGRAMS = 264
"""Of the backward pass: two for each multiprocessor of an H100 or H200."""


@triton.jit
def patches(pictures, image, row, column, real, TAPS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PIXELS: tl.constexpr):
    """What the convolution sees at (row, column): [PIXELS, TAPS * 4] bytes, zeros outside of the picture.

    Behind the 36 of them stands a 1: its gradient is the bias's.
    """
    tap = tl.arange(0, TAPS)[None, :]
    y, x = row + tap // 3 - 1, column + tap % 3 - 1
    inside = real & (tap < 9) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    word = tl.load(pictures + ((image * H + y) * W + x), mask=inside, other=0)
    word = tl.where(tap == 9, 1, word)
    bytes = (word[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255
    # As the last bits of 2^23: a GPU converts whole numbers at an eighth of the speed at which it subtracts.
    exact = (bytes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return tl.reshape(exact, (PIXELS, TAPS * 4))


@triton.jit(do_not_specialize=["total"])
def forward_kernel(
    pictures, weight, bias, out, winner, scale, total, of_out, of_in, of_tap,
    H: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr, TAPS: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """PIXELS pooled pixels in BLOCK of the WIDE channels. With SAVE, which of the nine was the largest."""
    HEIGHT: tl.constexpr = (H + 1) // 2
    WIDTH: tl.constexpr = (W + 1) // 2
    pixel = (tl.program_id(0) * PIXELS + tl.arange(0, PIXELS))[:, None]
    real = pixel < total
    image, i, j = (pixel // (HEIGHT * WIDTH)).to(tl.int64), (pixel // WIDTH) % HEIGHT, pixel % WIDTH
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, TAPS * 4)[:, None]
    at = channel * of_out + (k % 4) * of_in + (k // 4) * of_tap
    weights = (tl.load(weight + at, mask=k < 36, other=0) * scale).to(out.dtype.element_ty)

    best = tl.full((PIXELS, BLOCK), float("-inf"), tl.float32)
    which = tl.full((PIXELS, BLOCK), 0, tl.int32)
    for t in tl.static_range(9):
        row, column = 2 * i + t // 3 - 1, 2 * j + t % 3 - 1
        patch = patches(pictures, image, row, column, real, TAPS, H, W, PIXELS).to(weights.dtype)
        value = tl.dot(patch, weights, input_precision="ieee")
        there = (row >= 0) & (row < H) & (column >= 0) & (column < W)  # outside of the convolution's result pooling sees nothing
        better = there & (value > best)
        best, which = tl.where(better, value, best), tl.where(better, t, which)
    place = pixel.to(tl.int64) * WIDE + channel
    tl.store(out + place, best + tl.load(bias + channel), mask=real)
    if SAVE:
        tl.store(winner + place, which.to(tl.uint8), mask=real)


@triton.jit(do_not_specialize=["total", "rounds"])
def backward_kernel(
    pictures, d_out, winner, d_weight, total, rounds,
    H: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """One program's share of the gradients, [programs, TAPS * 4, WIDE]: of the scaled weights, and in row 36 of the bias."""
    HEIGHT: tl.constexpr = (H + 1) // 2
    WIDTH: tl.constexpr = (W + 1) // 2
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    sum_weight = tl.full((TAPS * 4, BLOCK), 0, tl.float32)
    for turn in tl.range(rounds, num_stages=1):
        pixel = ((tl.program_id(0) * rounds + turn) * PIXELS + tl.arange(0, PIXELS))[:, None]
        real = pixel < total
        image, i, j = (pixel // (HEIGHT * WIDTH)).to(tl.int64), (pixel // WIDTH) % HEIGHT, pixel % WIDTH
        place = pixel.to(tl.int64) * WIDE + channel
        gradient = tl.load(d_out + place, mask=real, other=0)
        which = tl.load(winner + place, mask=real, other=0).to(tl.int32)
        for t in tl.static_range(9):
            patch = patches(pictures, image, 2 * i + t // 3 - 1, 2 * j + t % 3 - 1, real, TAPS, H, W, PIXELS)
            mine = tl.where(which == t, gradient.to(tl.float32), 0.0).to(gradient.dtype)
            sum_weight += tl.dot(tl.trans(patch.to(gradient.dtype)), mine, input_precision="ieee")
    k = tl.arange(0, TAPS * 4)[:, None]
    tl.store(d_weight + (tl.program_id(0) * TAPS * 4 + k) * WIDE + channel, sum_weight)


def fits(channels: int, wide: int) -> bool:
    """Whether the kernels are made for pictures of so many channels, frames counted, and a convolution that wide."""
    return channels == CHANNELS and wide % 16 == 0


def block(wide: int) -> int:
    """Channels of one program: the more, the fewer times the same bytes are taken apart; 128 would not stay in its registers."""
    return next(size for size in (64, 32, 16) if wide % size == 0)


def warps(block: int) -> int:
    """Of one program, so that nothing is spilled."""
    return 8 if block == 64 else 4


def conv_pool(x: Tensor, weight: Tensor, bias: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """max_pool2d(conv2d(scale * x, weight, bias, padding=1), 3, 2, padding=1) in `dtype`; x of bytes, [N, 4, H, W]."""
    if not fits(x.shape[1], weight.shape[0]):
        raise ValueError(f"no kernel for pictures of {x.shape[1]} channels and a convolution of {weight.shape[0]}")
    words = x.permute(0, 2, 3, 1).contiguous().view(torch.int32)[..., 0]
    if torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad):
        out: Tensor = Stem.apply(words, weight, bias, scale, dtype)
        return out
    return run_forward(words, weight, bias, scale, dtype, save=False)[0]


class Stem(torch.autograd.Function):
    """`conv_pool` with its gradient."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, weight: Tensor, bias: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        out, winner = run_forward(words, weight, bias, scale, dtype, save=True)
        ctx.save_for_backward(words, winner)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        words, winner = ctx.saved_tensors
        d_weight, d_bias = run_backward(words, winner, d_out.permute(0, 2, 3, 1).contiguous())
        return None, d_weight * ctx.scale, d_bias, None, None


def run_forward(
    words: Tensor, weight: Tensor, bias: Tensor, scale: float, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor | None]:
    """[N, wide, H/2, W/2], channels last, and with `save` the winners, in the order of memory."""
    images, h, w = words.shape
    wide, of_in, of_tap = weight.shape[0], weight.stride(1), weight.stride(3)
    assert weight.stride(2) == 3 * of_tap, "neither contiguous nor channels last"
    out = torch.empty(images, (h + 1) // 2, (w + 1) // 2, wide, dtype=dtype, device=words.device)
    winner = torch.empty_like(out, dtype=torch.uint8) if save else None
    total = out.numel() // wide
    with torch.cuda.device_of(words):
        forward_kernel[(triton.cdiv(total, PIXELS), wide // block(wide))](
            words, weight, bias, out, winner, scale, total, weight.stride(0), of_in, of_tap,
            H=h, W=w, WIDE=wide, BLOCK=block(wide), PIXELS=PIXELS, TAPS=TAPS, SAVE=save, num_warps=warps(block(wide)),
        )  # fmt: skip
    return out.permute(0, 3, 1, 2), winner


def run_backward(words: Tensor, winner: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the scaled weights, [wide, 4, 3, 3], and of the bias; `d_out` in the order of memory."""
    _, h, w = words.shape
    wide, total = winner.shape[-1], winner.numel() // winner.shape[-1]
    tiles = triton.cdiv(total, PIXELS)
    rounds = triton.cdiv(tiles, PROGRAMS)
    programs = triton.cdiv(tiles, rounds)
    d_weight = torch.empty(programs, 4 * TAPS, wide, device=words.device)
    with torch.cuda.device_of(words):
        backward_kernel[(programs, wide // block(wide))](
            words, d_out, winner, d_weight, total, rounds,
            H=h, W=w, WIDE=wide, BLOCK=block(wide), PIXELS=PIXELS, TAPS=TAPS, num_warps=warps(block(wide)),
        )  # fmt: skip
    total_weight = d_weight.sum(0)
    return total_weight[:36].view(3, 3, CHANNELS, wide).permute(3, 2, 0, 1), total_weight[36]
