"""The kernels against the reference in double precision: in Triton's interpreter on the CPU, and on a GPU where there is one.

`python tests/test_lstm_triton.py` on a GPU prints how long both take at the paper's size.
"""

import copy
import importlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import dae.lstm
from conftest import tiny_agent, tiny_config
from dae.lstm import BlockLSTM
from test_network import random_inputs

SHAPES = [(blocks, block, t, b) for blocks, block in ((4, 16), (2, 32)) for t in (1, 5, 33) for b in (1, 5, 16)]
SHAPES += [(16, 64, t, b) for t in (1, 5) for b in (1, 16)] + [(2, 16, 3, 37)]  # the last: three programs for each block
PAPER = (16, 64, 33, 16)
NAMES = ("outputs", "state after", "d gates_in", "d recurrent", "d state")


def load(interpret, name="dae.lstm_triton"):
    """The module made anew: whether its kernels are interpreted is settled when they are decorated."""
    pytest.importorskip("triton", reason="Triton is not installed")
    importlib.import_module("triton.language")  # without the variable: Inductor, in the same process, compiles its helpers
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1") if interpret else patch.delenv("TRITON_INTERPRET", raising=False)
    patch.delitem(sys.modules, name, raising=False)
    made = importlib.import_module(name)
    patch.setitem(sys.modules, name, made)
    return made, patch


@pytest.fixture(scope="module")
def interpreted():
    """The kernels that `BlockLSTM` finds are run by numpy."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 and numpy 2.4 do not go together")
    made, patch = load(interpret=True)
    yield made
    patch.undo()


@pytest.fixture
def compiled():
    """They are compiled."""
    made, patch = load(interpret=False)
    yield made
    patch.undo()


@pytest.fixture
def on_gpu(compiled):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def case(blocks, block, t, b, seed=0, device="cpu"):
    """An LSTM of which `gates_in` is the input, and all that it is given; resets in most rows, none in the last."""
    generator = torch.Generator().manual_seed(seed)
    lstm = BlockLSTM(1, blocks * block, blocks)
    lstm.input = nn.Identity()
    with torch.no_grad():
        lstm.recurrent.copy_(torch.randn(lstm.recurrent.shape, generator=generator) / block**0.5)
    reset = torch.rand(t, b, generator=generator) < 0.25
    reset[t // 2, 0] = True
    reset[:, -1] &= b == 1
    hidden = blocks * block
    tensors = [torch.randn(shape, generator=generator) for shape in ((t, b, 4 * hidden), (b, 2 * hidden), (t, b, hidden))]
    gates_in, state, weight = (x.to(device) for x in tensors)
    return SimpleNamespace(lstm=lstm.to(device), gates_in=1.5 * gates_in, reset=reset.to(device), state=state, weight=weight)


def results(c, implementation, dtype=torch.float32):
    """Both outputs, and the gradients of a weighted sum of both. `dtype`: of everything, but with autocast's bf16 of the products."""
    autocast = dtype == torch.bfloat16
    wide = torch.float32 if autocast else dtype
    lstm = copy.deepcopy(c.lstm).to(wide)
    lstm.implementation = implementation
    gates_in, state = c.gates_in.detach().to(dtype, copy=True), c.state.detach().to(wide, copy=True)
    gates_in, state = gates_in.requires_grad_(), state.requires_grad_()
    with torch.autocast(gates_in.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
        outputs, after = lstm(gates_in, c.reset, state)
    loss = (outputs * c.weight).sum() + (after * c.state.flip(-1)).sum()
    return outputs, after, *torch.autograd.grad(loss, (gates_in, lstm.recurrent, state))


def relative_error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp(min=1e-12)).item()


def assert_exact(c):
    """To single precision. tanh is made of exp here, so single numbers near 0 are right to 1e-7 of 1, not of themselves."""
    for name, got, exact in zip(NAMES, results(c, "triton"), results(c, "reference", torch.float64), strict=True):
        assert got.dtype == torch.float32
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6 * scale, msg=lambda m, name=name: f"{name}: {m}")


