"""The unroll of `BlockLSTM` as one GPU kernel forward and one backward. `lstm.py` is the reference, and decides which of them runs.

No gate depends on another block's recurrent state, so each (block, 16 rows of the batch) is one program that walks through time
alone: its recurrent matrix stays on the chip, its state in registers, and no step waits for a kernel launch. Sums, nonlinearities
and the cell are in single precision whatever `gates_in` is; only the operands of the matrix products are rounded to its type.

The forward pass keeps the gates, the cells and the masked h of every step (8 MB at the paper's size). Working the gates out again
would put a second matrix product into each step of the backward pass, and that pass is a chain of latencies, not of bytes. The
gradient of the recurrent matrix depends on no chain: it is one batched product over all steps at the end, without atomics.

Only language built-ins are used, none of Triton's own jitted helpers (`tl.sigmoid`, `tl.zeros`): so the kernels run in Triton's
interpreter however Triton itself was imported.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_SIZES = (16, 32, 64)
"""Units of a block: powers of two, at least the 16 that `tl.dot` wants; matrices of 128 x 512 would not fit on the chip."""
DTYPES = (torch.bfloat16, torch.float32)
ROWS = 16
"""Rows of the batch in one program, the fewest that `tl.dot` takes; more programs are better than larger ones."""
WARPS = 8
"""With 4, single precision at 64 units spills its registers."""


@triton.jit
def sigmoid(x):
    """Right at both ends: exp overflows to infinity, whose inverse is 0."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    """To an absolute 1e-7, which near 0 is no relative one."""
    return 2 * sigmoid(2 * x) - 1


@triton.jit
def product(a, b):
    """With sums in single precision, and single precision means it: no TF32."""
    return tl.dot(a, b, input_precision="ieee")


# Numbers of steps and rows are not specialised: acting, burn-in and windows of every length share one compiled kernel.
@triton.jit(do_not_specialize=["steps", "batch"])
def forward_kernel(
    gates_in, recurrent, reset, state, outputs, after, gates, cells, masked, steps, batch,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """One block's units, ROWS of the batch, all steps. With SAVE it leaves behind what `backward_kernel` reads."""
    HIDDEN: tl.constexpr = BLOCKS * BLOCK
    first = tl.program_id(0) * BLOCK
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # 64 bits, and so is every offset made from it
    unit = tl.arange(0, BLOCK)[None, :]
    real = row < batch

    matrix = recurrent + (first + tl.arange(0, BLOCK)[:, None]) * 4 * BLOCK + unit
    to_i, to_f = tl.load(matrix), tl.load(matrix + BLOCK)
    to_z, to_o = tl.load(matrix + 2 * BLOCK), tl.load(matrix + 3 * BLOCK)
    h_place = row * 2 * HIDDEN + first + unit
    h = tl.load(state + h_place, mask=real, other=0).to(tl.float32)
    c = tl.load(state + h_place + HIDDEN, mask=real, other=0).to(tl.float32)
    if SAVE:
        tl.store(cells + row * HIDDEN + first + unit, c, mask=real)  # cells[t] is the cell BEFORE step t, unmasked

    for t in tl.range(steps, num_stages=STAGES):
        slot = t * batch + row
        place, gate = slot * HIDDEN + first + unit, slot * 4 * HIDDEN + 4 * first + unit
        keep = 1 - tl.load(reset + slot, mask=real, other=0).to(tl.float32)
        h, c = h * keep, c * keep
        operand = h.to(to_i.dtype)
        i = sigmoid(tl.load(gates_in + gate, mask=real, other=0).to(tl.float32) + product(operand, to_i))
        f = sigmoid(tl.load(gates_in + gate + BLOCK, mask=real, other=0).to(tl.float32) + product(operand, to_f))
        z = tanh(tl.load(gates_in + gate + 2 * BLOCK, mask=real, other=0).to(tl.float32) + product(operand, to_z))
        o = sigmoid(tl.load(gates_in + gate + 3 * BLOCK, mask=real, other=0).to(tl.float32) + product(operand, to_o))
        c = f * c + i * z
        h = o * tanh(c)
        tl.store(outputs + place, h, mask=real)
        if SAVE:
            tl.store(masked + place, operand, mask=real)
            tl.store(cells + place + batch.to(tl.int64) * HIDDEN, c, mask=real)
            tl.store(gates + gate, i, mask=real)
            tl.store(gates + gate + BLOCK, f, mask=real)
            tl.store(gates + gate + 2 * BLOCK, z, mask=real)
            tl.store(gates + gate + 3 * BLOCK, o, mask=real)

    tl.store(after + h_place, h, mask=real)
    tl.store(after + h_place + HIDDEN, c, mask=real)


