"""Named sets of options. Presets stack from left to right, and single options override them."""

from collections.abc import Sequence
from typing import Any

from dae.config import Config
from dae.errors import ConfigError, nearest

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("the paper's tables (the defaults)", {}),
    "atari": (
        "the paper's Atari agent, for environments such as ALE/Breakout-v5: the defaults",
        {"frame_stack": 4},
    ),
    "laptop": (
        "small networks and short schedules: minutes on two CPU cores",
        {
            "num_envs": 8, "frame_stack": 1, "width": 1, "embedding_dim": 64, "core_dim": 128, "core_blocks": 4,
            "value_hidden": 128, "prediction_hidden": 128, "prior_hidden": 128, "num_outcomes": 8,
            "backup_steps": 16, "burn_in_steps": 8, "batch_size": 32, "agent_steps_per_update": 8,
            "replay_agent_steps": 100_000, "min_replay_agent_steps": 2_000, "total_agent_steps": 50_000,
            "learning_rate": "2k:0, 3k:1e-3, end:1e-4", "eps_wta": "0:1, 10k:0", "epsilon": "0:1, 10k:0.01",
            "ema_decay": 0.99, "discount": 0.98,
            # Luck waits for a thousand updates: before the memory is there it explains what only memory could (docs/log.md).
            "luck_from_eps_wta": 0.0, "eval_weights": "ema",
            "variance_every_agent_steps": 1_000, "eval_every_agent_steps": 10_000, "log_every_agent_steps": 1_000,
            "checkpoint_every_agent_steps": 10_000, "threads": 1,
        },
    ),
    "one-step": ("no multi-step learning: n = 1 at the same 16 trained slots", {"backup_steps": 1, "train_steps": 16}),
    "one-step-literal": ("no multi-step learning: one trained slot a window", {"backup_steps": 1, "train_steps": 1}),
    "luck-off": ("no off-policy correction: B = 0", {"corrections": "skill"}),
    "uncorrected": ("plain multi-step targets: neither A nor B corrects them", {"corrections": "none"}),
    "frame-stack": ("an MLP over 4 stacked frames in the LSTM's place", {"core": "mlp", "burn_in_steps": 0, "frame_stack": 4}),
    "confounding-recurrent": (
        "confounding study: the actor remembers the whole episode, the learner 4 steps",
        {"burn_in_steps": 4, "stored_states": False, "behaviour": "recurrent"},
    ),
    "confounding-aligned": (
        "confounding study: actor and learner remember 4 steps alike",
        {"burn_in_steps": 4, "stored_states": False, "behaviour": "aligned"},
    ),
}  # fmt: skip
PRESETS["quickstart"] = (
    "CartPole with hidden velocities, until the pole is held upright: within five minutes",
    {
        **PRESETS["laptop"][1],
        "env": "dae/CartPoleHidden-v0",
        "name": "quickstart",
        "total_agent_steps": 60_000,
        "eval_every_agent_steps": 4_000,
        "stop_at_score": 475,
    },
)


def with_presets(names: Sequence[str], base: Config | None = None) -> Config:
    """The defaults, or `base`, changed by each preset in turn."""
    cfg = base or Config()
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"no preset '{name}'{nearest(name, PRESETS)}; there are {', '.join(sorted(PRESETS))}")
        cfg = cfg.override(**PRESETS[name][1])
    return cfg
