"""Atari against a slow pipeline of Dopamine's kind over the bare emulator: pictures, rewards, ends, chance, and what becomes of them."""

import dataclasses
import functools
import importlib.util
import json
import re

import numpy as np
import pytest
import torch
from gymnasium.utils import seeding
from gymnasium.vector import VectorEnv

from conftest import tiny_agent, tiny_config
from dae import DAE, load_player
from dae.cli import run
from dae.collect import Collector
from dae.envs.atari import PROTOCOLS, AtariEnvs, AtariProtocol, atari_source, stream_seeds
from dae.envs.gymnasium import RAW_REWARD, EnvList, env_source
from dae.errors import ConfigError
from dae.evaluate import evaluate
from dae.replay import Replay
from dae.run.record import read_jsonl
from dae.train import Seeds

ale_py = pytest.importorskip("ale_py")
from ale_py import ALEInterface, LoggerMode, roms  # noqa: E402

ALEInterface.setLoggerMode(LoggerMode.Error)
ROOT_SEED = np.random.SeedSequence(11)


# ------------------------------------------------------------------------------------------------------- the slow pipeline


def overlaps(source, target):
    """[target, source]: how much of each row of the source lies in each row of the target, in whole numbers."""
    parts = np.gcd(source, target)
    wide, narrow = source // parts, target // parts  # a target row is `wide` units long, a source row `narrow`
    return np.array(
        [[max(0, min((i + 1) * wide, (j + 1) * narrow) - max(i * wide, j * narrow)) for j in range(source)] for i in range(target)],
        float,
    )


class Slow:
    """One emulator and Dopamine's steps in words: no vector, no OpenCV."""

    def __init__(self, game, seed, sticky=0.25, frame_skip=4, limit=27_000, full_actions=False):
        self.ale, self.frame_skip, self.limit = ALEInterface(), frame_skip, limit
        self.ale.setFloat("repeat_action_probability", sticky)
        self.ale.setInt("random_seed", int(seed))
        self.ale.loadROM(roms.get_rom_path(game))
        self.actions = self.ale.getLegalActionSet() if full_actions else self.ale.getMinimalActionSet()
        self.rows, self.columns = (overlaps(size, 84) for size in self.ale.getScreenDims())
        self.cut = False
        self.whole = self.rows[0].sum() * self.columns[0].sum()

    def reset(self):
        if self.cut:  # the vector steps on before it is told: the emulator's generator must move along
            for _ in range(self.frame_skip):
                self.ale.act(self.actions[0])
        self.ale.reset_game()
        first = self.ale.getScreenGrayscale()
        self.buffers, self.steps = [first, np.zeros_like(first)], 0
        self.cut = False
        return self.picture()

    def step(self, action):
        """(picture, reward as paid, terminated, truncated)"""
        paid = 0
        for frame in range(self.frame_skip):
            paid += self.ale.act(self.actions[action])
            if self.ale.game_over():
                break
            if frame >= self.frame_skip - 2:
                # The order matters only where the game ends at the step's last frame: Dopamine has the two the other way round,
                # and then shows the last frame of the step before, where ale-py shows the picture before.
                self.buffers[self.frame_skip - 1 - frame] = self.ale.getScreenGrayscale()
        self.steps += 1
        over = self.ale.game_over()
        self.cut = not over and self.steps == self.limit
        return self.picture(), paid, over, self.cut

    def picture(self):
        """Exact means of areas, times `whole`."""
        self.buffers[0] = np.maximum(*self.buffers)
        return self.rows @ self.buffers[0].astype(float) @ self.columns.T

    def same(self, picture, got):
        """Whether `got` is the picture, rounded: a mean that ends in a half may go either way."""
        return bool((np.abs(self.whole * got.astype(float) - picture) <= self.whole / 2).all())


def atari(game, num_envs=2, seed=ROOT_SEED, **options):
    return AtariEnvs(game, AtariProtocol(**options), num_envs, seed)


def slow(game, num_envs=2, seed=ROOT_SEED, **options):
    return [Slow(game, s, **options) for s in stream_seeds(seed, num_envs)]


# game: steps to watch, and a limit. The first four end by themselves, some emulators sooner than others.
WATCHED = {
    "breakout": (400, 27_000), "asterix": (400, 27_000), "seaquest": (480, 27_000), "qbert": (500, 27_000),
    "pong": (180, 85), "boxing": (150, 70),
}  # fmt: skip


