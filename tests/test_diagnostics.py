"""What `dae doctor` says: every finding appears where its cause is, and none where all is well."""

import pytest
import torch

from conftest import random_window, signals, tiny_agent, tiny_config
from dae.config import ObjectiveConfig
from dae.diagnostics import findings, update_metrics

WELL = {
    "train/loss_rec": 0.05, "dae/adv_size": 1.0, "dae/luck_size": 0.5, "dae/luck_mean": 0.01, "dae/prior_entropy": 1.0,
    "dae/policy_entropy": 0.2, "dae/live_outcomes": 6.0, "dae/temperature": 0.1, "dae/kl": 0.03, "dae/eps_wta": 0.0,
    "dae/return_variance": 2.0, "dae/state_drift": 0.1,
}  # fmt: skip


def said(**changes):
    metrics = WELL | {
        ("train/" if name in ("loss_rec", "learning_rate") else "dae/") + name: value for name, value in changes.items()
    }
    return [finding.what.split(":")[0] for finding in findings(metrics, ObjectiveConfig())]


def test_a_healthy_run_is_healthy():
    assert said() == []
    assert findings({}, ObjectiveConfig()) == [], "before learning begins there is nothing to say"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"live_outcomes": 1.5}, "dead predictions"),
        ({"live_outcomes": 1.0, "prior_entropy": 0.0, "loss_rec": 0.5}, "dead predictions"),
        ({"luck_mean": 0.2}, "uncentred luck"),
        ({"temperature": 1e-5}, "runaway temperature"),
        ({"temperature": 20}, "runaway temperature"),
        ({"kl": 1e-3, "policy_entropy": 0.6}, "lagging temperature"),
        ({"return_variance": 5e-3}, "Var(G) is 0.005"),
        ({"state_drift": 0.9}, "stale states"),
        ({"adv_size": float("nan")}, "a number is not finite"),
        ({"return_variance": 1e30}, "an absurd number"),
        ({"learning_rate": 0.0}, "the learning rate is 0"),
    ],
)
def test_what_is_unhealthy_is_named(changes, what):
    """Catches: a threshold on the wrong number, or one that nothing can cross."""
    assert said(**changes) == [what]


@pytest.mark.parametrize(
    "changes",
    [
        {"live_outcomes": 1.0, "prior_entropy": 0.0},  # a deterministic environment that one prediction tells
        {"live_outcomes": 1.0, "eps_wta": 0.5},  # not annealed yet
        {"kl": 1e-3, "policy_entropy": 0.1},  # advantages have stopped changing, the policy is greedy: T may fall for ever
        {"state_drift": 0.9, "eps_wta": 0.5},
        {"luck_mean": 0.02, "luck_size": 0.04},  # too little luck to matter
    ],
)
def test_what_is_well_is_left_alone(changes):
    assert said(**changes) == []


def test_information_between_outcome_and_reward(rng):
    """MI of the batch's joint posterior: 0 where one outcome takes all, and never above the reward's entropy."""
    cfg = tiny_config(eps_wta="0")
    agent, window = tiny_agent(cfg), random_window(cfg, rng)
    s = signals(eps_wta=0.0)
    _, parts = agent.losses(window, s)

    def information(posterior):
        both = {**parts, "posterior": posterior}
        return update_metrics({}, both, agent.log_temperature, s)["dae/outcome_reward_information"].item()

    n, b, z = parts["posterior"].shape
    classes = len(agent.net.sizes.reward_classes)
    outcomes = z // classes
    tied = torch.zeros(n, b, outcomes, classes)
    which = torch.arange(n * b).view(n, b) % min(outcomes, classes)
    tied.scatter_(
        2, which[..., None, None].expand(n, b, 1, classes), torch.nn.functional.one_hot(which, classes)[:, :, None].float()
    )
    apart = torch.zeros(n, b, outcomes, classes)
    apart[:, :, 0] = torch.nn.functional.one_hot(which, classes).float()
    valid = parts["valid"]
    share = torch.stack([(which[valid] == c).float().mean() for c in range(classes)])
    entropy = -torch.xlogy(share, share).sum().item()
    assert information(tied.flatten(-2)) == pytest.approx(entropy, abs=1e-5)
    assert information(apart.flatten(-2)) == pytest.approx(0, abs=1e-5)
