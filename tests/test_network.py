"""The network: the paper's sizes, and what each part sees."""

import dataclasses

import pytest
import torch

from conftest import REWARD_CLASSES, VECTOR, tiny_agent, tiny_config
from dae.config import Config
from dae.encoders import ObsPart
from dae.network import Inputs, Network, Sizes, make_sizes

ATARI = {"obs": ObsPart((1, 84, 84), torch.uint8, 1 / 255)}


def paper_network(num_actions=18, **overrides):
    """Of the paper's size, without the memory for it."""
    cfg = Config().override(**overrides)
    sizes = make_sizes(
        cfg.network, num_actions, REWARD_CLASSES, frame_stack=cfg.environment.frame_stack, num_outcomes=cfg.objective.num_outcomes,
        outcome_prior=cfg.objective.outcome_prior, luck_form=cfg.objective.luck_form,
    )  # fmt: skip
    with torch.device("meta"):
        return Network(ATARI, sizes)


def features_and_actions(network, t=2, b=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(t, b, network.sizes.embedding_dim, generator=generator)
    return features, torch.randint(0, network.sizes.num_actions, (t, b), generator=generator)


def random_inputs(t=4, b=3, stack=2):
    generator = torch.Generator().manual_seed(0)
    return Inputs(
        {"obs": torch.randn(t, b, stack, 3, generator=generator)}, torch.randint(0, 3, (t, b), generator=generator),
        torch.randint(-1, 2, (t, b), generator=generator).float(), torch.rand(t, b, generator=generator) < 0.3,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- sizes (the paper's table)


@pytest.mark.parametrize(("width", "encoder"), [(1, 2_080_720), (2, 4_354_464), (4, 9_482_560), (8, 22_061_184)])
def test_encoder_sizes(width, encoder):
    """Table "Number of parameters": 2 / 4 / 9 / 22 million, and nothing else grows with m."""
    rows = paper_network(width=width).component_sizes()
    assert rows["encoder"] == encoder
    assert rows | {"encoder": 0} == paper_network(width=1).component_sizes() | {"encoder": 0}


@pytest.mark.parametrize("num_actions", [4, 6, 9, 18])
def test_the_other_sizes(num_actions):
    """LSTM 3, transition model 21, value heads 4 million, typed out by layers."""

    def head(inputs, hidden, outputs):
        return inputs * hidden + hidden + 2 * hidden + hidden * outputs + outputs

    network = paper_network(num_actions)
    rows = network.component_sizes()
    d, h = 512, 1024
    assert rows["core"] == 4 * h * d + 4 * h + 4 * h * h // 16 + h * d + 2 * d == 2_888_704
    assert rows["transition model"] == head(2 * d, 2048, 16 * 512) + head(2 * d, 1024, 16) + head(2 * d, 1024, 3)
    assert rows["value heads"] == head(d, 2048, num_actions) + head(d, 2048, 1) + head(2 * d, 2048, 16 * 3)
    assert 21.01e6 < rows["transition model"] + network.next_action.weight.numel() < 21.04e6
    assert 4.32e6 < rows["value heads"] + network.next_action.weight.numel() < 4.36e6
    assert rows["action and reward embeddings"] == (num_actions + 1 + 4 + num_actions) * d
    assert sum(rows.values()) == sum(p.numel() for p in network.parameters())


def test_the_mlp_core_has_as_many_parameters():
    """The frame-stacking ablation: 2816 hidden units."""
    network = paper_network(core="mlp", burn_in_steps=0)
    assert network.core.mlp[0].out_features == 2816
    assert abs(network.component_sizes()["core"] / 2_888_704 - 1) < 0.005
    assert network.state_dim == 0


def test_every_size_of_the_configuration_is_used():
    """Catches: an option of the network that nothing reads."""
    plain = paper_network()
    sizes = {f.name for f in dataclasses.fields(Sizes)}
    assert sizes == {f.name for f in dataclasses.fields(Config().network)} - {"channels"} | {
        "num_actions", "reward_classes", "frame_stack", "num_outcomes", "outcome_prior", "luck_form"
    }  # fmt: skip
    changes = {
        "width": 2.0, "encoder": "cnn", "skipinit": True, "embedding_dim": 256, "core": "mlp", "core_dim": 512, "core_blocks": 8,
        "value_hidden": 64, "prediction_hidden": 64, "prior_hidden": 64, "frame_stack": 1, "num_outcomes": 4,
        "outcome_prior": "joint", "luck_form": "additive",
    }  # fmt: skip
    for name, value in changes.items():
        other = paper_network(**{name: value})
        shapes = [{n: p.shape for n, p in net.named_parameters()} for net in (plain, other)]
        assert shapes[0] != shapes[1], f"{name} changed nothing"


# ------------------------------------------------------------------------------------------------------------------- trunk


@pytest.mark.parametrize("core", ["lstm", "mlp"])
def test_step_equals_unroll(core):
    """Catches: two ways through the network. Acting sees one slot at a time, learning a whole window."""
    network, inputs = tiny_agent(tiny_config(core=core)).net, random_inputs()
    state = torch.randn(3, network.state_dim)
    whole = network.trunk(inputs, state)
    for t in range(4):
        one = network.trunk(inputs[t : t + 1], state)
        state = one.core
        torch.testing.assert_close(one.features[0], whole.features[t])
        torch.testing.assert_close(one.embedding[0], whole.embedding[t])
    torch.testing.assert_close(state, whole.core)


def test_the_lstm_core_remembers_and_the_mlp_core_does_not():
    inputs = dataclasses.replace(random_inputs(), reset=torch.zeros(4, 3, dtype=torch.bool))
    other = dataclasses.replace(inputs, obs={"obs": inputs.obs["obs"].clone()})
    other.obs["obs"][0] += 1
    for core, remembers in (("lstm", True), ("mlp", False)):
        network = tiny_agent(tiny_config(core=core)).net
        state = torch.zeros(3, network.state_dim)
        one, two = network.trunk(inputs, state).features[-1], network.trunk(other, state).features[-1]
        assert torch.equal(one, two) != remembers


def test_the_residual_runs_around_lstm_and_projection():
    """y = LN(e + W_p h): catches a norm inside, or a skip that starts behind the LSTM."""
    network, inputs = tiny_agent().net, random_inputs()
    state = torch.randn(3, network.state_dim)
    trunk = network.trunk(inputs, state)
    e = network.embed(trunk.embedding, inputs)
    h, after = network.core.lstm(e, inputs.reset, state)
    torch.testing.assert_close(trunk.features, network.core.norm(e + h @ network.core.project.weight.T))
    torch.testing.assert_close(trunk.core, after)


def test_embedding_of_the_action_and_the_reward_before():
    """Catches: the wrong row, `none` forgotten at a reset or on one of the two only, a shared table."""
    network, inputs = tiny_agent().net, random_inputs()
    x = torch.randn(4, 3, 8)
    e = network.embed(x, inputs)
    for t in range(4):
        for b in range(3):
            action, reward = int(inputs.prev_action[t, b]), REWARD_CLASSES.index(float(inputs.prev_reward[t, b]))
            if inputs.reset[t, b]:
                action, reward = 3, 3
            expected = x[t, b] + network.prev_action.weight[action] + network.prev_reward.weight[reward]
            torch.testing.assert_close(e[t, b], expected)
    assert inputs.reset.any()
    assert not inputs.reset.all()
    assert network.prev_action.weight.shape == (4, 8)
    assert network.prev_reward.weight.shape == (4, 8)


def test_general_rewards_enter_by_a_linear_layer():
    """Catches: large rewards that are not squashed, and one that is read at a reset."""
    network, inputs = tiny_agent(tiny_config(rewards="general"), reward_classes=()).net, random_inputs()
    inputs.prev_reward[:] = torch.tensor([-1000.0, 0.5, 20.0])
    e = network.embed(torch.zeros(4, 3, 8), inputs)
    for t in range(4):
        for b, squashed in enumerate((-6.90875, 0.405465, 3.044522)):
            reset = bool(inputs.reset[t, b])
            of_action = network.prev_action.weight[3 if reset else int(inputs.prev_action[t, b])]
            of_reward = network.prev_reward.bias + network.prev_reward.weight[:, 0] * (0 if reset else squashed)
            torch.testing.assert_close(e[t, b], of_action + of_reward, rtol=1e-4, atol=1e-4)


def test_reward_classes_in_any_order():
    """Catches: classes that are sorted on the way, or found by rounding."""
    network = tiny_agent(reward_classes=(0.0, 5.0, -0.5)).net
    assert network.reward_class(torch.tensor([[0.0, 5.0, -0.5, 4.9999995, -0.50000001]])).tolist() == [[0, 1, 2, 1, 2]]


def test_the_embedding_of_the_observation_knows_no_action():
    """x_t is what predictions are compared with: catches an embedding that has the action or the reward in it."""
    network, inputs = tiny_agent().net, random_inputs()
    other = dataclasses.replace(inputs, prev_action=(inputs.prev_action + 1) % 3, prev_reward=-inputs.prev_reward)
    state = torch.zeros(3, network.state_dim)
    one, two = network.trunk(inputs, state), network.trunk(other, state)
    assert torch.equal(one.embedding, two.embedding)
    torch.testing.assert_close(one.embedding.square().mean(-1), torch.ones(4, 3), rtol=1e-3, atol=1e-3)
    assert not torch.isclose(one.features, two.features).all()


# ------------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("outcome_prior", ["factorised", "joint"])
@pytest.mark.parametrize("classes", [REWARD_CLASSES, (), (0.0,)])
def test_the_prior_is_a_distribution(outcome_prior, classes):
    """Catches: a softmax over the wrong axis."""
    rewards = "classes" if classes else "general"
    network = tiny_agent(tiny_config(outcome_prior=outcome_prior, rewards=rewards), reward_classes=classes).net
    out = network.outcomes(*features_and_actions(network))
    assert out.log_prior.shape == out.raw_luck.shape == (2, 3, 4 * max(1, len(classes)))
    torch.testing.assert_close(out.log_prior.exp().sum(-1), torch.ones(2, 3))
    assert (out.predicted_reward is None) == bool(classes)


def test_outcomes_lie_as_observation_by_reward():
    """z = o * |R| + c, for the factorised prior and for additive luck: catches the two swapped."""
    network = tiny_agent(tiny_config(luck_form="additive")).net
    features, action = features_and_actions(network)
    out = network.outcomes(features, action)
    ha = torch.cat([features, network.next_action.weight[action]], -1)
    prior, reward, luck = network.prior(ha).log_softmax(-1), network.next_reward(ha).log_softmax(-1), network.luck(ha)
    assert luck.shape[-1] == 4 + 3
    for o in range(4):
        for c in range(3):
            torch.testing.assert_close(out.log_prior[..., o * 3 + c], prior[..., o] + reward[..., c])
            torch.testing.assert_close(out.raw_luck[..., o * 3 + c], luck[..., o] + luck[..., 4 + c])


def test_the_action_taken_conditions_luck_and_dynamics():
    """Catches: heads that don't see a_t, or see it through the table of the action before."""
    network = tiny_agent().net
    features, action = features_and_actions(network)
    one, two = network.outcomes(features, action), network.outcomes(features, (action + 1) % 3)
    for name in ("prediction", "log_prior", "raw_luck"):
        assert not torch.isclose(getattr(one, name), getattr(two, name)).all(), name
    with torch.no_grad():
        network.prev_action.weight.add_(1)
    again = network.outcomes(features, action)
    assert torch.equal(again.raw_luck, one.raw_luck)
    assert torch.equal(again.prediction, one.prediction)


def test_predictions_are_normalised_like_their_targets():
    """Catches: `normalise_predictions` that does nothing, or a norm that mixes predictions."""
    for general in (False, True):
        cfg = tiny_config(rewards="general" if general else "classes")
        classes = () if general else REWARD_CLASSES
        network = tiny_agent(cfg, reward_classes=classes).net
        raw = tiny_agent(cfg.override(normalise_predictions=False), reward_classes=classes).net
        one, two = network.outcomes(*features_and_actions(network)), raw.outcomes(*features_and_actions(raw))
        torch.testing.assert_close(one.prediction.square().mean(-1), torch.ones(2, 3, 4), rtol=1e-3, atol=1e-3)
        scale = two.prediction.square().mean(-1, keepdim=True).sqrt()
        assert not torch.isclose(scale, torch.ones(())).any()
        torch.testing.assert_close(one.prediction, two.prediction / scale, rtol=1e-3, atol=1e-3)
        assert one.prediction.shape[-1] == 8
        if general:
            torch.testing.assert_close(one.predicted_reward, two.predicted_reward)


def test_predictions_differ_from_the_start():
    """With eps_WTA = 1 all are drawn to the same mean: only the initialisation tells them apart (algorithm.md, trap 26)."""
    network = tiny_agent(stir=False).net
    prediction = network.outcomes(*features_and_actions(network)).prediction
    for z in range(4):
        for other in range(z):
            assert (prediction[:, :, z] - prediction[:, :, other]).square().mean(-1).min() > 0.1
    winners = (prediction - torch.randn(2, 3, 1, 8)).square().sum(-1).argmin(-1)
    assert len(winners.unique()) > 1


def test_advantage_and_luck_begin_small():
    """Catches: last layers of full size, whose noise the value would have to undo first."""
    network = tiny_agent(tiny_config(value_hidden=64, embedding_dim=32, core_dim=32), stir=False).net
    features, action = features_and_actions(network, 10, 10)
    value = network.state_value(features).std()
    assert network.raw_adv(features).std() < 0.5 * value
    assert network.outcomes(features, action).raw_luck.std() < 0.5 * value


def test_the_seed_makes_the_network_and_nothing_else():
    """Catches: weights that depend on what was drawn before, or a global generator that is moved on."""
    torch.manual_seed(5)
    one = tiny_agent(seed=1, stir=False).net
    drawn = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(()))
    torch.rand(7)
    for a, b in zip(one.parameters(), tiny_agent(seed=1, stir=False).net.parameters(), strict=True):
        assert torch.equal(a, b)
    different = tiny_agent(seed=2, stir=False).net
    assert not torch.equal(one.next_action.weight, different.next_action.weight)


def test_dicts_pass_through_the_trunk():
    """Catches: a part that is flattened together with another's axes."""
    spec = {"where": VECTOR["obs"], "look": ObsPart((2, 5, 6), torch.uint8, 1 / 255)}
    network = tiny_agent(spec=spec).net
    look = torch.randint(0, 256, (4, 3, 2, 2, 5, 6), dtype=torch.uint8)
    inputs = dataclasses.replace(random_inputs(), obs={"where": torch.randn(4, 3, 2, 3), "look": look})
    trunk = network.trunk(inputs, torch.zeros(3, network.state_dim))
    alone = network.encoder({name: o[2, 1][None] for name, o in inputs.obs.items()})
    torch.testing.assert_close(trunk.embedding[2, 1], alone[0])
