"""The collector: every real transition is stored exactly once, and nothing else; scores and lengths are exact."""

import contextlib
import itertools

import numpy as np
import pytest
import torch

from conftest import MODES, Counter, collected, counters, tiny_agent, tiny_config
from dae.collect import ActingInputs, Collector, FrameStacks
from dae.envs.gymnasium import EnvList
from dae.errors import EnvironmentFault
from dae.evaluate import evaluate
from dae.replay import Replay

VECTOR_STEPS = 60


def expected_slots(counter, steps_seen):
    """What the ring of this environment must hold: each transition of its diary, and behind each episode its last observation."""
    slots = []
    for happened in counter.diary:
        place = (counter.number, happened.episode, happened.t)
        slots.append((place, happened.t == 0, happened.action, happened.reward, happened.terminated, True))
        if happened.terminated or happened.truncated:
            last = (counter.number, happened.episode, happened.t + 1)
            slots.append((last, False, None, 0.0, False, False))
    return slots if steps_seen is None else slots[:steps_seen]


@pytest.mark.parametrize("options", [{}, {"nested": True, "first_action": 5}])
@pytest.mark.parametrize("mode", MODES)
def test_every_transition_is_stored_once_and_no_other(mode, options):
    """Catches: the fake transition of an automatic reset, a last observation that is lost or stored for another environment, a
    terminal where the episode was cut off, an action that lost its offset.
    """
    made = collected(mode, VECTOR_STEPS, **options)
    # NEXT_STEP has one slot for each vector step; elsewhere last observations come on top.
    one_each = mode in ("list", "next_step")
    for counter in made.counters:
        expected = expected_slots(counter, VECTOR_STEPS if one_each else None)
        e, ring = counter.number, made.replay
        assert ring.count[e] == len(expected)
        where = ring.obs["where" if options else "obs"][:, e]
        for i, (place, reset, action, reward, terminal, valid) in enumerate(expected):
            got = (ring.reset[i, e], ring.reward[i, e], ring.terminal[i, e], ring.valid[i, e])
            assert tuple(where[i].int().tolist()) == place
            assert tuple(x.item() for x in got) == (reset, reward, terminal, valid), place
            assert action is None or ring.action[i, e] == action
        if options:
            assert torch.equal(ring.obs["t"][: len(expected), e].argmax(-1), where[: len(expected), 2].long())
    diary = [happened for counter in made.counters for happened in counter.diary]
    assert made.collector.agent_steps == len(diary) == int(made.replay.valid.sum())
    assert {(h.terminated, h.truncated) for h in diary} == {(False, False), (True, False), (False, True)}


@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_reported_exactly(mode):
    """Catches: a score with the next episode's reward in it, a length that counts the reset, truncation told as termination."""
    made = collected(mode, VECTOR_STEPS)
    for counter in made.counters:
        got = [e for e in made.episodes if e.env == counter.number]
        ends = [h for h in counter.diary if h.terminated or h.truncated]
        assert len(got) == len(ends) > 8
        for episode, end in zip(got, ends, strict=True):
            steps = [h for h in counter.diary if h.episode == end.episode]
            assert episode.score == sum(h.reward for h in steps)
            assert episode.length_agent_steps == len(steps) == counter.length(end.episode)
            assert episode.truncated == end.truncated
    when = [e.agent_step for e in made.episodes]
    assert when == sorted(when)
    assert when[-1] <= made.collector.agent_steps
    assert sum(e.length_agent_steps for e in made.episodes) <= made.collector.agent_steps


@pytest.mark.parametrize("mode", MODES)
def test_agent_steps_are_counted_step_by_step(mode):
    """Catches: a count that is right in the end only."""
    made = collected(mode, 0)
    for _ in range(30):
        made.collector.step(1.0)
        assert made.collector.agent_steps == sum(len(counter.diary) for counter in made.counters)


@pytest.mark.parametrize("mode", MODES)
def test_hundreds_of_random_episodes(mode, rng):
    """The same by counting, over many more ends of every kind: 0 fake, 0 lost, 0 last observations missing."""
    lengths = tuple(int(n) for n in rng.integers(1, 6, 97))
    made = collected(mode, 500, slots=1000, num_envs=5, lengths=lengths)
    stored = int(made.replay.valid.sum())
    assert stored == made.collector.agent_steps == sum(len(c.diary) for c in made.counters)
    ends = sum(h.terminated or h.truncated for c in made.counters for h in c.diary)
    assert len(made.episodes) == ends > 500
    last = int(made.replay.count.sum()) - stored
    assert ends - (5 if mode in ("list", "next_step") else 0) <= last <= ends, "under NEXT_STEP the newest may be still to come"
    assert int(made.replay.terminal.sum()) == sum(h.terminated for c in made.counters for h in c.diary)


