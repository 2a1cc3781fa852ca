"""The ledger: value, skill and luck of every step, summing to the return exactly."""

import csv

import numpy as np
import pytest
import torch

from conftest import Counter, random_window, tiny_agent, tiny_config
from dae.agent import Signals
from dae.config import Config
from dae.errors import ConfigError, FileError
from dae.evaluate import evaluate
from dae.ledger import COLUMNS, Diary, explain, write_ledger

LENGTHS = (4, 2, 7)


def kept(agent, episodes=6, epsilon=0.5):
    numbers = iter(range(episodes))
    diary = Diary()
    scored = evaluate(
        agent, lambda: Counter(next(numbers), lengths=LENGTHS), episodes, epsilon, np.random.SeedSequence(0), diary=diary
    )
    return scored, diary


def test_the_account_adds_up_to_the_return():
    """V(h_0) + sum gamma^t (A + B + rest) is the discounted return, plus V behind a truncated end. Catches: a term of the wrong
    sign, slot or discount, and a value behind a terminal step."""
    agent = tiny_agent()
    scored, diary = kept(agent)
    window = diary.window(slice(None), agent)
    account, gamma = explain(agent, window), agent.cfg.discount
    with torch.no_grad():
        behind = agent.ema.state_value(agent.ema.trunk(window.inputs, window.core_in).features)
    for e, episode in enumerate(scored):
        n = episode.length_agent_steps
        assert account.valid[:, e].tolist() == [t < n for t in range(len(account.valid))]
        weight = gamma ** torch.arange(n)
        told = account.value[0, e] + (weight * (account.skill + account.luck + account.rest)[:n, e]).sum()
        paid = (weight * account.reward[:n, e]).sum() + (gamma**n * behind[n, e] if episode.truncated else 0)
        torch.testing.assert_close(told, paid, atol=1e-4, rtol=1e-4)
        assert account.reward[:n, e].sum().item() == pytest.approx(episode.score, abs=1e-5)
    assert {e.truncated for e in scored} == {True, False}, "both kinds of end were met"


def test_its_numbers_are_those_that_learning_sees():
    """A window without burn-in is explained as `losses` has it. Catches: a second reading of the paper."""
    cfg = tiny_config(burn_in_steps=0, eps_wta="0")
    agent, w = tiny_agent(cfg), random_window(cfg, np.random.default_rng(0))
    with torch.no_grad():
        _, parts = agent.losses(w, Signals(*(torch.tensor(x) for x in (0.0, 0.0, 1.0, 1.0))))
    account = explain(agent, w)
    for mine, theirs in ((account.value, "value"), (account.skill, "adv"), (account.luck, "luck")):
        torch.testing.assert_close(mine, parts[theirs])
    assert account.luck.abs().sum() > 0


def test_the_diary_is_what_the_actor_saw():
    """Unrolled again it gives the actions that were taken, greedily. Catches: frames that are overwritten, shifted rewards."""
    agent = tiny_agent(tiny_config(frame_stack=2))
    _, diary = kept(agent, epsilon=0.0)
    window = diary.window(slice(None), agent)
    with torch.no_grad():
        greedy = agent.net.raw_adv(agent.net.trunk(window.inputs[:-1], window.core_in).features).argmax(-1)
    assert torch.equal(greedy[window.valid], window.action[window.valid])


def test_the_file(tmp_path, monkeypatch):
    """Catches: steps behind an episode's end, episodes that are lost between two batches."""
    agent = tiny_agent()
    scored, diary = kept(agent)
    for most in (20_000, 1):
        monkeypatch.setattr("dae.ledger.MOST_SLOTS", most)
        write_ledger(tmp_path / f"{most}" / "steps.csv", agent, diary)
    one, other = ((tmp_path / f"{most}" / "steps.csv").read_text() for most in (20_000, 1))
    rows = list(csv.DictReader(one.splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [int(r["step"]) for r in rows] == [t for e in scored for t in range(e.length_agent_steps)]
    for e, episode in enumerate(scored):
        assert sum(float(r["reward"]) for r in rows if r["episode"] == str(e)) == pytest.approx(episode.score, abs=1e-4)
    numbers = [[float(x) for r in csv.reader(text.splitlines()[1:]) for x in r] for text in (one, other)]
    np.testing.assert_allclose(*numbers, atol=1e-4)


def test_only_files_are_replaced(tmp_path):
    """Catches: `--ledger` that takes the place of a device."""
    agent = tiny_agent()
    _, diary = kept(agent, episodes=1)
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "link", tmp_path):
        with pytest.raises(FileError, match="no regular file"):
            write_ledger(path, agent, diary)
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_aligned_actors_are_refused():
    agent = tiny_agent(tiny_config(behaviour="aligned", stored_states=False))
    with pytest.raises(ConfigError, match="behaviour=aligned"):
        explain(agent, random_window(tiny_config(), np.random.default_rng(0)))
    assert Config().acting.behaviour == "recurrent"
