"""Observations to embeddings."""

import pytest
import torch
import torch.nn.functional as F

from dae.encoders import Encoder, Impala, ObsPart, VectorEncoder, encoder_kind, rms_norm
from dae.errors import ConfigError

FLOAT, BYTES = torch.float32, torch.uint8


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((7,), "mlp"), ((1,), "mlp"), ((4, 10, 10), "cnn"), ((3, 32, 32), "cnn"), ((3, 33, 20), "impala"), ((1, 84, 84), "impala")],
)
def test_the_encoder_by_the_shape(shape, kind):
    """Catches: a limit that is off by one, or read from the channels."""
    assert encoder_kind(ObsPart(shape, FLOAT), "auto") == kind


def test_a_vector_is_no_picture():
    with pytest.raises(ConfigError, match="encoder=cnn: needs pictures"):
        encoder_kind(ObsPart((7,), FLOAT), "cnn")
    assert encoder_kind(ObsPart((3, 64, 64), FLOAT), "mlp") == "mlp", "but a picture may be taken for a vector"


@pytest.mark.parametrize("shape", [(5,), (2, 7, 9), (1, 10, 10), (3, 35, 41), (1, 84, 84)])
def test_every_shape_gives_one_normalised_embedding(shape):
    """Catches: sizes that are only right for even or square pictures, and a gain in the normalisation."""
    encoder = Encoder({"obs": ObsPart(shape, FLOAT)}, 2, 16, 0.125)
    out = encoder({"obs": torch.randn(3, 2, *shape)})
    assert out.shape == (3, 16)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(3), rtol=1e-3, atol=1e-3)
    assert not any("norm" in name for name, _ in encoder.named_parameters())


def test_impala_is_the_network_of_espeholt():
    """Catches: a missing ReLU, pooling of another size, a residual branch that is left out. Typed out again with functions."""
    torch.manual_seed(0)
    net, x = Impala(6, 21, 18, 0.25, 8), torch.randn(2, 3, 2, 21, 18)  # a stack of 3 pictures of 2 channels
    weights = iter(net.parameters())
    y = x.reshape(2, 6, 21, 18)
    for _ in range(3):
        y = F.max_pool2d(F.conv2d(y, next(weights), next(weights), padding=1), 3, stride=2, padding=1)
        for _ in range(2):
            inner = F.conv2d(F.relu(y), next(weights), next(weights), padding=1)
            y = y + F.conv2d(F.relu(inner), next(weights), next(weights), padding=1)
    y = F.linear(F.relu(y).flatten(1), next(weights), next(weights))
    torch.testing.assert_close(net(x), y)
    assert next(weights, None) is None


def test_skipinit_adds_six_factors_that_begin_at_zero():
    """Catches: a switch that does nothing, or that is on in the paper's network."""
    plain, switched = (Impala(4, 24, 24, 0.25, 8, skipinit) for skipinit in (False, True))
    extra = [p for p in switched.parameters() if p.dim() == 0]
    assert sum(p.numel() for p in switched.parameters()) == sum(p.numel() for p in plain.parameters()) + 6
    assert [p.item() for p in extra] == [0.0] * 6
    x = torch.randn(1, 4, 1, 24, 24)
    before = switched(x)
    for part in switched.layers:
        if hasattr(part, "branch"):
            torch.nn.init.ones_(part.branch[1].weight)
    assert torch.equal(switched(x), before)


def test_bytes_and_their_scaled_numbers_are_the_same():
    """Catches: a scale that is forgotten, or applied to the wrong part."""
    stored = torch.randint(0, 256, (2, 1, 3, 8, 8), dtype=BYTES)
    torch.manual_seed(0)
    of_bytes = Encoder({"a": ObsPart((3, 8, 8), BYTES, 1 / 255)}, 1, 8, 0.25)
    torch.manual_seed(0)
    of_floats = Encoder({"a": ObsPart((3, 8, 8), FLOAT)}, 1, 8, 0.25)
    torch.testing.assert_close(of_bytes({"a": stored}), of_floats({"a": stored / 255}))