def test_frame_stacks_begin_with_zeros():
    """Catches: frames of the episode before, the first frame repeated, the newest frame first."""
    stacks = FrameStacks(2, 3)
    frames = [{"obs": np.array([[10 * t + 1.0], [10 * t + 2.0]])} for t in range(4)]
    for t, reset in enumerate([(True, True), (False, False), (False, True), (False, False)]):
        got = stacks.push(frames[t], np.array(reset))["obs"][..., 0].tolist()
    assert got == [[11, 21, 31], [0, 22, 32]]


def test_pictures_keep_their_type():
    """Catches: bytes that grow to eight times their size on the way to the network."""
    inputs = ActingInputs(1, 2, torch.device("cpu"))
    made = inputs({"obs": np.full((1, 1, 4, 4), 200, np.uint8)}, np.zeros(1, np.int64), np.zeros(1, np.float32), np.ones(1, bool))
    assert made.obs["obs"].dtype == torch.uint8
    assert made.obs["obs"].shape == (1, 1, 2, 1, 4, 4)


class Overpaid(Counter):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, 0.5 if self.episode == 1 else reward, *rest


@pytest.mark.parametrize("classes", [(-1.0, 0.0, 1.0), ()])
def test_an_undeclared_reward_is_an_error_where_classes_are_declared(classes):
    """Catches: a reward that is silently taken for its nearest class."""
    number = itertools.count()
    envs = EnvList(lambda: Overpaid(next(number)), 3, np.random.SeedSequence(0))
    agent = tiny_agent(tiny_config(rewards="classes" if classes else "general"), reward_classes=classes)
    replay = Replay(envs.spec, 3, 300, agent.net.state_dim, 2)
    collector = Collector(envs, agent, replay, np.random.default_rng(0), classes)
    message = r"environment 1 paid 0\.5, which is none of reward_classes=\[-1\.0, 0\.0, 1\.0\].*rewards=general"
    with pytest.raises(EnvironmentFault, match=message) if classes else contextlib.nullcontext():
        for _ in range(20):
            collector.step(1.0)


# --------------------------------------------------------------------------------------------------------------- evaluation


class Short(Counter):
    """Environment e ends after e + 1 steps, paid 1 each; later episodes would pay -1."""

    def __init__(self, number):
        super().__init__(number, lengths=(number + 1,))

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 1.0 if self.episode == 0 else -1.0, *rest


def shorts(made):
    def make():
        made.append(Short(len(made)))
        return made[-1]

    return make


def test_evaluation_is_the_first_episode_of_each_environment():
    """Catches: the first episodes to finish, which are the short ones, and environments that are stepped on past their end."""
    made = []
    episodes = evaluate(tiny_agent(), shorts(made), 5, 0.5, np.random.SeedSequence(0))
    assert [(e.env, e.score, e.length_agent_steps) for e in episodes] == [(e, e + 1.0, e + 1) for e in range(5)]
    assert [e.truncated for e in episodes] == [not made[e].terminates(0) for e in range(5)]
    assert [len(c.diary) for c in made] == [1, 2, 3, 4, 5]


def test_evaluation_acts_like_training():
    """Catches: an evaluation that forgets the state, the stack, or the action and reward before. Features as in the collector."""
    made = collected("list", 9, epsilon=0.0, lengths=(9,), cfg=tiny_config(frame_stack=3))
    trained, agent = dict(made.seen), made.agent
    made.seen.clear()
    number = itertools.count()
    evaluate(agent, lambda: Counter(next(number), lengths=(9,)), 3, 0.0, np.random.SeedSequence(0))
    assert made.seen.keys() == trained.keys()
    assert len(trained) == 27
    for place, features in made.seen.items():
        torch.testing.assert_close(features, trained[place])


def test_evaluation_repeats_with_its_seed_and_closes():
    """Catches: an evaluation that draws from a generator of the run, or leaves environments open."""

    def scores(seed):
        envs, closed = [], []

        def make():
            envs.append(Counter(len(envs), lengths=(30,)))
            envs[-1].close = lambda: closed.append(True)
            return envs[-1]

        episodes = evaluate(tiny_agent(), make, 4, 0.7, np.random.SeedSequence(seed))
        assert closed == [True] * 4
        return [e.score for e in episodes]

    assert scores(1) == scores(1) != scores(2)


def test_the_adapters_agree_on_the_first_observations():
    """Catches: environments in another order than their rows."""
    for mode in MODES:
        envs, _ = counters(mode)
        np.testing.assert_array_equal(envs.reset()["obs"], [[0, 0, 0], [1, 0, 0], [2, 0, 0]])
