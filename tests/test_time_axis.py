"""The whole way of an observation: environment, collector, actor, replay, window, unroll. Off-by-one mistakes live here."""

import numpy as np
import pytest
import torch

from conftest import MODES, REWARD_CLASSES, VECTOR, Counter, collected, tiny_agent, tiny_config
from dae.collect import Collector
from dae.envs.gymnasium import EnvList
from dae.network import Inputs
from dae.replay import Replay


def by_hand(agent, counter, frame_stack):
    """Every feature of that environment's episodes, from its own diary, one slot at a time: no collector, no replay, no window."""
    features = {}
    for episode in range(counter.episode + 1):
        steps = [h for h in counter.diary if h.episode == episode]
        frames = [np.zeros(3, np.float32)] * frame_stack
        core, before = torch.full((1, agent.net.state_dim), 7.0), None
        for t in range(len(steps) + 1):
            frames = [*frames[1:], np.array([counter.number, episode, t], np.float32)]
            inputs = Inputs(
                {"obs": torch.from_numpy(np.stack(frames))[None, None]},
                torch.tensor([[before.action if before else 2]]),
                torch.tensor([[before.reward if before else -1.0]]),
                torch.tensor([[t == 0]]),
            )
            with torch.no_grad():
                trunk = agent.net.trunk(inputs, core)
            features[counter.number, episode, t], core = trunk.features[0, 0], trunk.core
            before = steps[t] if t < len(steps) else None
    return features


@pytest.mark.parametrize("frame_stack", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_window_replays_exactly_what_the_actor_saw(mode, frame_stack, rng):
    """Catches: state stored after o_t, shifted action or reward, a wrong frame stack, a wrong ring slot, a window across the head.

    Also the last observations, which a SAME_STEP actor never sees, are as they would have been had it gone on.
    """
    made = collected(mode, 70, cfg=tiny_config(frame_stack=frame_stack), slots=31)  # the ring turns twice
    truth = {place: row for counter in made.counters for place, row in by_hand(made.agent, counter, frame_stack).items()}
    for place, row in made.seen.items():
        torch.testing.assert_close(row, truth[place], rtol=1e-5, atol=1e-5, msg=lambda m, place=place: f"the actor at {place}: {m}")
    assert {place[0] for place in made.seen} == {0, 1, 2}

    window = made.replay.sample(rng, 300, 6)
    with torch.no_grad():
        features = made.agent.net.trunk(window.inputs, window.core_in).features
    places = window.inputs.obs["obs"][:, :, -1].long()
    expected = torch.stack([torch.stack([truth[tuple(p.tolist())] for p in row]) for row in places])
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)
    # The windows above were worth looking at: all that can go wrong in one did occur.
    steps = places[1:] - places[:-1]
    assert ((steps[..., 1] == 1) == window.inputs.reset[1:]).all()
    assert ((steps[..., 2] == 1) | window.inputs.reset[1:]).all()
    assert window.terminal.any() and (~window.valid[:-1] & ~window.terminal.roll(1, 0)[:-1])[1:].any(), "both kinds of ends"
    assert (~window.valid[0]).any() and window.inputs.reset[0].any(), "windows that start at an end and at a beginning"


def test_a_window_knows_the_action_and_reward_before_its_first_slot(rng):
    """Catches: a window whose first slot has nothing before it, or what the write head left there."""
    made = collected("list", 70, slots=31)
    window = made.replay.sample(rng, 200, 2)
    diary = {(c.number, h.episode, h.t): h for c in made.counters for h in c.diary}
    inside = ~window.inputs.reset[0]
    for b in torch.nonzero(inside).flatten().tolist():
        number, episode, t = (int(x) for x in window.inputs.obs["obs"][0, b, -1])
        happened = diary[number, episode, t - 1]
        assert (int(window.inputs.prev_action[0, b]), float(window.inputs.prev_reward[0, b])) == (happened.action, happened.reward)
    assert inside.sum() > 50


# ----------------------------------------------------------------------------------------------- the twin: nothing leaks over


