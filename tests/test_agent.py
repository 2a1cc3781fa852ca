"""One update against a slow transcription of Algorithm 1, what each loss trains, what each switch changes, and acting."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from conftest import REWARD_CLASSES, collected, random_window, signals, tiny_agent, tiny_config
from dae.agent import LOG_TEMPERATURE_RANGE, Agent
from dae.network import Inputs

TRUNK = {"encoder", "prev_action", "prev_reward", "core"}


def setup(rng, general=False, **overrides):
    cfg = tiny_config(rewards="general" if general else "classes", **overrides)
    return tiny_agent(cfg, reward_classes=() if general else REWARD_CLASSES), random_window(cfg, rng, general=general)


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


# ----------------------------------------------------------------------------------------------- Algorithm 1, typed out again


def raw_outputs(agent, w):
    """Both networks along the window, slot by slot, as float64 numbers: the only thing taken from the code under test."""
    found = {}
    for name, net in (("online", agent.net), ("ema", agent.ema)):
        core, rows = w.core_in if agent.cfg.stored_states else torch.zeros_like(w.core_in), []
        for t in range(len(w.inputs.reset)):
            with torch.no_grad():
                trunk = net.trunk(w.inputs[t : t + 1], core)
                core = trunk.core
                action = w.action[t : t + 1] if t < len(w.action) else torch.zeros_like(w.action[:1])
                outcomes = net.outcomes(trunk.features, action)
                row = {"adv": net.raw_adv(trunk.features), "value": net.state_value(trunk.features), "x": trunk.embedding}
                row |= {f.name: getattr(outcomes, f.name) for f in dataclasses.fields(outcomes)}
            rows.append({key: x[0].double().numpy() for key, x in row.items() if x is not None})
        found[name] = rows
    return found["online"], found["ema"]


def slow_losses(agent, w, s):
    """Algorithm 1, l.16-30, with the indices mended as design/algorithm.md has it: one number at a time."""
    c, (online, ema) = agent.cfg, raw_outputs(agent, w)
    k, n, steps = c.burn_in_steps, c.backup_steps, len(w.action)
    eps, scale, log_t = s.eps_wta.item(), s.reward_scale.item(), agent.log_temperature.item()
    outcomes, classes = c.num_outcomes, agent.net.sizes.reward_classes or (None,)
    rec, prior, temperature, residuals = [], [], [], []
    for b in range(w.action.shape[1]):
        adv, luck = {}, {}
        for t in range(k, steps):
            if not w.valid[t, b]:
                continue
            now, a, r = online[t], int(w.action[t, b]), float(w.reward[t, b])
            seen = classes.index(r) if classes != (None,) else 0

            distance = [np.mean((now["prediction"][b, z] - ema[t + 1]["x"][b]) ** 2) for z in range(outcomes)]  # l.18
            if classes == (None,):
                distance = [d + c.beta_reward * (now["predicted_reward"][b, z] - r / scale) ** 2 for z, d in enumerate(distance)]
            q = [(1 - eps) * (z == int(np.argmin(distance))) + eps / outcomes for z in range(outcomes)]
            rec.append(sum(q[z] * distance[z] for z in range(outcomes)))  # l.19
            log_p, g = (now[name][b].reshape(outcomes, len(classes)) for name in ("log_prior", "raw_luck"))
            prior.append(-sum(q[z] * log_p[z, seen] for z in range(outcomes)))  # l.20

            luck[t] = 0.0
            if eps <= c.luck_from_eps_wta and c.corrections == "skill+luck":  # l.21-25
                for z in range(outcomes):
                    for i in range(len(classes)):
                        luck[t] += (q[z] * (i == seen) - np.exp(log_p[z, i])) * g[z, i]
            target = softmax(ema[t]["adv"][b] / float(agent.ema_temperature))  # l.26
            policy = softmax(now["adv"][b] / np.exp(log_t))
            adv[t] = now["adv"][b, a] - sum(target[i] * now["adv"][b, i] for i in range(3))  # l.27
            temperature.append(log_t + c.beta_kl * sum(target[i] * np.log(target[i] / policy[i]) for i in range(3)))  # l.29

        for start in range(k, steps):  # l.28
            if not w.valid[start, b] or (c.dae_starts == "first" and (start - k) % n):
                continue
            end, total, weight, t = k + ((start - k) // n + 1) * n, 0.0, 1.0, start
            while t < end and w.valid[t, b]:
                skill = adv[t] if t == start or c.corrections != "none" else 0.0
                total += weight * (float(w.reward[t, b]) - skill - luck[t])
                weight *= 0.0 if w.terminal[t, b] else c.discount
                t += 1
            residuals.append((total + weight * ema[t]["value"][b] - online[start]["value"][b]) ** 2)

    def mean(numbers):
        return sum(numbers) / len(numbers) if numbers else 0.0

    beta_v = (1 - eps) / max(float(s.return_variance), c.variance_floor)  # l.30
    return {
        "dae": beta_v * mean(residuals),
        "prior": c.beta_prior * mean(prior),
        "rec": c.beta_rec * mean(rec),
        "temperature": mean(temperature),
    }


VARIANTS = {
    "the paper's": {},
    "stack of one": {"frame_stack": 1},
    "skill only": {"corrections": "skill"},
    "no corrections": {"corrections": "none"},
    "first starts": {"dae_starts": "first"},
    "joint prior": {"outcome_prior": "joint"},
    "additive luck": {"luck_form": "additive"},
    "joint prior, additive luck": {"outcome_prior": "joint", "luck_form": "additive"},
    "mlp core": {"core": "mlp"},
    "states from zero": {"stored_states": False},
    "gradient through the burn-in": {"burn_in_grad": True},
    "no burn-in": {"burn_in_steps": 0},
    "two outcomes": {"num_outcomes": 2},
    "raw predictions": {"normalise_predictions": False},
    "three blocks": {"train_steps": 9},
    "three blocks, first starts": {"train_steps": 9, "dae_starts": "first"},
    "no multi-step": {"backup_steps": 1, "train_steps": 6},
    "no corrections in blocks": {"train_steps": 6, "corrections": "none"},
    "other weights": {"beta_prior": 3.0, "beta_rec": 0.2, "beta_kl": 2.0, "discount": 0.5, "luck_from_eps_wta": 0.5},
    "general rewards": {"general": True},
    "general rewards, otherwise weighted": {"general": True, "beta_reward": 3.0, "luck_form": "additive"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_losses_are_those_of_algorithm_1(name, rng):
    """Catches: nearly every mistake in l.16-30: an index, a sign, a weight, a sum for a mean, a mask, the wrong network."""
    agent, w = setup(rng, **VARIANTS[name])
    for eps in (0.4, 0.0):
        s = signals(eps_wta=eps)
        got, expected = agent.losses(w, s)[0], slow_losses(agent, w, s)
        assert got.keys() == expected.keys()
        for loss, value in expected.items():
            np.testing.assert_allclose(float(got[loss].detach()), value, rtol=1e-4, err_msg=f"{loss} at eps_wta={eps}")


@pytest.mark.parametrize(
    ("eps", "variance"), [(1.0, 2.0), (0.76, 2.0), (0.75, 2.0), (0.74, 2.0), (0.0, 0.0), (0.2, 0.009), (0.2, 0.011)]
)
def test_the_losses_where_a_limit_is(eps, variance, rng):
    """Catches: < for <= at the cutoff of luck, (1 - eps) left out, no floor below Var(G)."""
    agent, w = setup(rng)
    s = signals(eps_wta=eps, return_variance=variance)
    got, expected = agent.losses(w, s)[0], slow_losses(agent, w, s)
    for loss, value in expected.items():
        np.testing.assert_allclose(float(got[loss].detach()), value, rtol=1e-4, atol=1e-7, err_msg=loss)


def test_slots_without_a_transition_do_not_matter(rng):
    """Catches: a mask that is forgotten somewhere: what stands in such a slot is arbitrary."""
    agent, w = setup(rng, train_steps=9)
    other = dataclasses.replace(w, action=torch.where(w.valid, w.action, 2 - w.action), reward=torch.where(w.valid, w.reward, 1.0))
    assert not torch.equal(w.action[2:], other.action[2:])
    for before, after in zip(agent.losses(w, signals())[0].values(), agent.losses(other, signals())[0].values(), strict=True):
        torch.testing.assert_close(before, after)


def test_nothing_breaks_where_nothing_happens(rng):
    """Catches: NaN from a mean over nothing, from Var(G) = 0, from equal policies."""
    agent, w = setup(rng)
    w.valid[:] = False
    metrics = agent.update(w, signals(eps_wta=0.0, return_variance=0.0))
    assert all(x.isfinite() for x in metrics.values())
    assert all(x.isfinite().all() for x in agent.state_dict().values())


# ------------------------------------------------------------------------------------------------------- what learns from what


def trained_by(agent, loss):
    """Names of the network's parts, and log T, that a loss has a gradient for."""
    named = {**dict(agent.net.named_parameters()), "log_temperature": agent.log_temperature}
    gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {name.split(".")[0] for name, g in zip(named, gradients, strict=True) if g is not None and g.abs().max() > 0}