@pytest.mark.parametrize("game", WATCHED)
def test_pictures_rewards_and_ends_are_dopamine_s(game, rng):
    """Catches: every default of AtariVectorEnv that is not Dopamine's, a lost or doubled step, rewards that are clipped or not.

    With sticky actions on: an emulator with the same seed takes the same chances.
    """
    steps, limit = WATCHED[game]
    fast, references = atari(game, max_frames=4 * limit), slow(game, limit=limit)
    first = fast.reset()["obs"]
    assert first.shape == (2, 1, 84, 84)
    assert first.dtype == np.uint8
    assert all(r.same(r.reset(), first[e, 0]) for e, r in enumerate(references))
    over, ends, paid_at_all, last = [False, False], [0, 0], 0, first
    for t in range(steps):
        actions = rng.integers(0, fast.num_actions, 2)
        stepped = fast.step(actions)
        for e, reference in enumerate(references):
            picture, paid, terminated, truncated = (reference.reset(), 0, False, False) if over[e] else reference.step(actions[e])
            assert reference.same(picture, stepped.obs["obs"][e, 0]), f"step {t}, emulator {e}"
            assert (stepped.raw_reward[e], stepped.reward[e]) == (paid, np.sign(paid)), f"step {t}, emulator {e}"
            assert (stepped.terminated[e], stepped.truncated[e]) == (terminated, truncated), f"step {t}, emulator {e}"
            over[e] = terminated or truncated
            ends[e] += over[e]
            paid_at_all += paid != 0
        last = stepped.obs["obs"]
    assert min(ends) >= 1
    assert paid_at_all
    assert not np.array_equal(last[0], last[1])


def test_the_other_switches(rng):
    """Catches: a switch that is not passed on."""
    options = {"sticky": 0.0, "frame_skip": 3, "full_actions": True}
    fast, (reference,) = atari("asterix", 1, clip_rewards=False, **options), slow("asterix", 1, **options)
    assert fast.num_actions == 18
    assert fast.reward_classes == ()
    fast.reset()
    reference.reset()
    largest = 0
    for _ in range(150):
        action = int(rng.integers(18))
        stepped, (picture, paid, *_) = fast.step(np.array([action])), reference.step(action)
        assert reference.same(picture, stepped.obs["obs"][0, 0])
        assert stepped.reward[0] == paid
        largest = max(largest, paid)
    assert largest > 1


# ------------------------------------------------------------------------------------------------------------------ chance


def agreed(one, two):
    """Of two stories (frames at which the action could stick, frames at which it did; as bits), what both say."""
    same = ~(one[0] ^ two[0]) & ~(one[1] ^ two[1])
    return one[0] & same, one[1] & same


def test_actions_stick_at_a_quarter_of_the_frames(rng):
    """The frequency, measured: at each frame, did the emulator take the new action or the one before?

    An emulator without chance tries both and the picture tells; where it does not, both stories are followed until one is refuted or
    both come to the same memory, and what they disagree on is not counted.
    """
    fast, plain = atari("freeway", 1, frame_skip=1), Slow("freeway", 1, sticky=0.0, frame_skip=1)
    fast.reset()
    plain.reset()
    stories = {b"": (plain.ale.cloneState(), 0, (0, 0))}
    for frame in range(2000):
        action = int(rng.integers(fast.num_actions))
        got, following = fast.step(np.array([action])).obs["obs"][0, 0], {}
        for state, before, (could, did) in stories.values():
            for taken in {action, before}:
                plain.ale.restoreState(state)
                if plain.same(plain.step(taken)[0], got):
                    story = could | (action != before) << frame, did | (action != taken) << frame
                    key = plain.ale.getRAM().tobytes() + bytes([taken])
                    if key in following:
                        story = agreed(story, following[key][2])
                    following[key] = plain.ale.cloneState(), taken, story
        stories = following
        assert stories, f"frame {frame}: neither the new action nor the one before"
    could, did = functools.reduce(agreed, [story for _, _, story in stories.values()])
    assert could.bit_count() > 900
    assert did.bit_count() / could.bit_count() == pytest.approx(0.25, abs=0.045)  # three standard errors


def trajectories(seeds, steps=60):
    """Of all emulators of vectors with these seeds, all of which are given the same actions: as bytes."""
    actions, found = np.random.default_rng(0).integers(0, 3, steps), []
    for seed in seeds:
        envs = atari("freeway", 3, seed)
        envs.reset()
        pictures = np.stack([envs.step(np.full(3, action)).obs["obs"] for action in actions], 1)
        found += [one.tobytes() for one in pictures]
    return found