def random_inputs(agent, length, rng, reset_at, frame_stack=2):
    """Of two environments, the first of which opens an episode at `reset_at`; and a state before them."""
    reset = torch.zeros(length, 2, dtype=torch.bool)
    reset[reset_at, 0] = True
    obs = torch.from_numpy(rng.normal(size=(length, 2, frame_stack, 3)).astype(np.float32))
    action = torch.from_numpy(rng.integers(0, 3, (length, 2)))
    reward = torch.from_numpy(rng.integers(-1, 2, (length, 2)).astype(np.float32))
    return Inputs({"obs": obs}, action, reward, reset), torch.from_numpy(
        rng.normal(size=(2, agent.net.state_dim)).astype(np.float32)
    )


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("core", ["lstm", "mlp"])
def test_nothing_leaks_across_a_reset(core, general, rng):
    """The twin of the window test, which can't see a mistake that actor and learner share: a reset that is ignored.

    Exactly equal, not nearly: whatever the state, the action and the reward of the episode before.
    """
    agent = tiny_agent(
        tiny_config(core=core, rewards="general" if general else "classes"), reward_classes=() if general else REWARD_CLASSES
    )
    inputs, state = random_inputs(agent, 6, rng, reset_at=3)
    changed = Inputs(
        {"obs": inputs.obs["obs"].clone()}, inputs.prev_action.clone(), inputs.prev_reward.clone(), inputs.reset
    )  # fmt: skip
    changed.obs["obs"][:3] += 1
    changed.prev_action[:4] = (changed.prev_action[:4] + 1) % 3  # slot 3 itself: the action and reward that led to the reset
    changed.prev_reward[:4] = torch.where(changed.prev_reward[:4] == 1, -1.0, 1.0)
    with torch.no_grad():
        one, other = agent.net.trunk(inputs, state).features, agent.net.trunk(changed, state + 1).features
    assert torch.equal(one[3:, 0], other[3:, 0])
    assert not torch.isclose(one[3, 1], other[3, 1]).any(), "the environment without a reset must notice"
    assert not torch.isclose(one[:3], other[:3]).all()


def test_the_core_forgets_before_the_step_and_not_after(rng):
    """Catches: a state that is wiped once the opening observation has been taken in."""
    agent = tiny_agent()
    inputs, state = random_inputs(agent, 3, rng, reset_at=0)
    opened = agent.net.trunk(inputs[:1], state).core
    assert opened[0].abs().min() > 0, "the opening observation is remembered"
    whole, rest = agent.net.trunk(inputs, state), agent.net.trunk(inputs[1:], opened)
    torch.testing.assert_close(whole.features[1:], rest.features)
    torch.testing.assert_close(whole.core, rest.core)


def test_no_gradient_crosses_a_reset(rng):
    """Catches: a leak that happens to be small. Gradients of what comes after, by what was before, are exactly zero."""
    agent = tiny_agent(tiny_config(rewards="general"), reward_classes=())
    inputs, state = random_inputs(agent, 6, rng, reset_at=3)
    inputs.prev_reward.uniform_(1, 2)
    obs, reward, state = inputs.obs["obs"].requires_grad_(), inputs.prev_reward.requires_grad_(), state.requires_grad_()
    features = agent.net.trunk(inputs, state).features
    by_obs, by_reward, by_state = torch.autograd.grad(features[3:].square().sum(), (obs, reward, state))
    assert by_obs[:3, 0].abs().max() == 0 and by_reward[:4, 0].abs().max() == 0 and by_state[0].abs().max() == 0
    assert by_obs[:3, 1].abs().amin(0).amin() > 0 and by_reward[:4, 1].abs().min() > 0 and by_state[1].abs().min() > 0


class StrangeStart(Counter):
    """Its first episode may show another number and pay the opposite; all later ones are the same."""

    def __init__(self, number, strange):
        super().__init__(number, lengths=(5, 3, 4))
        self.strange = strange

    def observe(self):
        where = super().observe()
        where[0] += 50 * (self.strange and self.episode == 0)
        return where

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, -reward if self.strange and self.episode == 0 else reward, *rest


@pytest.mark.parametrize("behaviour", ["recurrent", "aligned"])
def test_neither_actor_nor_window_knows_the_episode_before(behaviour):
    """Catches: frames, rewards or states of one episode that reach the next, on either of the two ways.

    Two runs that differ in their first episodes alone agree to the last bit in the others.
    """

    def run(strange):
        number = iter(range(3))
        envs = EnvList(lambda: StrangeStart(next(number), strange), 3, np.random.SeedSequence(0))
        agent, seen = tiny_agent(tiny_config(frame_stack=4, behaviour=behaviour, stored_states=behaviour == "recurrent")), []
        replay, plain = Replay(VECTOR, 3, 300, agent.net.state_dim, 4), agent.features

        def features(inputs, state):
            result, after = plain(inputs, state)
            seen.append(result)
            return result, after

        agent.features = features
        collector = Collector(envs, agent, replay, np.random.default_rng(1), REWARD_CLASSES)
        for _ in range(18):
            collector.step(1.0)
        later = replay.obs["obs"][:18, :, 1] >= 1
        window = replay.window(torch.zeros(3, dtype=torch.long), torch.arange(3), 17)
        with torch.no_grad():
            unrolled = agent.net.trunk(window.inputs, window.core_in).features
        return torch.stack(seen)[later], window.inputs.obs["obs"][later], unrolled[later], torch.stack(seen)[~later]

    (*one, strange), (*other, plain) = run(True), run(False)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    assert len(one[0]) > 20 and not torch.isclose(strange, plain).any()
    assert (one[1][:, :-1] == 0).flatten(1).all(1).any(), "an opening stack, whose older frames are zeros, was among them"