def assert_as_good_as_eager_bf16(c):
    """bf16 has 3 digits, so both paths are held against the exact numbers, and rounding less often must not end up further away."""
    exact = results(c, "reference", torch.float64)
    kernels, eager = results(c, "triton", torch.bfloat16), results(c, "reference", torch.bfloat16)
    for name, ours, theirs, truth in zip(NAMES, kernels, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert 0 < relative_error(ours, truth) <= 1.5 * relative_error(theirs, truth), name
        assert relative_error(ours, truth) < 0.02, name


# ----------------------------------------------------------------------------------------------------------- interpreted


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_values_and_gradients_are_the_reference_s(interpreted, shape):
    """Catches: any term of either pass that is missing, transposed, of another gate, block, row or step, or reset at the wrong time."""
    for seed in range(2 if shape[2] < 33 else 1):
        assert_exact(case(*shape, seed))


@pytest.fixture
def bf16(interpreted, monkeypatch):
    """bf16 as a GPU has it. The interpreter keeps the integers of its bits, would multiply those, and cuts off where a GPU rounds."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    tl = importlib.import_module("triton.language")
    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def dot(self, a, b, *others):
        wide = [TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for x in (a, b)]
        return plain_dot(self, *wide, *others)

    def cast(self, src, to):
        if (src.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, src, to)
        rounded = torch.tensor(src.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(rounded, tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)


@pytest.mark.parametrize("shape", [(2, 16, 5, 5), (2, 32, 33, 16)])
def test_bf16_rounds_no_worse_than_eager(bf16, shape):
    """Catches: sums or nonlinearities in bf16."""
    assert_as_good_as_eager_bf16(case(*shape))


def test_the_cell_adds_up_what_bf16_would_swallow(bf16):
    """Catches: a cell that is rounded on its way from step to step. It opens at 1, where bf16 has steps of 1/128."""
    c = case(2, 16, 33, 2)
    c.reset[:] = False
    c.state[:], c.gates_in[:] = 1.0, 0.0
    c.gates_in.view(33, 2, 2, 4, 16)[..., :3, :] = torch.tensor([-4.0, 20.0, 0.1])[:, None]  # i small, f open, z small
    with torch.no_grad():
        c.lstm.recurrent.zero_()
    after, exact = (results(c, *how)[1][:, 32:] for how in (("triton", torch.bfloat16), ("reference", torch.float64)))
    assert (exact > 1.05).all()
    torch.testing.assert_close(after.double(), exact, rtol=1e-3, atol=0)


def test_nothing_crosses_a_reset(interpreted):
    """Catches: a reset after the step, of h or c only, or only in one of the two passes; exact zeros, not small numbers."""
    c = case(2, 16, 5, 3)
    c.reset[:] = False
    c.reset[2] = torch.tensor([True, True, False])
    c.lstm.implementation = "triton"
    gates_in, state = c.gates_in.requires_grad_(), c.state.requires_grad_()
    outputs, after = c.lstm(gates_in, c.reset, state)
    d_gates, d_state = torch.autograd.grad(outputs[2:].sum() + after.sum(), (gates_in, state), retain_graph=True)
    assert not d_gates[:2, :2].any()
    assert not d_state[:2].any()
    assert d_gates[3:].all()  # at step 2 the forget gates have nothing to forget
    assert d_gates[:2, 2].all()
    assert d_state[2].all()
    d_gates, d_state = torch.autograd.grad(outputs[:2].sum(), (gates_in, state))
    assert not d_gates[2:].any()
    assert d_state.all()
    with torch.no_grad():
        other, other_after = c.lstm(torch.cat([gates_in[:2] + 1, gates_in[2:]]), c.reset, state + 1)
    assert torch.equal(other[2:, :2], outputs[2:, :2])
    assert torch.equal(other_after[:2], after[:2])
    assert not torch.isclose(other[2:, 2], outputs[2:, 2]).all()


def test_acting_and_learning_have_the_same_bits(interpreted):
    """Catches: a step of one slot, or one whose gradient nobody wants, that is not the window's."""
    c = case(2, 32, 4, 5)
    c.lstm.implementation = "triton"
    whole, last = c.lstm(c.gates_in, c.reset, c.state)
    assert whole.requires_grad
    with torch.no_grad():
        again, again_last = c.lstm(c.gates_in, c.reset, c.state)
        assert torch.equal(again, whole) and torch.equal(again_last, last)
        for t in range(4):
            one, c.state = c.lstm(c.gates_in[t : t + 1], c.reset[t : t + 1], c.state)
            assert torch.equal(one[0], whole[t])
        assert torch.equal(c.state, last)


def test_inputs_need_not_be_contiguous(interpreted):
    """Catches: strides that the kernels do not know."""
    c = case(2, 16, 4, 6)
    expected = results(c, "reference")
    for name in ("gates_in", "reset", "state"):
        x = getattr(c, name)
        setattr(c, name, x.transpose(0, 1).contiguous().transpose(0, 1))
        assert not getattr(c, name).is_contiguous()
    for got, want in zip(results(c, "triton"), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_states_of_other_types_come_back_as_from_the_reference(interpreted):
    """Catches: a replay's 16-bit states that make the cell a 16-bit one."""
    c = case(2, 16, 3, 2)
    c.state = c.state.bfloat16()
    for implementation in ("triton", "reference"):
        c.lstm.implementation = implementation
        outputs, after = c.lstm(c.gates_in, c.reset, c.state)
        assert outputs.dtype == after.dtype == torch.float32


def test_the_trunk_is_the_same_with_either(interpreted):
    """Catches: a switch that a network's core does not follow, and a core that gets other inputs from it."""
    network = tiny_agent(tiny_config(core_dim=32)).net
    inputs, state = random_inputs(), torch.randn(3, network.state_dim, generator=torch.Generator().manual_seed(0))
    found = {}
    for implementation in ("auto", "reference", "triton"):
        network.core.lstm.implementation = implementation
        found[implementation] = network.trunk(inputs, state)
    assert torch.equal(found["auto"].features, found["reference"].features)  # on the CPU
    for part in ("embedding", "features", "core"):
        kernels, reference = getattr(found["triton"], part), getattr(found["reference"], part)
        torch.testing.assert_close(kernels, reference, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found["triton"].core, found["reference"].core), (
        "rounding is the same to the last bit: was it the kernel?"
    )


# -------------------------------------------------------------------------------------------------------------- dispatch


def test_kernels_are_taken_where_they_run(interpreted, monkeypatch):
    """Catches: kernels for what they cannot do, and the slow loop where they can."""
    capability = [9, 0]
    monkeypatch.setattr(dae.lstm, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))

    def taken(block=64, dtype=torch.bfloat16, device="cuda", implementation="auto"):
        lstm = BlockLSTM(1, 2 * block, 2)
        lstm.implementation = implementation
        return lstm.takes_kernels(torch.device(device), dtype)

    assert taken() and taken(16) and taken(32) and taken(dtype=torch.float32)
    assert not taken(device="cpu")
    assert not taken(8) and not taken(48) and not taken(128)
    assert not taken(dtype=torch.float64) and not taken(dtype=torch.float16)
    assert not taken(implementation="reference")
    assert taken(implementation="triton", device="cpu")
    capability[0] = 7
    assert not taken()
    capability[0] = 9
    monkeypatch.setattr(dae.lstm, "HAS_TRITON", False)
    assert not taken()


def test_forced_kernels_say_what_they_cannot_do(interpreted):
    c = case(3, 4, 2, 2)
    c.lstm.implementation = "triton"
    with pytest.raises(ValueError, match="no kernel for blocks of 4 units"):
        c.lstm(c.gates_in, c.reset, c.state)


def test_a_copy_keeps_what_was_forced():
    """Catches: a slow network (EMA) that runs something else than the online one."""
    lstm = BlockLSTM(1, 32, 2)
    lstm.implementation = "reference"
    assert copy.deepcopy(lstm).implementation == "reference"


def test_importing_dae_leaves_triton_alone():
    """Catches: a package that needs Triton, or waits for it, on machines without a GPU."""
    code = "import sys, torch; had = 'triton' in sys.modules; import dae, dae.cli, dae.api, dae.train, dae.lstm; "
    code += "print('dae.lstm_triton' in sys.modules, 'triton' in sys.modules and not had)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "False"]


def test_the_kernels_compile_for_a_gpu(compiled, tmp_path, monkeypatch):
    """Catches: what the interpreter takes and the compiler does not, and more shared memory than an RTX has. No GPU is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype, short, stages in ((torch.bfloat16, "*bf16", 2), (torch.float32, "*fp32", 1)):
        assert compiled.stages(torch.empty(1, dtype=dtype)) == stages
        pointers = dict.fromkeys(("gates_in", "recurrent", "gates", "masked", "d_gates"), short)
        numbers = {"steps": "i32", "batch": "i32", "reset": "*i1"}
        constants = {"BLOCKS": 16, "BLOCK": 64, "ROWS": compiled.ROWS, "STAGES": stages, "SAVE": True}
        for kernel in (compiled.forward_kernel, compiled.backward_kernel):
            names = kernel.arg_names
            signature = {n: "constexpr" if n in constants else numbers.get(n) or pointers.get(n, "*fp32") for n in names}
            fixed = {(names.index(n),): value for n, value in constants.items() if n in names}
            aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
            source = ASTSource(kernel, signature, fixed, aligned)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": compiled.WARPS})
            assert made.metadata.shared <= 99 * 1024


# ------------------------------------------------------------------------------------------------------------------- gpu


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, PAPER, (16, 64, 33, 50)], ids=lambda shape: "-".join(map(str, shape)))
def test_on_a_gpu(on_gpu, shape):
    """Catches: what only the compiled kernels do: TF32, races, layouts."""
    assert_exact(case(*shape, device="cuda"))
    if shape[2] > 1:
        assert_as_good_as_eager_bf16(case(*shape, device="cuda"))


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(on_gpu):
    """Catches: atomics, and reads that race with writes."""
    c = case(*PAPER, device="cuda")
    first = results(c, "triton", torch.bfloat16)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(first, results(c, "triton", torch.bfloat16), strict=True))


@pytest.mark.gpu
def test_auto_on_a_gpu_is_the_kernel(on_gpu):
    c = case(*PAPER, device="cuda")
    auto, kernels = results(c, "auto"), results(c, "triton")
    assert all(torch.equal(x, y) for x, y in zip(auto, kernels, strict=True))


@pytest.mark.gpu
def test_both_passes_can_be_captured(on_gpu):
    """Catches: a wait for the host, or memory from outside the graph's pool. The inputs change between replays."""
    c = case(*PAPER, device="cuda")
    graph, static = captured(c, "triton", gradient=True)
    other = case(*PAPER, seed=1, device="cuda")
    for name in ("gates_in", "state", "weight", "reset"):
        getattr(c, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(static, results(c, "triton", torch.bfloat16), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
def test_the_kernels_are_faster_than_the_loop(on_gpu):
    took = timings()
    print(report(took))
    for gradient in (False, True):
        assert took["triton", gradient] < took["reference", gradient]


def captured(c, implementation, gradient):
    """A CUDA graph of one pass or both in bf16, and its static results. `results` without what cannot be captured."""

    def run():
        if gradient:
            return results(c, implementation, torch.bfloat16)
        c.lstm.implementation = implementation
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return c.lstm(c.gates_in.bfloat16(), c.reset, c.state)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        static = run()
    return graph, static


def timings(replays=200):
    """Milliseconds on the device at the paper's size, as CUDA graphs, for (implementation, with gradients?)."""
    took = {}
    for implementation in ("reference", "triton"):
        for gradient in (False, True):
            graph, _ = captured(case(*PAPER, device="cuda"), implementation, gradient)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            took[implementation, gradient] = begin.elapsed_time(end) / replays
    return took


def report(took):
    lines = [f"{torch.cuda.get_device_name()}, T, B = {PAPER[2:]}, {PAPER[0]} blocks of {PAPER[1]}, bf16, ms as CUDA graphs"]
    for implementation in ("reference", "triton"):
        forward, both = took[implementation, False], took[implementation, True]
        lines.append(f"{implementation:>10}: forward {forward:.3f}, forward and backward {both:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(timings()))
