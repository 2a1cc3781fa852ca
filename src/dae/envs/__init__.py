"""Environments. Importing this registers the bundled ones with Gymnasium; their code is loaded when one is made."""

import gymnasium as gym  # a name of its own: this package has a module `gymnasium`

# id -> class in dae.envs.pomdps, and the time limit, for those whose episodes would not end by themselves.
BUNDLED: dict[str, tuple[str, int | None]] = {
    "dae/Confounding-v0": ("Confounding", None),
    "dae/TMaze-v0": ("TMaze", 100),
    "dae/CartPoleHidden-v0": ("CartPoleHidden", 500),
    "dae/Jackpot-v0": ("Jackpot", None),
}


def register() -> None:
    """Make the ids known to `gymnasium.make`; those that are known already stay as they are."""
    for env_id, (name, limit) in BUNDLED.items():
        if env_id not in gym.registry:
            gym.register(env_id, entry_point=f"dae.envs.pomdps:{name}", max_episode_steps=limit)


register()
