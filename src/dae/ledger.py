"""Where the return of an episode came from, step by step: value, skill A, luck B, and the rest that the three do not explain.

    sum_t gamma^t r_t  =  V(h_0) + sum_t gamma^t (A_t + B_t + rest_t)            (Eq. 3 and 5, plus what was not learned)

    rest_t = r_t - A_t - B_t + gamma V(h_{t+1}) - V(h_t),   V = 0 behind a terminal step

`Agent.losses` computes all of it, over whole episodes in place of windows: there is no second implementation.
"""

import copy
import csv
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dae.agent import Agent, Signals
from dae.errors import ConfigError
from dae.files import whole_file
from dae.network import Inputs
from dae.replay import Window

COLUMNS = ("episode", "step", "action", "reward", "value", "skill", "luck", "rest")
MOST_SLOTS = 20_000
"""Slots that are computed at once: the outcome head's predictions of so many take about a gigabyte at the paper's sizes."""


@dataclass
class Diary:
    """What an actor saw and did in several environments side by side; an episode of each."""

    inputs: list[Inputs] = field(default_factory=list)
    action: list[NDArray[np.int64]] = field(default_factory=list)
    reward: list[NDArray[np.float32]] = field(default_factory=list)
    terminal: list[NDArray[np.bool_]] = field(default_factory=list)
    valid: list[NDArray[np.bool_]] = field(default_factory=list)

    def see(self, inputs: Inputs) -> None:
        """Where the actor is; to be called once more after the last step."""
        obs = {name: frames.clone() for name, frames in inputs.obs.items()}  # the actor's frames are overwritten at the next step
        self.inputs.append(Inputs(obs, inputs.prev_action.clone(), inputs.prev_reward.clone(), inputs.reset.clone()))

    def did(
        self,
        seen: Inputs,
        action: NDArray[np.int64],
        reward: NDArray[np.float32],
        terminal: NDArray[np.bool_],
        running: NDArray[np.bool_],
    ) -> None:
        """What it saw, did and was paid; where not `running`, the episode was over before."""
        self.see(seen)
        self.action.append(action.copy())
        self.reward.append(reward.copy())
        self.terminal.append(terminal.copy())
        self.valid.append(running.copy())

    def window(self, envs: slice, agent: Agent) -> Window:
        """Whole episodes as one window that begins with an empty state."""

        def stack(rows: Sequence[NDArray[np.generic]]) -> Tensor:
            return torch.from_numpy(np.stack(rows)[:, envs]).to(agent.device)

        def cat(rows: Iterator[Tensor]) -> Tensor:
            return torch.cat(list(rows))[:, envs].to(agent.device)

        seen = self.inputs
        obs = {name: cat(slot.obs[name] for slot in seen) for name in seen[0].obs}
        reset = cat(slot.reset for slot in seen)
        inputs = Inputs(obs, cat(slot.prev_action for slot in seen), cat(slot.prev_reward for slot in seen), reset)
        core = torch.zeros(reset.shape[1], agent.net.state_dim, device=agent.device)
        return Window(inputs, stack(self.action), stack(self.reward), stack(self.terminal), stack(self.valid), core)


@dataclass(frozen=True)
class Account:
    """One number for each step of each episode, [T, B]; nothing where not `valid`."""

    action: Int[Tensor, "t b"]
    reward: Float[Tensor, "t b"]
    value: Float[Tensor, "t b"]
    skill: Float[Tensor, "t b"]
    luck: Float[Tensor, "t b"]
    rest: Float[Tensor, "t b"]
    valid: Bool[Tensor, "t b"]


@torch.no_grad()
def explain(agent: Agent, w: Window, reward_scale: float = 1.0) -> Account:
    """A and B centred as in learning (under the target policy and the prior), V of the online network."""
    if agent.behaviour != "recurrent":
        raise ConfigError("behaviour=aligned: the ledger is of agents that remember the whole episode")
    steps = w.action.shape[0]
    whole = copy.copy(agent)  # the same networks; all of the episode is trained slots of one backup
    whole.cfg = dataclasses.replace(agent.cfg, burn_in_steps=0, backup_steps=steps, train_steps=steps)
    whole.train_steps = steps
    numbers = (torch.tensor(x, device=agent.device) for x in (0.0, 0.0, 1.0, reward_scale))
    _, parts = whole.losses(w, Signals(*numbers))
    value, skill, luck = parts["value"], parts["adv"], parts["luck"]
    # Behind the last step: nothing where it was terminal, else the slow network's value, from which learning bootstraps too.
    following = torch.cat([value[1:], parts["ema_value"][-1:]])
    over = torch.cat([~w.valid[1:], torch.ones_like(w.valid[:1])])
    following = torch.where(over, parts["ema_value"][1:], following)
    rest = w.reward - skill - luck + agent.cfg.discount * (~w.terminal).float() * following - value
    return Account(w.action, w.reward, value, skill, luck, rest, w.valid)


def accounts(agent: Agent, diary: Diary, reward_scale: float = 1.0) -> Iterator[Account]:
    """Of all episodes in the diary, as many at once as memory allows."""
    envs = len(diary.action[0])
    many = max(1, MOST_SLOTS // len(diary.action))
    for first in range(0, envs, many):
        yield explain(agent, diary.window(slice(first, first + many), agent), reward_scale)


def write_ledger(path: Path, agent: Agent, diary: Diary, reward_scale: float = 1.0) -> None:
    """One CSV row for each step of each episode."""
    with whole_file(path) as partial, partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        episode = 0
        for account in accounts(agent, diary, reward_scale):
            for b in range(account.valid.shape[1]):
                writer.writerows(_rows(account, b, episode))
                episode += 1


def _rows(account: Account, b: int, episode: int) -> Iterator[list[object]]:
    floats = [x[:, b].tolist() for x in (account.reward, account.value, account.skill, account.luck, account.rest)]
    for step in range(int(account.valid[:, b].sum())):
        yield [episode, step, int(account.action[step, b]), *(f"{x[step]:.6g}" for x in floats)]