@triton.jit(do_not_specialize=["steps", "batch"])
def backward_kernel(
    recurrent, reset, gates, cells, d_outputs, d_after, d_gates, d_state, steps, batch,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same way back. `d_outputs` and `d_after` come in, the gradients of `gates_in` and of the state before go out."""
    HIDDEN: tl.constexpr = BLOCKS * BLOCK
    first = tl.program_id(0) * BLOCK
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    unit = tl.arange(0, BLOCK)[None, :]
    real = row < batch

    matrix = recurrent + (first + unit) * 4 * BLOCK + tl.arange(0, BLOCK)[:, None]  # transposed: [from gate, to h]
    from_i, from_f = tl.load(matrix), tl.load(matrix + BLOCK)
    from_z, from_o = tl.load(matrix + 2 * BLOCK), tl.load(matrix + 3 * BLOCK)
    h_place = row * 2 * HIDDEN + first + unit
    dh = tl.load(d_after + h_place, mask=real, other=0).to(tl.float32)
    dc = tl.load(d_after + h_place + HIDDEN, mask=real, other=0).to(tl.float32)
    c = tl.load(cells + (steps * batch + row) * HIDDEN + first + unit, mask=real, other=0)

    for back in tl.range(steps, num_stages=STAGES):
        slot = (steps - 1 - back) * batch + row
        place, gate = slot * HIDDEN + first + unit, slot * 4 * HIDDEN + 4 * first + unit
        keep = 1 - tl.load(reset + slot, mask=real, other=0).to(tl.float32)
        i = tl.load(gates + gate, mask=real, other=0).to(tl.float32)
        f = tl.load(gates + gate + BLOCK, mask=real, other=0).to(tl.float32)
        z = tl.load(gates + gate + 2 * BLOCK, mask=real, other=0).to(tl.float32)
        o = tl.load(gates + gate + 3 * BLOCK, mask=real, other=0).to(tl.float32)
        before = tl.load(cells + place, mask=real, other=0)

        dh += tl.load(d_outputs + place, mask=real, other=0).to(tl.float32)
        squashed = tanh(c)
        dc += dh * o * (1 - squashed * squashed)
        d_i = (dc * z * i * (1 - i)).to(from_i.dtype)
        d_f = (dc * before * keep * f * (1 - f)).to(from_i.dtype)
        d_z = (dc * i * (1 - z * z)).to(from_i.dtype)
        d_o = (dh * squashed * o * (1 - o)).to(from_i.dtype)
        tl.store(d_gates + gate, d_i, mask=real)
        tl.store(d_gates + gate + BLOCK, d_f, mask=real)
        tl.store(d_gates + gate + 2 * BLOCK, d_z, mask=real)
        tl.store(d_gates + gate + 3 * BLOCK, d_o, mask=real)
        dh = (product(d_i, from_i) + product(d_f, from_f) + product(d_z, from_z) + product(d_o, from_o)) * keep
        dc = dc * f * keep
        c = before

    tl.store(d_state + h_place, dh, mask=real)
    tl.store(d_state + h_place + HIDDEN, dc, mask=real)


def fits(block: int, dtype: torch.dtype) -> bool:
    """Whether the kernels are made for blocks of so many units and gates of that type (not whether a GPU is there)."""
    return block in BLOCK_SIZES and dtype in DTYPES


def stages(recurrent: Tensor) -> int:
    """How many steps' gates and cells are on the chip: the next step's too, where single precision does not fill it (99 KB on RTX)."""
    return 2 if recurrent.element_size() == 2 else 1


def unroll(
    gates_in: Float[Tensor, "t b blocks gates"],
    recurrent: Float[Tensor, "blocks block gates"],
    reset: Bool[Tensor, "t b"],
    state: Float[Tensor, "b s"],
) -> tuple[Float[Tensor, "t b h"], Float[Tensor, "b s"]]:
    """Every step's h, and the state (h, then c) after the last one; differentiable once in all but `reset`."""
    if not fits(recurrent.shape[1], gates_in.dtype):
        raise ValueError(f"no kernel for blocks of {recurrent.shape[1]} units in {gates_in.dtype}: {BLOCK_SIZES} in {DTYPES}")
    inputs = gates_in.contiguous(), recurrent.to(gates_in.dtype).contiguous(), reset.contiguous(), state.contiguous()
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        outputs, after = Unroll.apply(*inputs)
        return outputs, after
    outputs, after, *_ = run_forward(*inputs, save=False)
    return outputs, after


class Unroll(torch.autograd.Function):
    """`unroll` with its gradient."""

    @staticmethod
    def forward(ctx: Any, gates_in: Tensor, recurrent: Tensor, reset: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, after, *saved = run_forward(gates_in, recurrent, reset, state, save=True)
        ctx.save_for_backward(recurrent, reset, *saved)
        return outputs, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        recurrent, reset, gates, cells, masked = ctx.saved_tensors
        d_gates, d_state = run_backward(recurrent, reset, gates, cells, d_outputs.contiguous(), d_after.contiguous())
        blocks, block, _ = recurrent.shape
        h = masked.view(-1, blocks, block)  # [T * B, blocks, block]
        d_recurrent = torch.bmm(h.permute(1, 2, 0), d_gates.view(-1, blocks, 4 * block).transpose(0, 1))
        return d_gates, d_recurrent, None, d_state


def run_forward(
    gates_in: Tensor, recurrent: Tensor, reset: Tensor, state: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """h, the state after, and with `save` what `run_backward` reads: gates, cells, and h as each step's product saw it."""
    steps, batch, blocks, _ = gates_in.shape
    block = recurrent.shape[1]
    outputs = state.new_empty(steps, batch, blocks * block, dtype=torch.promote_types(gates_in.dtype, state.dtype))
    after = torch.empty_like(state, dtype=outputs.dtype)
    gates, cells, masked = None, None, None
    if save:
        gates, masked = torch.empty_like(gates_in), gates_in.new_empty(outputs.shape)
        cells = gates_in.new_empty(steps + 1, batch, blocks * block, dtype=torch.float32)
    with torch.cuda.device_of(gates_in):  # Triton launches on the current device
        forward_kernel[(blocks, triton.cdiv(batch, ROWS))](
            gates_in, recurrent, reset, state, outputs, after, gates, cells, masked, steps, batch,
            BLOCKS=blocks, BLOCK=block, ROWS=ROWS, STAGES=stages(recurrent), SAVE=save, num_warps=WARPS,
        )  # fmt: skip
    return outputs, after, gates, cells, masked


def run_backward(
    recurrent: Tensor, reset: Tensor, gates: Tensor, cells: Tensor, d_outputs: Tensor, d_after: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to `gates_in` and the state before the first step."""
    steps, batch, blocks, _ = gates.shape
    block = recurrent.shape[1]
    d_gates, d_state = torch.empty_like(gates), torch.empty_like(d_after)
    with torch.cuda.device_of(gates):
        backward_kernel[(blocks, triton.cdiv(batch, ROWS))](
            recurrent, reset, gates, cells, d_outputs, d_after, d_gates, d_state, steps, batch,
            BLOCKS=blocks, BLOCK=block, ROWS=ROWS, STAGES=stages(recurrent), num_warps=WARPS,
        )  # fmt: skip
    return d_gates, d_state
