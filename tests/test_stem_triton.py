"""The stem's kernels against plain PyTorch: in Triton's interpreter on the CPU, and on a GPU where there is one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import random_window, signals, tiny_config
from dae.encoders import Impala, ObsPart
from dae.train import build_agent
from test_lstm_triton import load

SCALE = 1 / 256
SHAPES = [(3, 12, 12, 16), (2, 9, 11, 32), (1, 8, 7, 48), (1, 2, 3, 64), (5, 30, 30, 16)]
"""Pictures, height, width, channels of the convolution; the last one has more pooled pixels than PROGRAMS would take in one round."""


@pytest.fixture(scope="module")
def interpreted():
    """Run by numpy; backward programs take several rounds."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 and numpy 2.4 do not go together")
    made, patch = load(True, "dae.stem_triton")
    patch.setattr(made, "PROGRAMS", 3)
    yield made
    patch.undo()


@pytest.fixture
def compiled():
    made, patch = load(False, "dae.stem_triton")
    yield made
    patch.undo()


@pytest.fixture
def on_gpu(compiled):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return compiled


def case(images, h, w, wide, seed=0, last=False):
    """Bytes, weights, bias, and what the gradient is taken of; bytes in either layout, weights too.

    Few bits in weights and scale: every sum is exact in any precision, so that the winner is the same one, ties included.
    """
    torch.manual_seed(seed)
    x = torch.randint(0, 256, (images, 4, h, w), dtype=torch.uint8)
    x[:, :, :, w // 2 :] = 0  # ties: whole areas without anything, as games have them
    weight = torch.randint(-64, 65, (wide, 4, 3, 3)) / 64
    bias, slope = torch.randn(wide), torch.randn(images, wide, (h + 1) // 2, (w + 1) // 2)
    layout = torch.channels_last if last else torch.contiguous_format
    return x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout), bias, slope


def plain(x, weight, bias, scale, dtype):
    x, weight, bias = x.to(dtype), (weight * scale).to(dtype), bias.to(dtype)
    return F.max_pool2d(F.conv2d(x, weight, bias, padding=1), 3, 2, padding=1)


def results(function, x, weight, bias, slope, dtype=torch.float32):
    """What comes out, and the gradients of all that has one."""
    leaves = [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in (weight, bias)]
    out = function(x, *leaves, SCALE, dtype)
    return out, *torch.autograd.grad((out * slope).sum(), leaves)


def assert_same(kernels, c):
    for name, got, exact in zip(("out", "d weight", "d bias"), results(kernels, *c), results(plain, *c), strict=True):
        assert got.shape == exact.shape
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_values_and_gradients_are_plain_pytorch_s(interpreted, shape, last):
    """Catches: a tap, channel or pixel in the wrong place, edges that are convolved or pooled as if they were inside, a scale that the
    gradient lacks, the wrong winner of a tie, a program that leaves its pixels out.
    """
    assert_same(interpreted.conv_pool, case(*shape, last=last))


def test_nothing_is_kept_where_nobody_learns(interpreted):
    """Catches: memory for winners in acting and in the slow network; and numbers that depend on it."""
    x, weight, bias, _ = case(2, 12, 12, 16)
    assert (
        interpreted.run_forward(
            x.permute(0, 2, 3, 1).contiguous().view(torch.int32)[..., 0], weight, bias, SCALE, torch.float32, False
        )[1]
        is None
    )
    out = interpreted.conv_pool(x, weight.requires_grad_(), bias, SCALE, torch.float32)
    with torch.no_grad():
        assert torch.equal(out, interpreted.conv_pool(x, weight, bias, SCALE, torch.float32))
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_other_pictures_are_refused(interpreted):
    with pytest.raises(ValueError, match="no kernel for pictures of 3 channels"):
        interpreted.conv_pool(
            torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(16, 3, 3, 3), torch.zeros(16), 1, torch.float32
        )
    assert not interpreted.fits(4, 8)


def test_an_agent_learns_the_same_with_it(interpreted, monkeypatch, rng):
    """A whole update in single precision. Catches: a network that takes its bytes past the switch, or a slow one that does not follow."""
    cfg = tiny_config(width=1, encoder="impala", frame_stack=4)
    w = random_window(cfg, rng)
    w.inputs.obs["obs"] = torch.randint(0, 256, (*w.inputs.obs["obs"].shape[:3], 1, 12, 12), dtype=torch.uint8)
    monkeypatch.setattr(Impala, "takes_bytes", lambda self, x: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float32)
    made = []
    for stem in ("triton", "padded"):
        agent = build_agent(cfg, {"obs": ObsPart((1, 12, 12), torch.uint8, SCALE)}, 3, (-1.0, 0.0, 1.0))
        agent.net.encoder.parts[0].stem = agent.ema.encoder.parts[0].stem = stem
        numbers = agent.update(w, signals())
        made.append([*numbers.values(), *(p.grad for p in agent.net.parameters())])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(one, other) for one, other in zip(*made, strict=True)), "was it the kernel?"


