"""Every space that is supported, and every refusal in one line."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from dae.envs.spaces import ObservationReader, in_words, num_actions
from dae.errors import EnvironmentFault

F32, U8 = np.float32, np.uint8

SUPPORTED = {
    "number": (spaces.Box(-1, 1, (), F32), (1,), torch.float32, 1.0),
    "vector": (spaces.Box(-1, 1, (5,), F32), (5,), torch.float32, 1.0),
    "doubles": (spaces.Box(-np.inf, np.inf, (5,), np.float64), (5,), torch.float32, 1.0),
    "integers": (spaces.Box(-9, 9, (5,), np.int32), (5,), torch.float32, 1.0),
    "bytes that are no picture": (spaces.Box(0, 255, (128,), U8), (128,), torch.float32, 1.0),
    "matrix": (spaces.Box(-1, 1, (2, 3), F32), (6,), torch.float32, 1.0),
    "choice": (spaces.Discrete(4), (4,), torch.float32, 1.0),
    "choice from 3": (spaces.Discrete(4, start=3), (4,), torch.float32, 1.0),
    "choices": (spaces.MultiDiscrete([2, 3]), (5,), torch.float32, 1.0),
    "choices in a matrix": (spaces.MultiDiscrete([[2, 3], [4, 1]]), (10,), torch.float32, 1.0),
    "choices from elsewhere": (spaces.MultiDiscrete([2, 3], start=[5, -1]), (5,), torch.float32, 1.0),
    "bits": (spaces.MultiBinary(3), (3,), torch.float32, 1.0),
    "bits in a matrix": (spaces.MultiBinary((2, 3)), (6,), torch.float32, 1.0),
    "colour picture": (spaces.Box(0, 255, (20, 30, 3), U8), (3, 20, 30), torch.uint8, 1 / 255),
    "channels first": (spaces.Box(0, 255, (3, 20, 30), U8), (3, 20, 30), torch.uint8, 1 / 255),
    "grey picture": (spaces.Box(0, 255, (20, 30), U8), (1, 20, 30), torch.uint8, 1 / 255),
    "bytes up to 8": (spaces.Box(0, 8, (7, 7, 3), U8), (3, 7, 7), torch.uint8, 1 / 8),
    "picture of bits": (spaces.Box(0, 1, (10, 10, 6), np.bool_), (6, 10, 10), torch.uint8, 1.0),
    "picture of floats": (spaces.Box(0, 1, (10, 10, 6), F32), (6, 10, 10), torch.float32, 1.0),
    "picture of large floats": (spaces.Box(0, 255, (10, 10, 6), F32), (6, 10, 10), torch.float32, 1 / 255),
    "picture of floats without bounds": (spaces.Box(0, np.inf, (10, 10, 6), F32), (6, 10, 10), torch.float32, 1.0),
}


def plain(space, value):
    """What must be stored of a value, entry by entry."""
    value = np.asarray(value)
    if isinstance(space, spaces.Discrete):
        return np.array([float(value == space.start + i) for i in range(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        flat = zip(value.flat, space.nvec.flat, space.start.flat, strict=True)
        return np.array([float(v == start + i) for v, n, start in flat for i in range(n)])
    if value.ndim == 3 or (value.ndim == 2 and space.dtype == U8):
        picture = value[None] if value.ndim == 2 else value
        return picture if picture.shape[0] <= 4 else np.stack([picture[..., c] for c in range(picture.shape[-1])])
    if space.dtype.kind in "iu" and isinstance(space, spaces.Box):
        ends = zip(value.flat, space.low.flat, space.high.flat, strict=True)
        return np.array([2 * (int(x) - int(low)) / (int(high) - int(low)) - 1 for x, low, high in ends])
    return value.ravel()


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_supported_space(name):
    """Catches: a wrong shape or type in store, channels in the wrong place, an offset that is lost; alone and in a batch alike."""
    space, shape, dtype, scale = SUPPORTED[name]
    reader = ObservationReader(space)
    part = reader.spec["obs"]
    assert (part.shape, part.dtype) == (shape, dtype)
    assert part.scale == pytest.approx(scale)
    space.seed(0)
    raw = [space.sample() for _ in range(4)]
    batch = reader.read_batch(np.stack(raw), 4)["obs"]
    for one, in_batch in zip(raw, batch, strict=True):
        read = reader.read(one)["obs"]
        assert read.shape == shape
        assert torch.from_numpy(read).dtype == dtype
        np.testing.assert_allclose(read, plain(space, one), rtol=1e-6)
        np.testing.assert_array_equal(read, in_batch)


@pytest.mark.parametrize(
    ("low", "high", "value", "stored"),
    [
        ([0, -4], [10, 4], [7.5, 2], [0.5, 0.5]),
        ([0, -4], [10, np.inf], [7.5, 2], [7.5, 2]),
        ([2, 2], [2, 4], [2, 4], [0, 1]),
    ],
)
def test_vectors_of_known_bounds_fill_minus_one_to_one(low, high, value, stored):
    """Catches: a scale of another entry, or one that is made up where a bound is missing."""
    space = spaces.Box(np.array(low, F32), np.array(high, F32))
    np.testing.assert_allclose(ObservationReader(space).read(np.array(value, F32))["obs"], stored)


@pytest.mark.parametrize(
    ("low", "high", "kind", "value", "stored"),
    [
        (0, 255, U8, [0, 51, 255], [-1, -0.6, 1]),
        (-1000, 1000, np.int64, [500, -1000, 0], [0.5, -1, 0]),
        (-128, 127, np.int8, [-128, 127, 0], [-1, 1, 1 / 255]),
        (0, 2**40, np.int64, [3, 4, 5], [3, 4, 5]),
        (-(2**31), 5, np.int32, [3, 4, 5], [3, 4, 5]),
        (0, 1, np.bool_, [0, 1, 1], [0, 1, 1]),
    ],
)
def test_integers_of_known_bounds_fill_minus_one_to_one(low, high, kind, value, stored):
    """Catches: bytes of a vector that are read as 0 to 255, and a lowest integer whose absolute value is negative."""
    read = ObservationReader(spaces.Box(low, high, (3,), kind)).read(np.array(value, kind))["obs"]
    np.testing.assert_allclose(read, stored, rtol=1e-6)


def test_bounds_that_mean_none_erase_nothing():
    """Catches: observations divided by the largest number there is, which many environments give for `no bound`."""
    for largest in (np.finfo(F32).max, 1e30):
        reader = ObservationReader(spaces.Box(-largest, largest, (2,), F32))
        one, other = (reader.read(np.array([x, 1.0], F32))["obs"] for x in (0.1, 0.9))
        assert abs(one - other).max() > 0.1


def test_what_is_read_is_a_copy():
    """Catches: an environment that goes on writing into what was stored."""
    for space in (spaces.Box(-1, 1, (5,), F32), spaces.Box(0, 255, (3, 8, 8), U8), spaces.Box(0, 255, (8, 8, 3), U8)):
        raw = np.ones(space.shape, space.dtype)
        read = ObservationReader(space).read(raw)["obs"]
        raw[:] = 0
        assert (read == 1).all()


@pytest.mark.parametrize(
    ("shape", "channels", "stored"),
    [
        ((4, 20, 30), "auto", (4, 20, 30)),
        ((5, 20, 30), "auto", (30, 5, 20)),
        ((12, 20, 20), "auto", (12, 20, 20)),
        ((3, 3, 5), "auto", (5, 3, 3)),
        ((12, 20, 30), "first", (12, 20, 30)),
        ((4, 20, 3), "last", (3, 4, 20)),
        ((20, 30), "first", (1, 20, 30)),
        ((20, 30), "last", (1, 20, 30)),
    ],
)
def test_the_order_of_channels(shape, channels, stored):
    """Catches: `channels` that is ignored, or that is applied to a picture without channels."""
    reader = ObservationReader(spaces.Box(0, 255, shape, U8), channels)
    assert reader.spec["obs"].shape == stored
    raw = np.arange(np.prod(shape)).reshape(shape).astype(U8)
    expected = np.moveaxis(raw, -1, 0) if stored[1:] == shape[:2] and len(shape) == 3 else raw.reshape(stored)
    np.testing.assert_array_equal(reader.read(raw)["obs"], expected)
    np.testing.assert_array_equal(reader.read_batch(raw[None], 1)["obs"], expected[None])


@pytest.mark.parametrize(
    ("shape", "last", "guessed"),
    [
        ((20, 30, 3), True, False),
        ((3, 20, 30), False, False),
        ((20, 20, 8), True, False),
        ((8, 20, 20), False, False),
        ((3, 3, 3), False, True),
        ((4, 20, 3), False, True),
        ((12, 20, 30), True, True),
    ],
)
def test_how_the_order_of_channels_was_found(shape, last, guessed):
    """Catches: a guess that is passed off as known, and the reverse."""
    space = spaces.Box(0, 255, shape, U8)
    layout = ObservationReader(space).leaves["obs"].layout
    assert (layout.last, layout.guessed) == (last, guessed)
    named = ObservationReader(space, "last").leaves["obs"].layout
    assert (named.last, named.guessed) == (True, False)


BOUNDS = spaces.Box(np.array([-1, 0], F32), np.array([1, 4], F32))
OUTSIDE = [
    (BOUNDS, np.array([0, 4.5], F32), "observation 'obs' holds 4.5, outside its bounds 0 to 4"),
    (BOUNDS, np.array([1.00000001, 4]), ""),
    (spaces.Box(0, 255, (2,), U8), np.array([3, 300]), "holds 300, outside its bounds 0 to 255"),
    (spaces.Box(0, 255, (2,), U8), np.array([3, 0.5]), "holds numbers that are no uint8"),
    (spaces.Box(0, 255, (2,), U8), [3, 255], ""),
    (spaces.Box(0, 1, (2,), np.bool_), np.array([0, 2]), "holds 2, outside its bounds 0 to 1"),
    (spaces.Box(-1, 1, (), F32), 2.0, "holds 2, outside its bounds -1 to 1"),
    (spaces.Box(-np.inf, np.inf, (2,), F32), np.array([1e30, 0]), ""),
    (spaces.MultiBinary(2), np.array([0, 3]), "holds 3, outside its bounds 0 to 1"),
    (spaces.Dict(a=spaces.Discrete(2), b=BOUNDS), {"a": 1, "b": np.array([-2, 0])}, "observation 'b' holds -2"),
]


@pytest.mark.parametrize(("space", "raw", "words"), OUTSIDE)
def test_what_its_space_does_not_promise(space, raw, words):
    """Catches: bounds of another entry, a rounding that is taken for a fault, and a check that refuses everything."""
    reader = ObservationReader(space)
    reader.read(raw)  # training lets it pass
    found = reader.outside(raw)
    assert found == "" if words == "" else words in found, found


@pytest.mark.parametrize(
    "space", [spaces.Dict({}), spaces.Tuple(()), spaces.Box(0, 1, (0,)), spaces.Dict(a=spaces.Box(0, 1, (3, 0)))]
)
def test_observations_without_anything_in_them(space):
    with pytest.raises(EnvironmentFault, match="there is nothing in them"):
        ObservationReader(space)


def test_a_spec_in_words():
    space = spaces.Dict(a=spaces.Box(0, 255, (8, 8), U8), b=spaces.Discrete(3))
    assert in_words(ObservationReader(space).spec) == "a (1, 8, 8) uint8 x 0.003922, b (3,) float32"


def test_dicts_and_tuples_of_spaces():
    """Catches: parts that are dropped, mixed up, or read from a batch as if it were one observation."""
    space = spaces.Dict(
        look=spaces.Box(0, 255, (6, 6, 3), U8),
        inner=spaces.Tuple((spaces.Discrete(3), spaces.Dict(x=spaces.Box(-1, 1, (2,), F32)))),
    )
    reader = ObservationReader(space)
    assert {name: part.shape for name, part in reader.spec.items()} == {"look": (3, 6, 6), "inner.0": (3,), "inner.1.x": (2,)}
    space.seed(0)
    one = space.sample()
    read = reader.read(one)
    np.testing.assert_array_equal(read["inner.0"], np.eye(3)[one["inner"][0]])
    np.testing.assert_array_equal(read["inner.1.x"], one["inner"][1]["x"])
    np.testing.assert_array_equal(read["look"], np.moveaxis(one["look"], -1, 0))
    two = {"look": np.stack([one["look"]] * 2), "inner": (np.array([0, 2]), {"x": np.zeros((2, 2), F32)})}
    assert reader.read_batch(two, 2)["inner.0"].tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Box(-1, 1, (2, 3, 4, 5), F32),
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Text(3)), spaces.Graph(spaces.Discrete(2), None),
    ],
)  # fmt: skip
def test_other_observations_are_refused(space):
    with pytest.raises(EnvironmentFault, match="are not supported: dae takes numbers, vectors, pictures") as caught:
        ObservationReader(space)
    assert "\n" not in str(caught.value)


def test_actions():
    assert num_actions(spaces.Discrete(7, start=-2)) == 7
    for space in (spaces.Box(-1, 1, (2,), F32), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(3)):
        with pytest.raises(
            EnvironmentFault, match=rf"actions of type {type(space).__name__} are not supported: .*discretise"
        ) as caught:
            num_actions(space)
        assert "\n" not in str(caught.value)


BAD = {
    "another shape": (spaces.Box(-1, 1, (3,), F32), np.zeros(4, F32), r"has the shape \(4,\), its space says \(3,\)"),
    "an axis too many": (spaces.Box(-1, 1, (3,), F32), np.zeros((1, 3), F32), r"has the shape \(1, 3\)"),
    "NaN": (spaces.Box(-1, 1, (3,), F32), np.array([0, np.nan, 0], F32), "holds NaN or infinity"),
    "infinity": (spaces.Box(-np.inf, np.inf, (3,), F32), np.array([0, -np.inf, 0], F32), "holds NaN or infinity"),
    "infinity in single precision": (spaces.Box(-np.inf, np.inf, (1,), np.float64), np.array([1e39]), "holds NaN or infinity"),
    "text": (spaces.Box(-1, 1, (1,), F32), np.array(["a"]), "holds <U1, not numbers"),
    "None": (spaces.Box(-1, 1, (), F32), None, "holds object, not numbers"),
    "ragged": (spaces.Box(-1, 1, (2, 2), F32), [[1.0], [1.0, 2.0]], "."),
    "no such choice": (spaces.Discrete(3), 3, "is 3, outside its space of 3 values"),
    "below the first choice": (spaces.Discrete(3, start=1), 0, "outside its space of 3 values"),
    "a choice that is no integer": (spaces.Discrete(3), 1.5, "."),
    "one of the choices": (spaces.MultiDiscrete([2, 3]), np.array([1, 3]), "outside its space of 3 values"),
    "a missing part": (spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2)), {"a": 0}, "has no part 'b'"),
    "no dict": (spaces.Dict(a=spaces.Discrete(2)), 0, "has no part 'a'"),
    "a short tuple": (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), (0,), "has no part '1'"),
    "fractions for bytes": (spaces.Box(0, 255, (3, 8, 8), U8), np.full((3, 8, 8), 0.5), "."),
    "bytes that are too large": (spaces.Box(0, 255, (3, 8, 8), U8), np.full((3, 8, 8), 300), "."),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_space_does_not_allow_is_a_value_error(name):
    """Catches: an observation that is silently cast to something else, and any other exception.

    The reader's callers turn a ValueError, and nothing else, into one line.
    """
    space, raw, message = BAD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=message) as caught:
            ObservationReader(space).read(raw)
    assert type(caught.value) is ValueError, caught.value