@pytest.mark.parametrize(
    ("overrides", "eps", "dae"),
    [
        ({}, 0.4, {"adv", "value", "luck", "next_action"}),
        ({}, 0.9, {"adv", "value"}),
        ({"corrections": "skill"}, 0.4, {"adv", "value"}),
        ({"corrections": "none"}, 0.4, {"adv", "value"}),
        ({"outcome_prior": "joint"}, 0.4, {"adv", "value", "luck", "next_action"}),
        ({"general": True}, 0.4, {"adv", "value", "luck", "next_action"}),
    ],
)
def test_gradients_go_where_they_should(overrides, eps, dae, rng):
    """Catches: a prior that is bent by the DAE loss, a temperature that moves the advantages, luck that learns before it counts, a
    backbone cut off from the dynamics model, and a target that is learned from."""
    agent, w = setup(rng, **overrides)
    factorised = not overrides.get("general") and overrides.get("outcome_prior") != "joint"
    losses, _ = agent.losses(w, signals(eps_wta=eps))
    assert trained_by(agent, losses["dae"]) == TRUNK | dae
    assert trained_by(agent, losses["prior"]) == TRUNK | {"prior", "next_action"} | ({"next_reward"} if factorised else set())
    assert trained_by(agent, losses["rec"]) == TRUNK | {"prediction", "next_action"}
    assert trained_by(agent, losses["temperature"]) == {"log_temperature"}
    assert not any(p.requires_grad for p in (*agent.ema.parameters(), agent.ema_temperature))