def test_the_kernel_is_taken_where_it_runs(interpreted, monkeypatch):
    """Catches: a kernel for what it cannot do, and eager PyTorch where it can."""
    capability = [9, 0]
    monkeypatch.setattr("dae.encoders.HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))

    class Picture:
        def __init__(self, stack, channels, device):
            self.shape, self.device = (5, stack, channels, 84, 84), torch.device(device)

    def taken(stem="auto", stack=4, channels=1, device="cuda", width=1):
        encoder = Impala(stack * channels, 12, 12, width, 8)
        encoder.stem = stem
        return encoder.takes_kernel(Picture(stack, channels, device))

    assert taken() and taken(width=4) and taken(stack=1, channels=4)
    assert not taken(device="cpu")
    assert not taken(stack=1) and not taken(channels=3) and not taken(width=0.25)
    assert not taken("padded") and not taken("reference")
    assert taken("triton", device="cpu")
    capability[0] = 7
    assert not taken()


def test_the_kernels_compile_for_a_gpu(compiled, tmp_path, monkeypatch):
    """Catches: what the interpreter takes and the compiler does not. No GPU is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = {
        "pictures": "*i32",
        "weight": "*fp32",
        "bias": "*fp32",
        "out": "*bf16",
        "d_out": "*bf16",
        "winner": "*u8",
        "scale": "fp32",
    }
    for wide in (16, 128):
        constants = {
            "H": 84,
            "W": 84,
            "WIDE": wide,
            "BLOCK": compiled.block(wide),
            "PIXELS": compiled.PIXELS,
            "TAPS": compiled.TAPS,
            "SAVE": True,
        }
        for kernel in (compiled.forward_kernel, compiled.backward_kernel):
            names = kernel.arg_names
            numbers = dict.fromkeys(("total", "rounds", "of_out", "of_in", "of_tap"), "i32")
            signature = {n: "constexpr" if n in constants else numbers.get(n) or kinds.get(n, "*fp32") for n in names}
            fixed = {(names.index(n),): value for n, value in constants.items() if n in names}
            aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
            source = ASTSource(kernel, signature, fixed, aligned)
            made = triton.compile(
                source, target=GPUTarget("cuda", 90, 32), options={"num_warps": compiled.warps(compiled.block(wide))}
            )
            assert made.metadata.shared <= 99 * 1024


# ------------------------------------------------------------------------------------------------------------------- gpu


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [*SHAPES, (33, 84, 84, 16), (17, 84, 84, 64), (3, 84, 84, 128)], ids=lambda shape: "-".join(map(str, shape))
)
def test_on_a_gpu(on_gpu, shape):
    """Against float64. In single precision only sums are rounded; in 16 bits also what goes in and comes out, but not what is compared."""
    for last in (False, True):
        c = [x.cuda() for x in case(*shape, last=last)]
        exact = results(plain, *c, dtype=torch.float64)
        for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.01)):
            for got, truth in zip(results(on_gpu.conv_pool, *c, dtype=dtype), exact, strict=True):
                assert (got - truth).norm() < error * truth.norm()


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(on_gpu):
    """Catches: atomics, and reads that race with writes."""
    c = [x.cuda() for x in case(64, 84, 84, 64)]
    first = results(on_gpu.conv_pool, *c, dtype=torch.bfloat16)
    for _ in range(10):
        assert all(torch.equal(x, y) for x, y in zip(first, results(on_gpu.conv_pool, *c, dtype=torch.bfloat16), strict=True))