def of_bytes(stem, channels=1, width=0.5, half=True, seed=0):
    """Embedding and gradients of an IMPALA encoder whose first convolution takes bytes in that way."""
    torch.manual_seed(seed)
    encoder = Encoder({"obs": ObsPart((channels, 36, 40), BYTES, 1 / 255)}, 4, 8, width, "impala")
    encoder.parts[0].stem = stem
    x = torch.randint(0, 256, (3, 4, channels, 36, 40), dtype=BYTES)
    with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False):
        out = encoder({"obs": x})
    (out * torch.randn(out.shape)).sum().backward()
    return out, *(p.grad for p in encoder.parameters())


@pytest.mark.parametrize("channels", [1, 3])
def test_the_way_of_bytes_is_exact(channels, monkeypatch):
    """Catches: scaled weights without their gradient's scale, padding that counts, a bias that is lost or added before a padded pool."""
    exact = of_bytes("reference", channels, half=False)
    monkeypatch.setattr(Impala, "takes_bytes", lambda self, x: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float32)
    for truth, ours in zip(exact, of_bytes("padded", channels, half=False), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


def test_bytes_in_sixteen_bits():
    """Catches: a switch that does nothing. 16 bits have 3 digits, and where a pool picks another pixel all gradients behind it move."""
    exact, eager, ours = of_bytes("reference", half=False), of_bytes("reference"), of_bytes("padded")
    assert all(x.dtype == torch.float32 for x in ours)
    assert not torch.equal(ours[0], eager[0])
    truth, one, other = (torch.cat([x.flatten() for x in found]) for found in (exact, eager, ours))
    assert (other - truth).norm() < 2 * (one - truth).norm()


def test_without_sixteen_bits_bytes_go_the_plain_way():
    """Catches: another rounding in single precision."""
    for one, other in zip(of_bytes("reference", half=False), of_bytes("padded", half=False), strict=True):
        assert torch.equal(one, other)


def test_parts_are_encoded_apart_and_summed():
    """Catches: a part that is ignored, parts in another order than their encoders, a norm before the sum."""
    encoder = Encoder({"b": ObsPart((3,), FLOAT), "a": ObsPart((2, 6, 6), FLOAT, 0.5)}, 2, 8, 0.25)
    b, a = torch.randn(4, 2, 3), torch.randn(4, 2, 2, 6, 6)
    vector, picture = encoder.parts
    torch.testing.assert_close(encoder({"a": a, "b": b}), rms_norm(vector(b) + picture(a * 0.5)))


def test_every_frame_of_the_stack_counts():
    """Catches: frames averaged or dropped."""
    for shape in ((3,), (1, 9, 9), (1, 40, 40)):
        encoder = Encoder({"obs": ObsPart(shape, FLOAT)}, 3, 8, 0.25)
        x = torch.randn(1, 3, *shape, requires_grad=True)
        encoder({"obs": x})[0, 0].backward()
        assert (x.grad[0].flatten(1).abs().amax(-1) > 0).all()


def test_numbers_of_any_size_are_welcome():
    """Catches: vectors that are not squashed, and NaN at zero."""
    encoder = VectorEncoder(4, 0.25, 8)
    out = encoder(torch.tensor([[[0.0, 1e-30, 1e30, -1e30]]]))
    assert out.isfinite().all()
    assert out.abs().max() < 1000
    assert not torch.isclose(encoder(torch.tensor([[[1.0, 0, 0, 0]]])), encoder(torch.tensor([[[-1.0, 0, 0, 0]]]))).all()


def test_width_multiplies_the_convolutions_and_nothing_else():
    """Catches: a multiplier on the embedding, which the paper keeps."""
    one, four = (Impala(4, 24, 24, width, 8) for width in (1, 4))
    widths = [[m.out_channels for m in net.modules() if isinstance(m, torch.nn.Conv2d)] for net in (one, four)]
    assert widths[0] == [16] * 5 + [32] * 10
    assert widths[1] == [4 * w for w in widths[0]]
    assert one.layers[-1].out_features == four.layers[-1].out_features == 8