@pytest.mark.parametrize("burn_in_grad", [False, True])
def test_the_burn_in_gets_no_gradient(burn_in_grad, rng):
    """Catches: a burn-in that is one slot short or long, a gradient through it or through the slow network's last observation."""
    agent, w = setup(rng, burn_in_grad=burn_in_grad, burn_in_steps=3)
    w.inputs.reset[:] = False
    w.valid[:] = True
    w.inputs.obs["obs"].requires_grad_()
    w.core_in.requires_grad_()
    losses, _ = agent.losses(w, signals())
    for name in ("dae", "prior", "rec"):
        by_obs, by_core = torch.autograd.grad(losses[name], (w.inputs.obs["obs"], w.core_in), retain_graph=True, allow_unused=True)
        felt = by_obs.abs().flatten(1).amax(-1) > 0
        assert felt.tolist() == [burn_in_grad] * 3 + [True] * 3 + [False], name
        assert (by_core is not None and bool(by_core.abs().max() > 0)) == burn_in_grad


def test_an_update_follows_the_sum_of_the_losses_by_adam(rng):
    """Catches: decays of Adam swapped, a wrong epsilon, weight decay, the learning rate of the step before, a lost loss, gradients
    that add up over updates. Two steps by hand.
    """
    agent, w = setup(rng, adam_eps=1e-3, adam_beta1=0.8, adam_beta2=0.6)
    parameters = [*agent.net.parameters(), agent.log_temperature]
    expected = [p.detach().double().clone() for p in parameters]
    m, v = [0.0] * len(parameters), [0.0] * len(parameters)
    for step, learning_rate in enumerate((1e-2, 3e-3), start=1):
        s = signals(learning_rate=learning_rate)
        gradients = torch.autograd.grad(sum(agent.losses(w, s)[0].values()), parameters)
        for i, g in enumerate(gradients):
            g = g.double()
            m[i], v[i] = 0.8 * m[i] + 0.2 * g, 0.6 * v[i] + 0.4 * g**2
            expected[i] -= learning_rate * (m[i] / (1 - 0.8**step)) / ((v[i] / (1 - 0.6**step)).sqrt() + 1e-3)
        agent.update(w, s)
        for p, e in zip(parameters, expected, strict=True):
            torch.testing.assert_close(p.detach().double(), e, rtol=1e-5, atol=1e-6)