def test_no_two_emulators_share_their_chances():
    """Catches: seed + i, one seed for all, and an evaluation that plays the episodes of training or of the evaluation before."""
    zero, one = Seeds.of(0), Seeds.of(1)
    sources = [zero.envs, one.envs, *(s.evaluation_at(t).spawn(2)[0] for s in (zero, one) for t in (0, 1000))]
    drawn = [int(s) for source in sources for s in stream_seeds(source, 500)]
    assert len(set(drawn)) == len(drawn)
    assert min(drawn) >= 0
    different = trajectories(sources[:3])
    assert len(set(different)) == len(different) == 9
    assert trajectories([Seeds.of(0).envs]) == different[:3]


def test_a_seed_fixes_later_episodes_too(rng):
    """Catches: emulators that take the clock's time once their first episode is over, and later episodes that repeat the first."""
    actions, found = rng.integers(0, 3, (200, 2)), []
    for _ in range(2):
        envs = atari("freeway", max_frames=4 * 50)
        envs.reset()
        found.append([envs.step(a).obs["obs"] for a in actions])
    np.testing.assert_array_equal(*found)
    repeated, envs = [], atari("freeway", 1, max_frames=4 * 50)
    envs.reset()
    for _ in range(3):
        repeated.append(np.stack([envs.step(a[:1]).obs["obs"] for a in actions[:50]]).tobytes())
        envs.step(np.zeros(1, np.int64))  # opens the next
    assert len(set(repeated)) == 3


# ------------------------------------------------------------------------------------------------- what becomes of the steps


def gathered(game, vector_steps, **options):
    """Collected by a tiny agent at random."""
    cfg = tiny_config(num_envs=2, frame_stack=4)
    envs = atari(game, **options)
    agent = tiny_agent(cfg, envs.spec, envs.num_actions, envs.reward_classes)
    replay = Replay(envs.spec, 2, 2000, agent.net.state_dim, 4)
    collector = Collector(envs, agent, replay, np.random.default_rng(0), envs.reward_classes)
    episodes = [episode for _ in range(vector_steps) for episode in collector.step(1.0)]
    return replay, collector, episodes


@pytest.mark.parametrize(("game", "limit"), [("asterix", 27_000), ("asterix", 60)])
def test_the_replay_holds_what_the_slow_pipeline_sees(game, limit):
    """Catches: the fake transition of an autoreset, a truncation stored as a termination, raw rewards in the replay, clipped ones in
    the score, stacks of several frames in one slot."""
    replay, collector, episodes = gathered(game, 360, max_frames=4 * limit)
    assert replay.obs["obs"].shape[2:] == (1, 84, 84)
    assert replay.obs["obs"].dtype == torch.uint8
    real, ended = 0, []
    for e, reference in enumerate(slow(game, limit=limit)):
        picture, opens, score, length = reference.reset(), True, 0, 0
        for slot in range(360):
            assert reference.same(picture, replay.obs["obs"][slot, e, 0].numpy()), (slot, e)
            assert replay.reset[slot, e] == opens
            if reference.steps == length and (reference.cut or reference.ale.game_over()):  # the last picture: no transition
                assert not replay.valid[slot, e]
                picture, opens, score, length = reference.reset(), True, 0, 0
                continue
            picture, paid, terminated, truncated = reference.step(int(replay.action[slot, e]))
            opens, score, length, real = False, score + paid, length + 1, real + 1
            assert replay.valid[slot, e]
            assert replay.reward[slot, e] == np.sign(paid)
            assert replay.terminal[slot, e] == terminated
            if terminated or truncated:
                ended.append((e, score, length, truncated))
    assert collector.agent_steps == real
    assert sorted(ended) == sorted((x.env, x.score, x.length_agent_steps, x.truncated) for x in episodes)
    assert {x.truncated for x in episodes} == {limit == 60}
    assert max(x.score for x in episodes) > 10


def test_windows_stack_single_frames():
    replay, _, _ = gathered("breakout", 12, max_frames=4 * 5)
    window = replay.window(torch.tensor([0, 0]), torch.tensor([0, 1]), 11).inputs.obs["obs"]
    assert window.shape == (12, 2, 4, 1, 84, 84)
    frames = replay.obs["obs"][:12]
    for slot, first in [(0, 0), (2, 0), (5, 0), (6, 6), (8, 6)]:  # five steps and the last picture; then the next episode
        for back in range(4):
            there = slot - back >= first
            expected = frames[slot - back] if there else torch.zeros_like(frames[0])
            assert torch.equal(window[slot, :, 3 - back], expected)


class Watched(AtariEnvs):
    """Keeps which emulators were given which actions."""

    def send(self, actions, only=None):
        self.given = [*getattr(self, "given", []), dict(zip(only, actions, strict=True))]
        super().send(actions, only)


