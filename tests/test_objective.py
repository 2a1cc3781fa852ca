"""Every function of `dae.objective` against its equation, typed out in slow loops in float64, and what gradients may reach.

Each test says which mistake it is there to catch. Axes are those of objective.py: n slots, b windows, a actions, o outcomes of the
observation, c reward classes, z = o * |R| + c, d embedding.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from numpy.typing import NDArray
from torch import Tensor

from dae import objective as obj

Array = NDArray[np.float64]

SIZES = [(1, 1), (1, 3), (4, 1), (5, 3)]
"""(n, b): edges and one in the middle."""

sizes = pytest.mark.parametrize(("n", "b"), SIZES)


def T(x: object) -> Tensor:
    """As a tensor; float64 stays float64."""
    return torch.as_tensor(np.asarray(x))


def same(got: Tensor, expected: Array, **tolerance: float) -> None:
    """Equal up to rounding, and in float64: a hidden cast to float32 would fail here."""
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.detach().numpy(), expected, **{"rtol": 1e-10, "atol": 1e-12} | tolerance)


def leaf(rng: np.random.Generator, *shape: int) -> Tensor:
    """Random numbers that gradients are asked for."""
    return T(rng.normal(size=shape)).requires_grad_()


def distributions(rng: np.random.Generator, *shape: int) -> Array:
    """Along the last axis."""
    return rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])


def softmax(x: Array) -> Array:
    """Of one vector."""
    e = np.exp(x - x.max())
    return e / e.sum()


# ------------------------------------------------------------------------------------------------------------- target policy


@sizes
@pytest.mark.parametrize("actions", [1, 2, 5])
def test_target_policy(n: int, b: int, actions: int) -> None:
    """softmax(A_EMA / T_EMA) over actions. Catches the wrong axis, A * T, and T = 1."""
    rng = np.random.default_rng(0)
    raw, temperature = rng.normal(size=(n, b, actions)), 0.3
    expected = np.zeros((n, b, actions))
    for t in range(n):
        for i in range(b):
            expected[t, i] = softmax(raw[t, i] / temperature)
    same(obj.target_policy(T(raw), T(temperature)), expected)
    same(obj.target_policy(T(raw + 7.0), T(temperature)), expected, atol=1e-10)  # centred or not


def test_target_policy_is_finite_at_the_ends_of_the_temperature() -> None:
    """T falls to e^-12 when A stops changing: no overflow, the greedy policy; and uniform when T is large."""
    raw = T([[[1.0, 3.0, 2.0]]]).float()
    torch.testing.assert_close(obj.target_policy(raw, torch.tensor(-12.0).exp()), torch.tensor([[[0.0, 1.0, 0.0]]]))
    torch.testing.assert_close(obj.target_policy(raw, torch.tensor(1e6)), torch.full((1, 1, 3), 1 / 3))


def test_target_policy_passes_no_gradient() -> None:
    """The target policy is fixed while A is centred under it."""
    rng = np.random.default_rng(0)
    assert not obj.target_policy(leaf(rng, 2, 2, 3), leaf(rng).detach().exp().requires_grad_()).requires_grad


# ---------------------------------------------------------------------------------------------------------- the two constraints


@sizes
@pytest.mark.parametrize("actions", [1, 2, 5])
def test_centre_advantage(n: int, b: int, actions: int) -> None:
    """A(h, a_t) - sum_a pi(a) A(h, a). Catches the mean over actions instead of E_pi, and the wrong action."""
    rng = np.random.default_rng(1)
    raw, policy, action = rng.normal(size=(n, b, actions)), distributions(rng, n, b, actions), rng.integers(actions, size=(n, b))
    expected = np.zeros((n, b))
    for t in range(n):
        for i in range(b):
            expected[t, i] = raw[t, i, action[t, i]] - sum(policy[t, i, a] * raw[t, i, a] for a in range(actions))
    same(obj.centre_advantage(T(raw), T(policy), T(action)), expected)
    same(obj.centre_advantage(T(raw + 9.0), T(policy), T(action)), expected)  # what all actions share is V's


@sizes
def test_first_constraint_holds(n: int, b: int) -> None:
    """E_pi[A] = 0, Eq. 6."""
    rng = np.random.default_rng(2)
    raw, policy = T(rng.normal(size=(n, b, 4))), T(distributions(rng, n, b, 4))
    each = torch.stack([obj.centre_advantage(raw, policy, torch.full((n, b), a)) for a in range(4)], -1)
    same((policy * each).sum(-1), np.zeros((n, b)))


@sizes
@pytest.mark.parametrize("outcomes", [1, 2, 6])
def test_centre_luck(n: int, b: int, outcomes: int) -> None:
    """Eq. 7: E_q[g] - E_p[g]. Catches a missing exp of the log prior, and a prior and posterior that have changed places."""
    rng = np.random.default_rng(3)
    raw, q, p = rng.normal(size=(n, b, outcomes)), distributions(rng, n, b, outcomes), distributions(rng, n, b, outcomes)
    expected = np.zeros((n, b))
    for t in range(n):
        for i in range(b):
            expected[t, i] = sum((q[t, i, z] - p[t, i, z]) * raw[t, i, z] for z in range(outcomes))
    same(obj.centre_luck(T(raw), T(q), T(np.log(p))), expected)
    same(obj.centre_luck(T(raw + 9.0), T(q), T(np.log(p))), expected)


@sizes
def test_second_constraint_holds(n: int, b: int) -> None:
    """E_{(r, o') ~ p}[B] = 0, Eq. 6, over all outcomes that the prior expects."""
    rng = np.random.default_rng(4)
    raw, p = T(rng.normal(size=(n, b, 6))), T(distributions(rng, n, b, 6))
    each = [obj.centre_luck(raw, torch.eye(6, dtype=torch.float64)[z].expand(n, b, 6), p.log()) for z in range(6)]
    same((p * torch.stack(each, -1)).sum(-1), np.zeros((n, b)))


def test_luck_of_an_impossible_outcome_does_not_count() -> None:
    """log p = -inf is p = 0, not NaN."""
    raw, q = T([[[5.0, 7.0]]]), T([[[1.0, 0.0]]])
    same(obj.centre_luck(raw, q, T([[[0.0, -np.inf]]])), np.zeros((1, 1)))


# ------------------------------------------------------------------------------------------------------ discrete latent dynamics


@sizes
@pytest.mark.parametrize(("outcomes", "d"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_outcome_distance(n: int, b: int, outcomes: int, d: int) -> None:
    """(1/d) |x_hat - x|^2. Catches the sum over d, the unsquared norm, and an embedding broadcast along the wrong axis."""
    rng = np.random.default_rng(5)
    prediction, embedding = rng.normal(size=(n, b, outcomes, d)), rng.normal(size=(n, b, d))
    expected = np.zeros((n, b, outcomes))
    for t in range(n):
        for i in range(b):
            for o in range(outcomes):
                expected[t, i, o] = sum((prediction[t, i, o, j] - embedding[t, i, j]) ** 2 for j in range(d)) / d
    same(obj.outcome_distance(T(prediction), T(embedding)), expected)


def test_distance_of_normalised_vectors_is_the_cosine_s() -> None:
    """What the 1/d is for: 2 - 2 cos where both have a root mean square of 1, as SPR's loss."""
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(2, 16))
    x, y = x / np.sqrt((x**2).mean()), y / np.sqrt((y**2).mean())
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    same(obj.outcome_distance(T(x)[None, None, None], T(y)[None, None]), np.full((1, 1, 1), 2 - 2 * cosine))


@sizes
@pytest.mark.parametrize("outcomes", [1, 2, 5])
@pytest.mark.parametrize("eps", [0.0, 0.3, 1.0])
def test_wta_posterior(n: int, b: int, outcomes: int, eps: float) -> None:
    """App. B.1: 1 - eps + eps/|Z| for the nearest, eps/|Z| otherwise. Catches argmax, eps/(|Z| - 1), and a winner by batch."""
    rng = np.random.default_rng(7)
    distance = rng.random((n, b, outcomes))
    expected = np.zeros((n, b, outcomes))
    for t in range(n):
        for i in range(b):
            nearest = min(range(outcomes), key=lambda o: distance[t, i, o])
            for o in range(outcomes):
                expected[t, i, o] = 1 - eps + eps / outcomes if o == nearest else eps / outcomes
    got = obj.wta_posterior(T(distance), T(eps))
    same(got, expected)
    same(got.sum(-1), np.ones((n, b)))


def test_wta_posterior_at_its_ends() -> None:
    """eps = 0: the indicator of Eq. 8, exactly; eps = 1: all alike, exactly. A tie has one winner, not two."""
    distance = T([[[0.2, 0.1, 0.3, 0.1]]])
    assert obj.wta_posterior(distance, T(0.0)).tolist() == [[[0, 1, 0, 0]]]
    assert obj.wta_posterior(distance, T(1.0)).tolist() == [[[0.25] * 4]]


@sizes
@pytest.mark.parametrize("outcomes", [1, 4])
def test_reconstruction_loss(n: int, b: int, outcomes: int) -> None:
    """Eq. 8 with the posterior in the indicator's place. Catches the mean over outcomes, which would divide it by |Z|."""
    rng = np.random.default_rng(8)
    distance, q = rng.random((n, b, outcomes)), distributions(rng, n, b, outcomes)
    expected = np.zeros((n, b))
    for t in range(n):
        for i in range(b):
            expected[t, i] = sum(q[t, i, o] * distance[t, i, o] for o in range(outcomes))
    same(obj.reconstruction_loss(T(distance), T(q)), expected)


@sizes
@pytest.mark.parametrize(("outcomes", "classes"), [(1, 1), (4, 1), (1, 3), (4, 3), (3, 4)])
def test_joint_posterior(n: int, b: int, outcomes: int, classes: int) -> None:
    """q(z_o) 1[c = r_t] at z = o * |R| + c, where the network's prior and luck have it. Catches the other order, c * |Z_O| + o."""
    rng = np.random.default_rng(9)
    q, c = distributions(rng, n, b, outcomes), rng.integers(classes, size=(n, b))
    expected = np.zeros((n, b, outcomes * classes))
    for t in range(n):
        for i in range(b):
            for o in range(outcomes):
                expected[t, i, o * classes + c[t, i]] = q[t, i, o]
    same(obj.joint_posterior(T(q), T(c), classes), expected)


@sizes
@pytest.mark.parametrize("outcomes", [1, 6])
def test_prior_loss(n: int, b: int, outcomes: int) -> None:
    """Alg. 1 l.20: -sum_z q log p. Catches the sign, KL in its place, and the mean over z."""
    rng = np.random.default_rng(10)
    q, p = distributions(rng, n, b, outcomes), distributions(rng, n, b, outcomes)
    expected = np.zeros((n, b))
    for t in range(n):
        for i in range(b):
            expected[t, i] = -sum(q[t, i, z] * math.log(p[t, i, z]) for z in range(outcomes))
    same(obj.prior_loss(T(q), T(np.log(p))), expected)


def test_prior_loss_of_a_factorised_prior_is_two_cross_entropies() -> None:
    """p(z) = p(z_o) p(c): L_prior = CE(q_o, p_o) - log p(r_t). Catches a layout of z that differs between posterior and prior."""
    rng = np.random.default_rng(11)
    n, b, outcomes, classes = 3, 2, 4, 3
    q, c = distributions(rng, n, b, outcomes), rng.integers(classes, size=(n, b))
    p_o, p_c = distributions(rng, n, b, outcomes), distributions(rng, n, b, classes)
    log_prior = (np.log(p_o)[..., :, None] + np.log(p_c)[..., None, :]).reshape(n, b, outcomes * classes)
    expected = np.zeros((n, b))
    for t in range(n):
        for i in range(b):
            expected[t, i] = -sum(q[t, i, o] * math.log(p_o[t, i, o]) for o in range(outcomes)) - math.log(p_c[t, i, c[t, i]])
    same(obj.prior_loss(obj.joint_posterior(T(q), T(c), classes), T(log_prior)), expected)


# ------------------------------------------------------------------------------------------------------------------- Eq. 6


GAMMA = 0.9
RESIDUAL = ("reward", "discount", "adv", "luck", "value", "ema_value", "valid")


def slow_residual(
    reward: Array,
    discount: Array,
    adv: Array,
    luck: Array,
    value: Array,
    ema_value: Array,
    valid: NDArray[np.bool_],
    backup_steps: int,
    correct_skill: bool = True,
) -> Array:
    """Eq. 6 from every real start to the end of its block, or to the slot of the episode's last observation if that comes first.

    Term by term, slow on purpose. NaN where there is no transition to start from.
    """
    n, b = reward.shape
    out = np.full((n, b), np.nan)
    for i in range(b):
        for s in range(n):
            if not valid[s, i]:
                continue
            block_end = min((s // backup_steps + 1) * backup_steps, n)
            end = next((t for t in range(s, block_end) if not valid[t, i]), block_end)
            total = 0.0
            for t in range(s, end):
                skill = adv[t, i] if correct_skill or t == s else 0.0
                total += np.prod(discount[s:t, i]) * (reward[t, i] - skill - luck[t, i])
            out[s, i] = total + np.prod(discount[s:end, i]) * ema_value[end, i] - value[s, i]
    return out


def segments(rng: np.random.Generator, n: int, b: int) -> dict[str, Array]:
    """Random numbers with terminals, and slots of last observations, strewn over them."""
    numbers: dict[str, Array] = {name: rng.normal(size=(n, b)) for name in RESIDUAL}
    numbers["ema_value"] = rng.normal(size=(n + 1, b))
    numbers["discount"] = GAMMA * (rng.random((n, b)) > 0.15)
    numbers["valid"] = rng.random((n, b)) > 0.15
    return numbers


BLOCKS = [(1, 1, 1), (1, 3, 1), (4, 1, 4), (5, 3, 5), (6, 3, 1), (6, 3, 2), (6, 3, 3), (16, 20, 16), (16, 20, 8), (5, 3, 3)]
"""(n, b, backup_steps): the trained slots are a multiple of the backup length; were they not, the window would end the last one."""


@pytest.mark.parametrize("correct_skill", [True, False])
@pytest.mark.parametrize(("n", "b", "backup_steps"), BLOCKS)
def test_residual_is_equation_6(n: int, b: int, backup_steps: int, correct_skill: bool) -> None:
    """Catches indices and exponents off by one, a backup that runs over an episode's or a block's end, and the wrong bootstrap."""
    for seed in range(5):
        x = segments(np.random.default_rng(seed), n, b)
        got = obj.dae_residual(*(T(x[name]) for name in RESIDUAL), backup_steps, correct_skill=correct_skill)
        expected = slow_residual(*(x[name] for name in RESIDUAL), backup_steps, correct_skill)
        same(got[T(x["valid"])], expected[x["valid"]])


def test_residual_corrects_skill_unless_told_not_to() -> None:
    """The default is the paper's."""
    x = segments(np.random.default_rng(0), 5, 3)
    arguments = [T(x[name]) for name in RESIDUAL]
    assert torch.equal(obj.dae_residual(*arguments, 5), obj.dae_residual(*arguments, 5, correct_skill=True))


@pytest.mark.parametrize("backup_steps", [4, 8])
def test_a_slot_without_a_transition_gives_nothing_but_its_value(backup_steps: int) -> None:
    """Of the slot of an episode's last observation only the slow value counts; its reward, its discount and what the heads say
    there leave the residuals of real transitions alone. Catches training on the dummy transition of autoreset."""
    rng = np.random.default_rng(12)
    x = segments(rng, 8, 10)
    clean = obj.dae_residual(*(T(x[name]) for name in RESIDUAL), backup_steps)
    for name in ("reward", "discount", "adv", "luck", "value"):
        x[name] = np.where(x["valid"], x[name], 1e6 * rng.normal(size=(8, 10)))
    junk = obj.dae_residual(*(T(x[name]) for name in RESIDUAL), backup_steps)
    assert torch.equal(clean[T(x["valid"])], junk[T(x["valid"])])
    x["ema_value"][:-1] += ~x["valid"]
    moved = obj.dae_residual(*(T(x[name]) for name in RESIDUAL), backup_steps)
    assert not torch.equal(clean[T(x["valid"])], moved[T(x["valid"])])


def weights(n: int, backup_steps: int, of: str, terminal: int | None = None, invalid: int | None = None) -> Array:
    """d residual_s / d x_j for one input x, by a probe of 1 at each j and 0 everywhere else.  [starts, slots of x]"""
    probes = n + 1 if of == "ema_value" else n  # one window for each
    x = {name: torch.zeros(n, probes, dtype=torch.float64) for name in RESIDUAL}
    x["ema_value"] = torch.zeros(n + 1, probes, dtype=torch.float64)
    x["discount"], x["valid"] = torch.full((n, probes), GAMMA, dtype=torch.float64), torch.ones(n, probes, dtype=torch.bool)
    if terminal is not None:
        x["discount"][terminal] = 0.0
    if invalid is not None:
        x["valid"][invalid] = False
    x[of] = torch.eye(probes, dtype=torch.float64)
    return obj.dae_residual(*x.values(), backup_steps).numpy()


def triangle(n: int) -> Array:
    """gamma^{j-t} for j >= t, 0 before."""
    return np.array([[GAMMA ** (j - t) if j >= t else 0.0 for j in range(n)] for t in range(n)])


@pytest.mark.parametrize("n", [1, 2, 16])
def test_probe_rewards(n: int) -> None:
    """A reward at j weighs gamma^{j-t} in the residual of t <= j, and nothing in later ones; A and B the same, with a minus; V only
    in its own. Catches the indices of Algorithm 1 taken literally, by which only the last reward counts."""
    np.testing.assert_allclose(weights(n, n, "reward"), triangle(n))
    np.testing.assert_allclose(weights(n, n, "adv"), -triangle(n))
    np.testing.assert_allclose(weights(n, n, "luck"), -triangle(n))
    np.testing.assert_allclose(weights(n, n, "value"), -np.eye(n))


@pytest.mark.parametrize("n", [1, 2, 16])
def test_probe_bootstrap(n: int) -> None:
    """V_EMA(h_K) weighs gamma^{K-t} for every start t; the slow values before it are not read."""
    expected = np.zeros((n, n + 1))
    expected[:, n] = [GAMMA ** (n - t) for t in range(n)]
    np.testing.assert_allclose(weights(n, n, "ema_value"), expected)


@pytest.mark.parametrize("at", range(16))
def test_probe_terminal(at: int) -> None:
    """Transition `at` is the last of its episode: starts up to it end there and bootstrap from nothing; later ones know nothing of
    it. All 16 positions. Catches (1 - terminal) one slot off."""
    expected = triangle(16)
    expected[: at + 1, at + 1 :] = 0
    np.testing.assert_allclose(weights(16, 16, "reward", terminal=at), expected)
    bootstrap = np.zeros((16, 17))
    bootstrap[at + 1 :, 16] = [GAMMA ** (16 - t) for t in range(at + 1, 16)]
    np.testing.assert_allclose(weights(16, 16, "ema_value", terminal=at), bootstrap)


@pytest.mark.parametrize("at", range(1, 16))
def test_probe_truncation(at: int) -> None:
    """Slot `at` holds the last observation of an episode that was cut off: starts before it bootstrap from V_EMA there, with
    gamma^{at-t}; later ones know nothing of it. All positions. Catches a truncation treated as a terminal, and as nothing."""
    real = np.arange(16) != at
    expected = triangle(16)
    expected[:at, at:] = 0
    np.testing.assert_allclose(weights(16, 16, "reward", invalid=at)[real], expected[real])
    bootstrap = np.zeros((16, 17))
    bootstrap[:at, at] = [GAMMA ** (at - t) for t in range(at)]
    bootstrap[at:, 16] = [GAMMA ** (16 - t) for t in range(at, 16)]
    np.testing.assert_allclose(weights(16, 16, "ema_value", invalid=at)[real], bootstrap[real])


@pytest.mark.parametrize(("backup_steps", "terminal"), [(1, None), (2, None), (4, None), (4, 3), (4, 5)])
def test_probe_blocks(backup_steps: int, terminal: int | None) -> None:
    """Blocks of n slots bootstrap at their own ends and see nothing beyond them, also where the last of them is terminal."""
    reward, bootstrap = np.zeros((8, 8)), np.zeros((8, 9))
    for s in range(8):
        end = (s // backup_steps + 1) * backup_steps
        alive = 1.0
        for t in range(s, end):
            reward[s, t] = alive
            alive *= 0.0 if t == terminal else GAMMA
        bootstrap[s, end] = alive
    np.testing.assert_allclose(weights(8, backup_steps, "reward", terminal), reward)
    np.testing.assert_allclose(weights(8, backup_steps, "ema_value", terminal), bootstrap)


def test_residual_of_one_step_blocks_is_the_one_step_error() -> None:
    """The ablation without multi-step targets: r - A - B + gamma V_EMA' - V at every trained slot."""
    rng = np.random.default_rng(13)
    x = segments(rng, 6, 3)
    x["valid"][:] = True
    expected = x["reward"] - x["adv"] - x["luck"] + x["discount"] * x["ema_value"][1:] - x["value"]
    for correct_skill in (True, False):
        same(obj.dae_residual(*(T(x[name]) for name in RESIDUAL), 1, correct_skill=correct_skill), expected)


@sizes
@pytest.mark.parametrize("starts", ["all", "first"])
def test_start_mask(n: int, b: int, starts: str) -> None:
    """Every real start, or the first of each block if it is real. Catches a block's last, and starts without a transition."""
    rng = np.random.default_rng(14)
    for backup_steps in [k for k in range(1, n + 1) if n % k == 0] * 10:
        valid = rng.random((n, b)) > 0.3
        expected = np.zeros((n, b), bool)
        for t in range(n):
            for i in range(b):
                expected[t, i] = valid[t, i] and (starts == "all" or t % backup_steps == 0)
        assert np.array_equal(obj.start_mask(T(valid), backup_steps, starts).numpy(), expected)


# --------------------------------------------------------------------------------------------------------------- temperature


def slow_kl(q: Array, p: Array) -> float:
    """KL(q || p) of two vectors, 0 log 0 = 0."""
    return sum(x * (math.log(x) - math.log(y)) for x, y in zip(q, p, strict=True) if x > 0)


@sizes
@pytest.mark.parametrize("actions", [1, 2, 5])
def test_policy_kl(n: int, b: int, actions: int) -> None:
    """KL(pi_target || softmax(A / T)). Catches the other direction, and T where log T is given."""
    rng = np.random.default_rng(15)
    raw, policy, log_t = rng.normal(size=(n, b, actions)), distributions(rng, n, b, actions), -0.7
    policy[0, 0] = np.eye(actions)[0]  # the end of a greedy target: 0 log 0
    expected = np.zeros((n, b))
    for t in range(n):
        for i in range(b):
            expected[t, i] = slow_kl(policy[t, i], softmax(raw[t, i] / math.exp(log_t)))
    got = obj.policy_kl(T(raw), T(log_t), T(policy))
    same(got, expected)
    assert got.min() > -1e-12


def test_policy_kl_is_zero_where_nothing_has_changed() -> None:
    """A = A_EMA and T = T_EMA."""
    raw, log_t = T(np.random.default_rng(16).normal(size=(3, 2, 4))), T(-1.3)
    same(obj.policy_kl(raw, log_t, obj.target_policy(raw - 2.0, log_t.exp())), np.zeros((3, 2)), atol=1e-10)


def test_policy_kl_is_finite_at_the_least_temperature() -> None:
    """float32, log T = -12: A / T is in the hundred thousands, and its softmax has zeros."""
    raw, log_t = torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor(-12.0, requires_grad=True)
    kl = obj.policy_kl(raw, log_t, obj.target_policy(raw.flip(-1), log_t.detach().exp()))
    obj.temperature_loss(kl, log_t, 20.0).sum().backward()
    assert kl.isfinite().all()
    assert log_t.grad is not None and log_t.grad.isfinite()


@sizes
def test_temperature_loss(n: int, b: int) -> None:
    """log T + beta_KL KL, at every slot."""
    kl = np.random.default_rng(17).random((n, b))
    expected = np.zeros((n, b))
    for t in range(n):
        for i in range(b):
            expected[t, i] = -0.4 + 20.0 * kl[t, i]
    same(obj.temperature_loss(T(kl), T(-0.4), 20.0), expected)


def temperature_gradient(raw: Tensor, log_t: float, policy: Tensor, beta: float) -> float:
    """d mean L_T / d log T."""
    parameter = T(log_t).requires_grad_()
    obj.temperature_loss(obj.policy_kl(raw, parameter, policy), parameter, beta).mean().backward()
    assert parameter.grad is not None
    return float(parameter.grad)


@pytest.mark.parametrize("beta", [5.0, 20.0])
def test_gradient_of_the_temperature(beta: float) -> None:
    """d L_T / d log T = 1 - (beta / T) mean(E_pi A - E_pi_EMA A), pi being the online policy. Catches T in log T's place."""
    rng = np.random.default_rng(18)
    ema, log_t, ema_t = rng.normal(size=(4, 3, 5)), -0.5, 0.8
    raw = ema + 0.3 * rng.normal(size=ema.shape)
    policy = obj.target_policy(T(ema), T(ema_t))
    gain = 0.0
    for t in range(4):
        for i in range(3):
            gain += (softmax(raw[t, i] / math.exp(log_t)) - softmax(ema[t, i] / ema_t)) @ raw[t, i] / 12
    expected = 1 - beta / math.exp(log_t) * gain
    assert abs(expected - 1) > 0.1
    assert temperature_gradient(T(raw), log_t, policy, beta) == pytest.approx(expected)


@pytest.mark.parametrize("log_t", [0.0, -3.0])
def test_temperature_falls_at_a_constant_rate_when_nothing_changes(log_t: float) -> None:
    """A = A_EMA and T = T_EMA: KL is at its minimum and the gradient exactly 1, so there is no equilibrium. Also where A is 0."""
    raw = T(np.random.default_rng(19).normal(size=(4, 3, 5)))
    for a in (raw, torch.zeros_like(raw)):
        assert temperature_gradient(a, log_t, obj.target_policy(a, T(math.exp(log_t))), 20.0) == pytest.approx(1)


def test_temperature_settles_where_policies_differ_by_one_over_beta() -> None:
    """A keeps changing by noise, T_EMA = T: gradient descent ends where mean(E_pi A - E_pi_EMA A) / T = 1 / beta. Catches the wrong
    sign of either term, with which T runs away."""
    rng = np.random.default_rng(20)
    ema, beta, log_t = 0.1 * rng.normal(size=(50, 20, 4)), 20.0, 0.0
    raw = T(ema + 0.02 * rng.normal(size=ema.shape))
    for step in range(1500):
        policy = obj.target_policy(T(ema), T(math.exp(log_t)))
        log_t -= 0.02 * 0.998**step * temperature_gradient(raw, log_t, policy, beta)
    temperature = math.exp(log_t)
    pi, pi_ema = obj.target_policy(raw, T(temperature)), obj.target_policy(T(ema), T(temperature))
    assert float(((pi - pi_ema) * raw).sum(-1).mean()) / temperature == pytest.approx(1 / beta, rel=0.02)
    assert 0.005 < temperature < 0.1
    assert 0.01 < float(obj.policy_kl(raw, T(log_t), pi_ema).mean()) < 0.06


# ------------------------------------------------------------------------------------------------------------ weight and mean


@pytest.mark.parametrize("eps", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("variance", [0.0, 0.009, 0.01, 3.0])
def test_value_weight(eps: float, variance: float) -> None:
    """(1 - eps_WTA) / max(Var(G), floor). Catches a floor that is added, and a division by 0 before the first reward."""
    same(obj.value_weight(T(eps), T(variance), 0.01), np.array((1 - eps) / max(variance, 0.01)))


@sizes
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_masked_mean(n: int, b: int, share: float) -> None:
    """Over the kept slots only, 0 if there are none. Catches division by all slots."""
    rng = np.random.default_rng(21)
    x, mask = rng.normal(size=(n, b)), rng.random((n, b)) < share
    total, count = 0.0, 0
    for t in range(n):
        for i in range(b):
            if mask[t, i]:
                total, count = total + x[t, i], count + 1
    same(obj.masked_mean(T(x), T(mask)), np.array(total / count if count else 0.0))


# ------------------------------------------------------------------------------------------------------------------ gradients


def test_gradient_of_the_centred_advantage() -> None:
    """1[a = a_t] - pi(a): the constraint is part of the function, not of the data. The policy gets none."""
    rng = np.random.default_rng(22)
    raw, policy, action = leaf(rng, 2, 3, 4), T(distributions(rng, 2, 3, 4)).requires_grad_(), T(rng.integers(4, size=(2, 3)))
    obj.centre_advantage(raw, policy, action).sum().backward()
    assert policy.grad is None
    assert raw.grad is not None
    same(raw.grad, np.eye(4)[action.numpy()] - policy.detach().numpy())


def test_gradient_of_luck() -> None:
    """q - p to g, none to the prior: DAE must not bend what it is centred under."""
    rng = np.random.default_rng(23)
    raw, log_prior, q = leaf(rng, 2, 3, 6), leaf(rng, 2, 3, 6), T(distributions(rng, 2, 3, 6))
    obj.centre_luck(raw, q, log_prior.log_softmax(-1)).sum().backward()
    assert log_prior.grad is None
    assert raw.grad is not None
    same(raw.grad, q.numpy() - log_prior.detach().softmax(-1).numpy())


def test_gradient_of_the_prior() -> None:
    """p - q to the logits: the prior is fitted to the posterior."""
    rng = np.random.default_rng(24)
    logits, q = leaf(rng, 2, 3, 6), T(distributions(rng, 2, 3, 6))
    obj.prior_loss(q, logits.log_softmax(-1)).sum().backward()
    assert logits.grad is not None
    same(logits.grad, logits.detach().softmax(-1).numpy() - q.numpy())


@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0])
def test_gradient_of_the_predictions(eps: float) -> None:
    """Each prediction moves by its share of the posterior towards the slow embedding; eps = 0: exactly one learns, the nearest. The
    embedding gets none, and the posterior none through the distances that it was made from."""
    rng = np.random.default_rng(25)
    prediction, embedding = leaf(rng, 2, 3, 4, 5), leaf(rng, 2, 3, 5)
    distance = obj.outcome_distance(prediction, embedding)
    q = obj.wta_posterior(distance, T(eps))
    assert not q.requires_grad
    obj.reconstruction_loss(distance, q).sum().backward()
    assert embedding.grad is None
    assert prediction.grad is not None
    same(prediction.grad, (q[..., None] * 2 / 5 * (prediction - embedding[:, :, None])).detach().numpy())
    learning = prediction.grad.abs().sum(-1) > 0
    assert (learning.sum(-1) == (1 if eps == 0 else 4)).all()
    assert learning.gather(-1, distance.argmin(-1, keepdim=True)).all()


def test_gradient_of_the_residual() -> None:
    """A and B learn from every residual that they are in, V from its own alone: nothing reaches V through a bootstrap."""
    rng = np.random.default_rng(26)
    x = {name: T(value) for name, value in segments(rng, 6, 4).items()}
    for name in ("adv", "luck", "value"):
        x[name].requires_grad_()
    for start, window in np.ndindex(6, 4):
        if not x["valid"][start, window]:
            continue
        residual = obj.dae_residual(*(x[name] for name in RESIDUAL), 3)
        adv, luck, value = torch.autograd.grad(residual[start, window], [x["adv"], x["luck"], x["value"]])
        expected, factor = np.zeros((6, 4)), 1.0
        for t in range(start, start // 3 * 3 + 3):
            if not x["valid"][t, window]:
                break
            expected[t, window] = -factor
            factor *= float(x["discount"][t, window])
        same(adv, expected)
        same(luck, expected)
        own = np.zeros((6, 4))
        own[start, window] = -1
        same(value, own)


def test_gradient_of_the_kl() -> None:
    """To log T alone: the temperature follows A, and A does not follow the temperature."""
    rng = np.random.default_rng(27)
    raw, log_t = leaf(rng, 2, 3, 4), T(-0.2).requires_grad_()
    obj.policy_kl(raw, log_t, T(distributions(rng, 2, 3, 4))).sum().backward()
    assert raw.grad is None
    assert log_t.grad is not None


def test_gradient_of_the_mean() -> None:
    """1 / count where kept, 0 elsewhere."""
    rng = np.random.default_rng(28)
    x, mask = leaf(rng, 4, 3), T(rng.random((4, 3)) < 0.5)
    obj.masked_mean(x, mask).backward()
    assert x.grad is not None
    same(x.grad, mask.numpy() / mask.sum().item())


def all_losses(x: dict[str, Tensor], bootstrap: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Algorithm 1 l.18-30 with tensors in the network's place."""
    action, reward_class = T([[0, 2], [1, 0], [2, 1]]), T([[0, 1], [1, 1], [0, 0]])
    valid = T([[True, True], [True, False], [True, True]])
    reward, discount = reward_class.double(), torch.full((3, 2), GAMMA, dtype=torch.float64)
    distance = obj.outcome_distance(x["prediction"], x["ema_embedding"])
    posterior_o = obj.wta_posterior(distance, T(0.2))
    posterior = obj.joint_posterior(posterior_o, reward_class, 2)
    log_prior = x["prior_logits"].log_softmax(-1)
    policy = obj.target_policy(x["ema_raw_adv"], x["ema_temperature"])
    adv, luck = obj.centre_advantage(x["raw_adv"], policy, action), obj.centre_luck(x["raw_luck"], posterior, log_prior)
    residual = obj.dae_residual(reward, discount, adv, luck, x["value"], bootstrap(x["ema_value"]), valid, 3)
    kl = obj.policy_kl(x["raw_adv"], x["log_temperature"], policy)
    return {
        "dae": obj.value_weight(T(0.2), T(2.0), 0.01) * obj.masked_mean(residual.square(), obj.start_mask(valid, 3, "all")),
        "prior": obj.masked_mean(obj.prior_loss(posterior, log_prior), valid),
        "rec": obj.masked_mean(obj.reconstruction_loss(distance, posterior_o), valid),
        "temperature": obj.masked_mean(obj.temperature_loss(kl, x["log_temperature"], 20.0), valid),
    }


ROUTES = {
    "dae": {"raw_adv", "raw_luck", "value"},
    "prior": {"prior_logits"},
    "rec": {"prediction"},
    "temperature": {"log_temperature"},
}


@pytest.mark.parametrize("loss", ROUTES)
@pytest.mark.parametrize("detached", [True, False])
def test_each_loss_reaches_only_what_the_paper_lets_it(loss: str, detached: bool) -> None:
    """Everything asks for gradients, the slow network's outputs too. The one route that objective.py does not close itself is the
    slow value, which its caller computes without gradients."""
    rng = np.random.default_rng(29)
    shapes = {
        "raw_adv": (3, 2, 3), "ema_raw_adv": (3, 2, 3), "raw_luck": (3, 2, 8), "prior_logits": (3, 2, 8), "value": (3, 2),
        "ema_value": (4, 2), "prediction": (3, 2, 4, 5), "ema_embedding": (3, 2, 5), "log_temperature": (), "ema_temperature": (),
    }  # fmt: skip
    x = {name: leaf(rng, *shape) for name, shape in shapes.items()}
    with torch.no_grad():
        x["ema_temperature"].exp_()
    all_losses(x, torch.detach if detached else lambda v: v)[loss].backward()
    reached = {name for name, tensor in x.items() if tensor.grad is not None and tensor.grad.abs().sum() > 0}
    assert reached == ROUTES[loss] | ({"ema_value"} if loss == "dae" and not detached else set())


# --------------------------------------------------------------------------------------------------------------------- shapes


def shape_mistakes() -> dict[str, Callable[[], Tensor]]:
    """Calls that broadcasting would let pass without a word."""
    f = torch.zeros
    n, b, a, o, c, d = 3, 2, 4, 5, 2, 6
    numbers, kept, index, nought = f(n, b), torch.ones(n, b, dtype=torch.bool), f(n, b, dtype=torch.long), f(())

    def residual(**changed: Tensor) -> Callable[[], Tensor]:
        inputs = dict.fromkeys(RESIDUAL, numbers) | {"ema_value": f(n + 1, b), "valid": kept} | changed
        return lambda: obj.dae_residual(**inputs, backup_steps=n)

    return {
        "temperature of each window": lambda: obj.target_policy(f(n, b, a), f(b)),
        "temperature as a number": lambda: obj.target_policy(f(n, b, a), 1.0),
        "policy of other actions": lambda: obj.centre_advantage(f(n, b, a), f(n, b, 1), index),
        "policy of one window": lambda: obj.centre_advantage(f(n, b, a), f(n, 1, a), index),
        "action with an axis of its own": lambda: obj.centre_advantage(f(n, b, a), f(n, b, a), index[..., None]),
        "action as a float": lambda: obj.centre_advantage(f(n, b, a), f(n, b, a), numbers),
        "embedding of one window": lambda: obj.outcome_distance(f(n, b, o, d), f(n, 1, d)),
        "embedding of another width": lambda: obj.outcome_distance(f(n, b, o, d), f(n, b, 1)),
        "embedding of n + 1 slots": lambda: obj.outcome_distance(f(n, b, o, d), f(n + 1, b, d)),
        "eps by window": lambda: obj.wta_posterior(f(n, b, o), f(n, b, 1)),
        "posterior over Z against distances over Z_O": lambda: obj.reconstruction_loss(f(n, b, o), f(n, b, o * c)),
        "class of one window": lambda: obj.joint_posterior(f(n, b, o), index[:, :1], c),
        "reward in its class's place": lambda: obj.joint_posterior(f(n, b, o), numbers, c),
        "posterior over Z_O against a prior over Z": lambda: obj.prior_loss(f(n, b, 1), f(n, b, c)),
        "luck of one outcome": lambda: obj.centre_luck(f(n, b, 1), f(n, b, o), f(n, b, o)),
        "bootstrap of n slots": residual(ema_value=f(n, b)),
        "bootstrap of the last slot alone": residual(ema_value=f(1, b)),
        "value with an axis of its own": residual(value=f(n, b, 1)),
        "value of the network's n + 1 slots": residual(value=f(n + 1, b)),
        "batch first": residual(reward=f(b, n)),
        "advantage of all actions": residual(adv=f(n, b, a)),
        "luck off, as a number": residual(luck=nought),
        "valid as a float": residual(valid=numbers),
        "mask as a float": lambda: obj.start_mask(numbers, n, "all"),
        "log T by slot": lambda: obj.policy_kl(f(n, b, a), f(n, 1), f(n, b, a)),
        "target policy of one window": lambda: obj.policy_kl(f(n, b, a), nought, f(n, 1, a)),
        "mean KL": lambda: obj.temperature_loss(nought, nought, 20.0),
        "variance as a number": lambda: obj.value_weight(nought, 1.0, 0.01),
        "mean of something with a further axis": lambda: obj.masked_mean(f(n, b, 1), kept),
        "mask of other windows": lambda: obj.masked_mean(f(n, 1), kept),
    }


@pytest.mark.parametrize("mistake", shape_mistakes())
def test_shape_mistakes_are_caught(mistake: str) -> None:
    """jaxtyping and beartype stop what broadcasting would turn into wrong numbers. Catches an annotation that says too little, and
    a conftest.py that has stopped checking them."""
    with pytest.raises(TypeCheckError):
        shape_mistakes()[mistake]()