def test_the_temperature_may_learn_at_a_rate_of_its_own(rng):
    """Catches: a multiplier that does nothing, or that reaches the weights as well."""
    agent, w = setup(rng)
    quick = tiny_agent(tiny_config(temperature_lr_multiplier=10.0))
    start = agent.log_temperature.item()
    agent.update(w, signals())
    quick.update(w, signals())
    for one, other in zip(agent.net.parameters(), quick.net.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    moved, moved_quickly = agent.log_temperature.item() - start, quick.log_temperature.item() - start
    assert abs(moved) == pytest.approx(1e-3, rel=1e-3)
    assert moved_quickly == pytest.approx(10 * moved, rel=1e-3)


def test_the_slow_network_follows(rng):
    """Catches: the decay swapped, an EMA of the weights before the step, of log T in place of T, and parameters left out."""
    agent, w = setup(rng, ema_decay=0.9)
    before = copy.deepcopy(agent.ema)
    temperature = agent.ema_temperature.item()
    agent.update(w, signals(learning_rate=0.1))
    for old, new, fast in zip(before.parameters(), agent.ema.parameters(), agent.net.parameters(), strict=True):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * fast)
        assert not torch.equal(new, old)
    assert agent.ema_temperature.item() == pytest.approx(0.9 * temperature + 0.1 * np.exp(agent.log_temperature.item()), rel=1e-6)


