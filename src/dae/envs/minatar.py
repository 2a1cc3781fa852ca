"""MinAtar's five games (Young and Tian 2019), known to Gymnasium by ids such as `MinAtar/Breakout-v1`.

The package's own environments are used as they are: 10x10xC pictures of bools, sticky actions with probability 0.1, and with
`-v1` the game's minimal set of actions (`-v0`: all six). Most have no time limit: give `max_episode_agent_steps`. Rewards are 0 and
1 in all games but Seaquest, though no metadata says so: `--reward-classes 0 1` is exact.
"""

import importlib
import importlib.util
import logging

import gymnasium as gym

from dae.errors import MissingExtra


def register() -> None:
    """Make the ids known to `gymnasium.make`; does nothing the second time."""
    if "MinAtar/Breakout-v1" in gym.registry:
        return
    if importlib.util.find_spec("minatar") is None:
        raise MissingExtra("MinAtar", "minatar")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns where seaborn is missing, which only its window needs
    try:
        importlib.import_module("minatar.gym").register_envs()
    finally:
        logging.disable(before)
