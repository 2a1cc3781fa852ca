"""The block-diagonal LSTM in plain PyTorch: the reference, with which the kernels of `lstm_triton.py` must agree."""

import importlib.util
import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

HAS_TRITON = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
"""And a CUDA build of PyTorch: nobody has tried the kernels on another."""


class BlockLSTM(nn.Module):
    """i, f, z, o gates; every gate sees the whole input, but only its own block of the recurrent state.

    The state is one flat [B, 2H] tensor (h, then c), so that the replay need not know what is inside.
    """

    def __init__(self, input_dim: int, hidden_dim: int, blocks: int):
        super().__init__()
        self.hidden_dim, self.blocks = hidden_dim, blocks
        # auto: kernels where they can run. `fast` sets it; without, the reference is what runs.
        self.implementation: Literal["auto", "reference", "triton"] = "reference"
        block = hidden_dim // blocks
        self.input = nn.Linear(input_dim, 4 * hidden_dim)
        self.recurrent = nn.Parameter(torch.empty(blocks, block, 4 * block))
        bound = 1 / math.sqrt(block)
        nn.init.uniform_(self.recurrent, -bound, bound)
        with torch.no_grad():  # forget bias 1; gates lie as [blocks, 4, block]
            self.input.bias.zero_()
            self.input.bias.view(blocks, 4, block)[:, 1] = 1.0

    @property
    def state_dim(self) -> int:
        return 2 * self.hidden_dim

    def forward(
        self,
        x: Float[Tensor, "t b e"],
        reset: Bool[Tensor, "t b"],
        state: Float[Tensor, "b s"],
    ) -> tuple[Float[Tensor, "t b h"], Float[Tensor, "b s"]]:
        """Where `reset`, the state is forgotten BEFORE the step."""
        gates_in = self.input(x).unflatten(-1, (self.blocks, -1))  # [T, B, blocks, 4 * block]
        if self.takes_kernels(gates_in.device, gates_in.dtype):
            from dae.lstm_triton import unroll  # here, for `import dae` shall not need Triton

            return unroll(gates_in, self.recurrent, reset, state.to(torch.promote_types(state.dtype, x.dtype)))
        h, c = (s.unflatten(-1, (self.blocks, -1)) for s in state.chunk(2, -1))  # [B, blocks, block]
        keep = (~reset).to(x.dtype)[..., None, None].unbind()
        outputs = []
        # unbind, not gates_in[t]: the gradient of an index is a whole [T, ...] of zeros for each step.
        for gates, kept in zip(gates_in.unbind(), keep, strict=True):
            h, c = h * kept, c * kept
            recurrent = torch.bmm(h.transpose(0, 1), self.recurrent).transpose(0, 1)
            i, f, z, o = (gates + recurrent).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * z.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs).flatten(-2), torch.cat([h.flatten(-2), c.flatten(-2)], -1)

    def takes_kernels(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether `forward` leaves its loop to Triton, for gates that are there and of that type."""
        if self.implementation != "auto":
            return self.implementation == "triton"
        if not (device.type == "cuda" and HAS_TRITON and torch.cuda.get_device_capability(device) >= (8, 0)):
            return False
        from dae.lstm_triton import fits

        return fits(self.recurrent.shape[1], dtype)