def test_the_slow_network_starts_as_the_fast_one():
    """l.2-3: theta_EMA = theta, T = T_EMA = 1. Catches: a second initialisation."""
    agent = tiny_agent(stir=False)
    for one, other in zip(agent.net.parameters(), agent.ema.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    assert (agent.log_temperature.item(), agent.ema_temperature.item()) == (0.0, 1.0)


def test_the_temperature_stays_in_its_range(rng):
    """Catches: T = 0 or infinite after an unlucky step."""
    agent, w = setup(rng)
    for start, limit in zip((-11.9, 2.9), LOG_TEMPERATURE_RANGE, strict=True):
        with torch.no_grad():
            agent.log_temperature.fill_(start)
        for _ in range(4):
            agent.update(w, signals(learning_rate=1.0))
            assert LOG_TEMPERATURE_RANGE[0] <= agent.log_temperature.item() <= LOG_TEMPERATURE_RANGE[1], limit


def test_the_temperature_finds_its_place(rng):
    """d L_T / d log T = 1 - beta_KL / T (E_pi[A] - E_target[A]). Catches: KL the wrong way round, and half of its gradient."""
    agent, w = setup(rng)
    losses, parts = agent.losses(w, signals())
    (got,) = torch.autograd.grad(losses["temperature"], agent.log_temperature)
    online, _ = raw_outputs(agent, w)
    terms = []
    for b in range(w.action.shape[1]):
        for t in range(2, 5):
            if w.valid[t, b]:
                a, temperature = online[t]["adv"][b], np.exp(agent.log_temperature.item())
                terms.append((softmax(a / temperature) - parts["policy"][t - 2, b].double().numpy()) @ a / temperature)
    assert got.item() == pytest.approx(1 - 20 * np.mean(terms), rel=1e-4)


# ------------------------------------------------------------------------------------------------------------------ switches


def with_the_same_weights(agent, cfg, reward_classes=REWARD_CLASSES):
    """An agent of another configuration, with the weights of the first wherever their shapes agree."""
    made = tiny_agent(cfg, reward_classes=reward_classes)
    for theirs, ours in ((agent.net, made.net), (agent.ema, made.ema)):
        state = theirs.state_dict()
        ours.load_state_dict({name: state[name] if state.get(name) is not None and state[name].shape == x.shape else x
                              for name, x in ours.state_dict().items()})  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"corrections": "skill"}, {"dae"}),
        ({"corrections": "none"}, {"dae"}),
        ({"dae_starts": "first"}, {"dae"}),
        ({"luck_from_eps_wta": 0.1}, {"dae"}),
        ({"variance_floor": 5.0}, {"dae"}),
        ({"discount": 0.5}, {"dae"}),
        ({"luck_form": "additive"}, {"dae"}),
        ({"outcome_prior": "joint"}, {"dae", "prior"}),
        ({"beta_prior": 1.0}, {"prior"}),
        ({"beta_rec": 2.0}, {"rec"}),
        ({"beta_kl": 1.0}, {"temperature"}),
        ({"num_outcomes": 3}, {"dae", "prior", "rec"}),
        ({"stored_states": False}, {"dae", "prior", "rec", "temperature"}),
        ({"core": "mlp"}, {"dae", "prior", "rec", "temperature"}),
        ({"burn_in_grad": True}, set()),
        ({"beta_reward": 5.0}, set()),
        ({"backup_steps": 1, "train_steps": 3}, {"dae"}),
    ],
)
def test_a_switch_changes_what_it_says_and_nothing_else(change, changed, rng):
    agent, w = setup(rng)
    w.inputs.reset[:3] = False  # so that the state at the beginning reaches the trained slots
    other = with_the_same_weights(agent, tiny_config(**change))
    window = dataclasses.replace(w, core_in=w.core_in[:, :0]) if change.get("core") == "mlp" else w
    one, two = agent.losses(w, signals())[0], other.losses(window, signals())[0]
    assert {name for name in one if not torch.isclose(one[name], two[name], rtol=1e-5)} == changed


@pytest.mark.parametrize("behaviour", ["recurrent", "aligned"])
def test_states_from_zero_are_states_of_zero(behaviour, rng):
    """Catches: `stored_states` ignored, and a `behaviour` that changes learning."""
    agent, w = setup(rng)
    other = with_the_same_weights(agent, tiny_config(stored_states=False, behaviour=behaviour))
    zeros = dataclasses.replace(w, core_in=torch.zeros_like(w.core_in))
    for one, two in zip(agent.losses(zeros, signals())[0].values(), other.losses(w, signals())[0].values(), strict=True):
        torch.testing.assert_close(one, two)


def test_the_mlp_core_has_no_memory_to_burn_in(rng):
    """Catches: a frame-stacking agent that sees more than its stack and the last action and reward."""
    agent, w = setup(rng, core="mlp")
    other = dataclasses.replace(w, inputs=dataclasses.replace(w.inputs, obs={"obs": w.inputs.obs["obs"].clone()}))
    other.inputs.obs["obs"][:2] += 1
    for one, two in zip(agent.losses(w, signals())[0].values(), agent.losses(other, signals())[0].values(), strict=True):
        assert torch.equal(one, two)


def test_general_rewards_are_told_by_the_outcome(rng):
    """Catches: a reward that does not enter the distance, or not in units of the scale."""
    agent, w = setup(rng, general=True)
    _, parts = agent.losses(w, signals(reward_scale=0.01))
    online, _ = raw_outputs(agent, w)
    for t in range(2, 5):
        for b in range(w.action.shape[1]):  # with such a scale the reward decides alone
            nearest = np.abs(online[t]["predicted_reward"][b] - float(w.reward[t, b]) / 0.01).argmin()
            assert parts["posterior_o"][t - 2, b].argmax() == nearest


# -------------------------------------------------------------------------------------------------------------------- acting


