"""The block LSTM against torch.nn.LSTM, whose recurrent matrix is the blocks and zeros elsewhere."""

import pytest
import torch
from jaxtyping import TypeCheckError

from dae.lstm import BlockLSTM

BLOCKS, BLOCK, INPUTS, T, B = 3, 4, 5, 6, 2
HIDDEN = BLOCKS * BLOCK


@pytest.fixture
def lstm():
    torch.manual_seed(0)
    made = BlockLSTM(INPUTS, HIDDEN, BLOCKS).double()
    with torch.no_grad():
        made.input.bias += torch.randn(4 * HIDDEN)
    return made


@pytest.fixture
def x():
    return torch.randn(T, B, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def state():
    return torch.randn(B, 2 * HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def never(t=T):
    return torch.zeros(t, B, dtype=torch.bool)


def dense(lstm):
    """The same weights in PyTorch's layout: gates i, f, g, o, each of all units."""
    made = torch.nn.LSTM(INPUTS, HIDDEN).double()
    with torch.no_grad():
        made.weight_hh_l0.zero_()
        made.bias_hh_l0.zero_()
        for block in range(BLOCKS):
            for gate in range(4):
                for unit in range(BLOCK):
                    here, there = (block * 4 + gate) * BLOCK + unit, gate * HIDDEN + block * BLOCK + unit
                    made.weight_ih_l0[there] = lstm.input.weight[here]
                    made.bias_ih_l0[there] = lstm.input.bias[here]
                    made.weight_hh_l0[there, block * BLOCK : (block + 1) * BLOCK] = lstm.recurrent[block, :, gate * BLOCK + unit]
    return made


def test_equals_a_dense_lstm_with_masked_recurrence(lstm, x, state):
    """Catches: gates in the wrong order or layout, a recurrent matrix transposed or across blocks, h and c swapped in the state."""
    got, after = lstm(x, never(), state)
    expected, (h, c) = dense(lstm)(x, tuple(s[None].contiguous() for s in state.chunk(2, -1)))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(after, torch.cat([h[0], c[0]], -1))


def test_a_unit_feels_its_own_block_only(lstm, x, state):
    """Catches: a dense recurrent matrix. The input, though, reaches every block."""
    changed = state.clone()
    changed[:, :BLOCK] += 1  # h of the first block
    one, other = lstm(x[:1], never(1), state)[0], lstm(x[:1], never(1), changed)[0]
    assert torch.equal(one[..., BLOCK:], other[..., BLOCK:])
    assert not torch.isclose(one[..., :BLOCK], other[..., :BLOCK]).any()
    assert not torch.isclose(one, lstm(x[:1] + 1, never(1), state)[0]).any()


def test_a_reset_is_the_beginning_of_a_separate_unroll(lstm, x, state):
    """Catches: a reset that is ignored, comes a step late, wipes only h or c, or reaches the neighbour."""
    reset = never()
    reset[2, 0] = True
    got, after = lstm(x, reset, state)
    untouched, untouched_after = lstm(x, never(), state)
    torch.testing.assert_close(got[:, 1], untouched[:, 1])
    torch.testing.assert_close(after[1], untouched_after[1])
    torch.testing.assert_close(got[:2, 0], untouched[:2, 0])
    anew, anew_after = lstm(x[2:], never(T - 2), torch.zeros_like(state))
    torch.testing.assert_close(got[2:, 0], anew[:, 0])
    torch.testing.assert_close(after[0], anew_after[0])


def test_steps_one_by_one_are_the_unroll(lstm, x, state):
    """Catches: an unroll that acting, which sees one slot at a time, does not repeat."""
    whole, last = lstm(x, never(), state)
    for t in range(T):
        one, state = lstm(x[t : t + 1], never(1), state)
        torch.testing.assert_close(one[0], whole[t])
    torch.testing.assert_close(state, last)


def test_the_forget_gates_start_open():
    """Catches: the bias of 1 on another gate than forget."""
    fresh = dense(BlockLSTM(INPUTS, HIDDEN, BLOCKS).double()).bias_ih_l0.detach().view(4, HIDDEN)
    assert torch.equal(fresh[1], torch.ones(HIDDEN, dtype=torch.float64))
    assert torch.equal(fresh[[0, 2, 3]], torch.zeros(3, HIDDEN, dtype=torch.float64))


def test_gradients(lstm, x, state):
    """Catches: a gradient that does not belong to the forward pass, through a reset as well."""
    reset = never(3)
    reset[1, 0] = True
    x, state = x[:3].requires_grad_(), state.requires_grad_()
    names = ("input.weight", "input.bias", "recurrent")
    weights = tuple(dict(lstm.named_parameters())[name].detach().clone().requires_grad_() for name in names)

    def run(x, state, *weights):
        return torch.func.functional_call(lstm, dict(zip(names, weights, strict=True)), (x, reset, state))

    assert torch.autograd.gradcheck(run, (x, state, *weights))


def test_axes_are_checked_at_run_time(lstm, x, state):
    """Catches: tests that run without the checks of conftest.py."""
    with pytest.raises(TypeCheckError):
        lstm(x, never(T - 1), state)
