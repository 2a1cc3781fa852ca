"""Direct Advantage Estimation: recurrent, off-policy, multi-step reinforcement learning that tells skill from luck."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dae.api import DAE, Player, load_player
    from dae.config import Config, Schedule
    from dae.errors import DaeError

__version__ = "0.1.0"
__all__ = ["DAE", "Config", "DaeError", "Player", "Schedule", "load_player"]

_HOMES = {
    "DAE": "dae.api", "Player": "dae.api", "load_player": "dae.api",
    "Config": "dae.config", "Schedule": "dae.config", "DaeError": "dae.errors",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are loaded when they are first asked for: environments and `--help` need no PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dae' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