def test_evaluation_counts_raw_rewards_of_first_episodes(unchecked):
    """Catches: clipped scores, later episodes that the vector plays on by itself, rows or actions of other emulators."""
    limit, made, agent = 270, [], tiny_agent(tiny_config(frame_stack=4), atari("asterix", 1).spec, 9)
    source = atari_source("ALE/Asterix-v5", {"max_frames": 4 * limit})

    def many(num_envs, seed, channels):
        made.append(Watched("asterix", AtariProtocol(max_frames=4 * limit), num_envs, seed, channels))
        return made[-1]

    source = dataclasses.replace(source, make_many=many)
    episodes = evaluate(agent, source, 3, 0.9, np.random.SeedSequence(1))
    assert evaluate(agent, source, 3, 0.9, np.random.SeedSequence(1)) == episodes
    seed, _ = np.random.SeedSequence(1).spawn(2)
    for e, reference in enumerate(slow("asterix", 3, seed, limit=limit)):
        reference.reset()
        steps = [reference.step(given[e]) for given in made[0].given if e in given]
        over = [terminated or truncated for _, _, terminated, truncated in steps]
        assert over == [False] * (len(steps) - 1) + [True]
        paid, truncated = sum(paid for _, paid, *_ in steps), steps[-1][-1]
        assert (e, paid, len(steps), truncated) == (
            episodes[e].env, episodes[e].score, episodes[e].length_agent_steps, episodes[e].truncated,
        )  # fmt: skip
    assert len({e.length_agent_steps for e in episodes}) > 1
    assert max(e.score for e in episodes) >= 50  # Asterix pays 50 at the least


# -------------------------------------------------------------------------------------------------------------- one by one


def test_one_game_is_the_same_game(rng):
    """`dae play`, `dae check`. Catches: a picture in colour that shows another game, a reward that the agent was not trained on."""
    game = env_source("ALE/Asterix-v5", {"max_frames": 4 * 150}).make(render_mode="rgb_array")
    assert game.metadata["render_fps"] == 15
    for seed in (5, None):  # without a seed chance goes on
        picture, _ = game.reset(seed=seed)
        if seed is not None:
            reference = Slow("asterix", seeding.np_random(seed)[0].integers(2**31), limit=150)
        assert game.observation_space.contains(picture)
        assert reference.same(reference.reset(), picture[0])
        over, paid_most = False, 0
        while not over:
            action = int(rng.integers(9))
            picture, reward, terminated, truncated, info = game.step(action)
            expected, paid, *ends = reference.step(action)
            assert reference.same(expected, picture[0])
            assert (info[RAW_REWARD], reward) == (paid, np.sign(paid))
            assert [terminated, truncated] == ends
            over, paid_most = terminated or truncated, max(paid, paid_most)
            if not over:  # the game's last screen need not be among the last two
                assert (game.render() >= reference.ale.getScreenRGB()).all()
        assert game.render().shape == (210, 160, 3)
        reference.cut = False  # here the game is told at once
        assert paid_most >= 50
    game.close()


def test_games_in_a_list_are_scored_raw():
    """A callable that makes games one by one: `DAE(lambda: ...)`."""
    source = env_source("ALE/Asterix-v5", {"max_frames": 4 * 200})
    envs, total, learned = EnvList(source.make, 1, ROOT_SEED), 0.0, set()
    envs.reset()
    for action in np.random.default_rng(0).integers(0, 9, 200):
        stepped = envs.step(np.array([action]))
        total += stepped.paid[0]
        learned.add(float(stepped.reward[0]))
    assert learned == {0.0, 1.0}
    assert total >= 50
    assert envs.reward_classes == (-1.0, 0.0, 1.0)


# ---------------------------------------------------------------------------------------------------------- from the outside


