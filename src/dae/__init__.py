"""Direct Advantage Estimation: recurrent, off-policy, multi-step reinforcement learning that tells skill from luck."""

from dae import envs as envs  # registers the bundled environments with Gymnasium
from dae.api import DAE, Player, load_player
from dae.config import Config, Schedule
from dae.errors import DaeError

__version__ = "0.1.0"
__all__ = ["DAE", "Config", "DaeError", "Player", "Schedule", "load_player"]