def stream(agent, steps, envs, rng, p_reset=0.2):
    """Inputs of environments that start together, and may start again."""
    reset = torch.from_numpy(rng.random((steps, envs)) < p_reset)
    reset[0] = True
    obs = {"obs": torch.from_numpy(rng.normal(size=(steps, envs, 2, 3)).astype(np.float32))}
    reward = torch.from_numpy(rng.integers(-1, 2, (steps, envs)).astype(np.float32))
    return Inputs(obs, torch.from_numpy(rng.integers(0, 3, (steps, envs))), reward, reset)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_aligned_actor_knows_what_the_learner_knows(k, rng):
    """Catches: an actor that remembers more or less than k + 1 observations, or across an episode's beginning."""
    agent = tiny_agent(tiny_config(behaviour="aligned", stored_states=False, burn_in_steps=k))
    inputs, state, opened = stream(agent, 12, 4, rng), agent.initial_state(4), np.zeros(4, int)
    for t in range(12):
        features, state = agent.features(inputs[t : t + 1], state)
        for e in range(4):
            opened[e] = t if inputs.reset[t, e] else opened[e]
            seen = inputs[max(t - k, opened[e]) : t + 1]
            alone = Inputs(
                {"obs": seen.obs["obs"][:, e : e + 1]}, seen.prev_action[:, e : e + 1], seen.prev_reward[:, e : e + 1],
                seen.reset[:, e : e + 1],
            )  # fmt: skip
            with torch.no_grad():
                expected = agent.net.trunk(alone, torch.zeros(1, agent.net.state_dim)).features[-1, 0]
            torch.testing.assert_close(features[e], expected)


def test_the_recurrent_actor_knows_its_whole_episode(rng):
    agent = tiny_agent()
    inputs, state = stream(agent, 12, 4, rng), agent.initial_state(4)
    with torch.no_grad():
        whole = agent.net.trunk(inputs, torch.zeros(4, agent.net.state_dim))
    for t in range(12):
        features, state = agent.features(inputs[t : t + 1], state)
        torch.testing.assert_close(features, whole.features[t])
    torch.testing.assert_close(state.core, whole.core)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy(epsilon, rng):
    """Catches: 1 - epsilon for epsilon, random actions that spare the greedy one, the same coin for all, argmin."""
    agent, envs = tiny_agent(), 20_000
    row = stream(agent, 1, 1, rng)
    inputs = Inputs(
        {"obs": row.obs["obs"].expand(1, envs, 2, 3)}, *(x.expand(1, envs) for x in (row.prev_action, row.prev_reward, row.reset))
    )
    action, _ = agent.act(inputs, agent.initial_state(envs), epsilon, rng)
    with torch.no_grad():
        best = int(agent.net.raw_adv(agent.net.trunk(row, torch.zeros(1, 16)).features)[0, 0].argmax())
    share = np.bincount(action, minlength=3) / envs
    expected = np.full(3, epsilon / 3)
    expected[best] += 1 - epsilon
    np.testing.assert_allclose(share, expected, atol=5 * np.sqrt(0.25 / envs) if epsilon else 0)
    assert action.dtype == np.int64


def test_acting_is_by_the_online_weights(rng):
    """Catches: an actor that follows the slow network (evaluation is of the fast one, too)."""
    agent = tiny_agent()
    inputs = stream(agent, 1, 50, rng)
    before, _ = agent.act(inputs, agent.initial_state(50), 0.0, rng)
    with torch.no_grad():
        for p in agent.ema.parameters():
            p.normal_()
    assert (agent.act(inputs, agent.initial_state(50), 0.0, rng)[0] == before).all()
    with torch.no_grad():
        agent.net.adv[-1].bias.copy_(torch.tensor([0.0, 0.0, 100.0]))
    assert (agent.act(inputs, agent.initial_state(50), 0.0, rng)[0] == 2).all()