@pytest.mark.parametrize(
    ("env", "kwargs", "words"),
    [
        ("ALE/Pongo-v5", {}, "did you mean 'ALE/Pong-v5'?"),
        ("ALE/Pong-v5", {"protocol": "dopamin"}, "did you mean 'dopamine'?"),
        ("ALE/Pong-v5", {"stiky": 0.1}, "did you mean 'sticky'?"),
        ("ALE/Pong-v5", {"sticky": 1.5}, "sticky=1.5: must be between 0 and 1"),
        ("ALE/Pong-v5", {"sticky": True}, "sticky=True: must be of type float"),
        ("ALE/Pong-v5", {"frame_skip": 4.0}, "frame_skip=4.0: must be of type int"),
        ("ALE/Pong-v5", {"full_actions": 1}, "full_actions=1: must be of type bool"),
        ("ALE/Pong-v5", {"max_frames": 3}, "max_frames=3: must be between 4 and"),
    ],
)
def test_what_cannot_be_asked_for(env, kwargs, words):
    with pytest.raises(ConfigError) as caught:
        env_source(env, kwargs)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_ale_py_there_is_a_line_that_installs_it(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ale_py" else find(name, *more))
    assert run(["train", "--env", "ALE/Pong-v5"]) == 6
    assert capsys.readouterr().err.strip() == "dae: environment 'ALE/Pong-v5' needs an extra: pip install 'dae-rl[atari]'"


def test_protocols():
    assert env_source("ALE/Pong-v5").protocol["protocol"] == "dopamine"
    assert env_source("ALE/Pong-v5").protocol["episode_limit_agent_steps"] == 27_000
    assert env_source("ALE/Pong-v5", {"protocol": "full-actions", "sticky": 0}).protocol["sticky_actions"] == 0.0
    assert env_source("ALE/Pong-v5", {"protocol": "full-actions"}).protocol["action_set"] == "all 18"
    shorter = env_source("ALE/Pong-v5", {}, max_steps=100).protocol
    assert (shorter["episode_limit_frames"], shorter["protocol"]) == (400, "dopamine, but for max_frames")
    assert env_source("ALE/Pong-v5", {}, max_steps=30_000).protocol["episode_limit_agent_steps"] == 27_000
    assert all(json.dumps(protocol.table()) for protocol in PROTOCOLS.values())


def test_gymnasium_s_own_vectors_stay_as_they_are():
    """Catches: ale-py's mode of resetting, written where every VectorEnv looks."""
    atari("pong", 1)
    assert "autoreset_mode" not in VectorEnv.metadata


TINY = {
    "num_envs": 2, "width": 0.0625, "embedding_dim": 8, "core_dim": 8, "core_blocks": 2, "value_hidden": 8, "prediction_hidden": 8,
    "prior_hidden": 8, "num_outcomes": 4, "backup_steps": 3, "burn_in_steps": 2, "batch_size": 2, "min_replay_agent_steps": 60,
    "replay_agent_steps": 400, "total_agent_steps": 240, "log_every_agent_steps": 60, "eval_every_agent_steps": 120,
    "eval_episodes": 3, "max_episode_agent_steps": 50, "device": "cpu",
}  # fmt: skip


def test_from_training_to_playing(tmp_path, capsys, unchecked):
    """`dae train --preset atari --env ALE/Breakout-v5`, small; then all that can be done with the run."""
    options = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["train", "--preset", "atari", "--env", "ALE/Breakout-v5", *options, "--out", str(tmp_path), "--no-tensorboard"]
    assert run(command) == 0
    said = capsys.readouterr().err
    assert re.search(r"sticky actions +0\.25", said)
    assert "reward classes [-1.0, 0.0, 1.0]" in said
    folder = tmp_path / "default" / "ALE-Breakout-v5" / "seed0"
    about = json.loads((folder / "run.json").read_text())
    assert about["protocol"] == env_source("ALE/Breakout-v5", {}, 50).protocol
    assert about["frames_per_agent_step"] == 4
    for row in (*read_jsonl(folder / "metrics.jsonl"), *(points := read_jsonl(folder / "eval.jsonl"))):
        assert row["frames"] == 4 * row["agent_steps"]
    assert len(points) == 6
    assert {(p["length"], p["truncated"]) for p in points} == {(50, True)}
    assert (folder / "videos" / "final.mp4").stat().st_size > 500
    for command, words in (
        (["eval", str(folder), "--episodes", "2"], "ALE/Breakout-v5: mean score"),
        (["play", str(folder), "--video", str(tmp_path / "v.mp4")], "length 50"),
        (["check", "--env", "ALE/Pong-v5", "--steps", "100"], "the same seed gives the same"),
        (["describe", "--preset", "atari", "--env", "ALE/Pong-v5"], "sticky actions"),
    ):
        assert run(command) == 0, command
        assert words in " ".join(capsys.readouterr().out.split()), command
    player, source = load_player(folder)
    assert len(list(player.play(source.make(), seed=1))) == 50


def test_from_python(unchecked):
    agent = DAE("ALE/Breakout-v5", preset="atari", **TINY)
    agent.learn(150)
    assert [e.length_agent_steps for e in agent.evaluate(2)] == [50, 50]
    assert agent.source.frames_per_agent_step == 4
    agent.close()