def test_an_unroll_from_the_stored_states_takes_the_same_actions(rng):
    """Catches: states of the wrong step: a greedy actor, replayed, must choose what it chose."""
    made = collected("list", 60, epsilon=0.0)
    w = made.replay.sample(rng, 100, 5)
    with torch.no_grad():
        chosen = made.agent.net.raw_adv(made.agent.net.trunk(w.inputs, w.core_in).features).argmax(-1)[:-1]
    assert torch.equal(chosen[w.valid], w.action[w.valid])
    assert len(w.action[w.valid].unique()) > 1


# --------------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("updates", [0, 3])
def test_saved_and_loaded_it_goes_on_bit_for_bit(updates, rng):
    """Catches: anything that `update` reads and `state_dict` forgets."""
    cfg = tiny_config()
    windows = [random_window(cfg, rng) for _ in range(2 * updates + 2)]
    straight, stopped, resumed = tiny_agent(cfg), tiny_agent(cfg), tiny_agent(cfg, seed=9)
    for i, w in enumerate(windows):
        if i == updates:
            resumed.load_state_dict({name: x.clone() for name, x in stopped.state_dict().items()})
        straight.update(w, signals(learning_rate=0.01 / (i + 1)))
        (resumed if i >= updates else stopped).update(w, signals(learning_rate=0.01 / (i + 1)))
    one, two = straight.state_dict(), resumed.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_loading_weights_leaves_the_rest(rng):
    """Catches: `train --from` that takes the other run's temperature or moments with it."""
    agent, w = setup(rng)
    agent.update(w, signals())
    other = tiny_agent(seed=4)
    with torch.no_grad():
        other.log_temperature.fill_(-2.0)
    other.load_weights(agent.state_dict())
    for one, two in zip(
        (*agent.net.parameters(), *agent.ema.parameters()), (*other.net.parameters(), *other.ema.parameters()), strict=True
    ):
        assert torch.equal(one, two)
    assert other.log_temperature.item() == -2.0
    assert not other.optimizer.state_dict()["state"]


def test_loading_refuses_another_network():
    agent, other = tiny_agent(), tiny_agent(tiny_config(core_dim=16))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(agent.state_dict())


# ------------------------------------------------------------------------------------------------------------------- metrics


def test_the_health_numbers(rng):
    """Catches: an entropy over the wrong axis, a mean over slots that hold nothing."""
    agent, w = setup(rng)
    s = signals()
    losses, parts = agent.losses(w, s)
    metrics = {name: x.item() for name, x in agent.update(w, s).items()}
    valid = w.valid[2:]
    p = parts["log_prior"].detach().exp().unflatten(-1, (4, 3))[valid]
    q, kl, luck, adv = (parts[name].detach()[valid] for name in ("posterior_o", "kl", "luck", "adv"))

    def entropy(x):
        return -(x * x.log()).sum(-1).mean().item()

    expected = {
        "dae/prior_entropy": entropy(p.sum(-1)),
        "dae/reward_entropy": entropy(p.sum(-2)),
        "dae/policy_entropy": entropy(parts["policy"][valid]),
        "dae/largest_outcome_share": q.mean(0).max().item(),
        "dae/live_outcomes": np.exp(entropy(q.mean(0))),
        "dae/luck_mean": luck.mean().item(),
        "dae/luck_size": luck.square().mean().sqrt().item(),
        "dae/adv_size": adv.square().mean().sqrt().item(),
        "dae/kl": kl.mean().item(),
        "dae/temperature": float(np.exp(agent.log_temperature.item())),
        "dae/eps_wta": 0.4,
        "dae/beta_v": 0.6 / 2,
        "train/learning_rate": 1e-3,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name
    for name, loss in losses.items():
        assert metrics[f"train/loss_{name}"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_agent_is_what_the_configuration_says():
    """Catches: options of LearningConfig and ActingConfig that reach nobody."""
    cfg = tiny_config(adam_beta1=0.5, adam_beta2=0.6, adam_eps=0.1, behaviour="aligned", stored_states=False, train_steps=6)
    agent = tiny_agent(cfg)
    assert isinstance(agent, Agent)
    group = agent.optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 0.1, 0)
    assert agent.train_steps == 6
    assert agent.initial_state(2).embeddings.shape == (2, 2, 8)
