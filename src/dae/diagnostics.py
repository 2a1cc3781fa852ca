"""The health numbers of an update, and what `dae doctor` and the progress display say of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dae.config import ObjectiveConfig
from dae.objective import masked_mean

if TYPE_CHECKING:
    from dae.agent import Signals


ABSURD = 1e9
"""Nothing that is logged is of this size where anything is learned."""


@torch.no_grad()
def update_metrics(
    weighted: dict[str, Tensor], parts: dict[str, Tensor], log_temperature: Tensor, s: "Signals"
) -> dict[str, Tensor]:
    """Named as in docs/metrics.md; 0-d tensors, no host sync."""
    valid, posterior = parts["valid"], parts["posterior_o"]
    prior = parts["log_prior"].exp()
    classes = prior.shape[-1] // posterior.shape[-1]
    prior_o, prior_r = (prior.unflatten(-1, (-1, classes)).sum(dim) for dim in (-1, -2))
    share = (posterior * valid[..., None]).sum((0, 1)) / valid.sum().clamp_min(1)
    both = (parts["posterior"] * valid[..., None]).sum((0, 1)).unflatten(-1, (-1, classes)) / valid.sum().clamp_min(1)
    independent = both.sum(-1, keepdim=True) * both.sum(-2, keepdim=True)

    def entropy(p: Tensor) -> Tensor:
        return masked_mean(-torch.xlogy(p, p).sum(-1), valid)

    def rms(x: Tensor) -> Tensor:
        return masked_mean(x.square(), valid).sqrt()

    metrics = {f"train/loss_{name}": loss for name, loss in weighted.items()}
    metrics |= {
        "train/dae_squared_residual": parts["dae"],
        "train/learning_rate": s.learning_rate,
        "train/value_mean": masked_mean(parts["value"], valid),
        "dae/adv_size": rms(parts["adv"]),
        "dae/luck_size": rms(parts["luck"]),
        "dae/luck_mean": masked_mean(parts["luck"], valid),
        "dae/prior_entropy": entropy(prior_o),
        "dae/reward_entropy": entropy(prior_r),
        "dae/policy_entropy": entropy(parts["policy"]),
        "dae/largest_outcome_share": share.max(),
        "dae/live_outcomes": (-torch.xlogy(share, share).sum()).exp(),
        "dae/outcome_reward_information": (torch.xlogy(both, both) - torch.xlogy(both, independent)).sum(),
        "dae/temperature": log_temperature.exp(),
        "dae/kl": masked_mean(parts["kl"], valid),
        "dae/eps_wta": s.eps_wta,
        "dae/beta_v": parts["beta_v"],
        "dae/return_variance": s.return_variance,
    }
    return {name: value.detach().clone() for name, value in metrics.items()}


@dataclass(frozen=True)
class Finding:
    """Something unhealthy, and what to do."""

    what: str
    remedy: str


def findings(metrics: Mapping[str, float], objective: ObjectiveConfig) -> list[Finding]:
    """What the health numbers of a stretch of training (means over its updates) say. Thresholds in docs/metrics.md."""
    if "dae/adv_size" not in metrics:
        return []
    m, found = metrics, []

    def note(unhealthy: bool, what: str, remedy: str) -> None:
        if unhealthy:
            found.append(Finding(what, remedy))

    annealed, outcomes = m["dae/eps_wta"] == 0, objective.num_outcomes
    alive, missed = m["dae/live_outcomes"], m["train/loss_rec"] / objective.beta_rec if objective.beta_rec else 0.0
    note(
        annealed and alive < 1 + 0.1 * (outcomes - 1) and (m["dae/prior_entropy"] > 0.5 or missed > 0.2),
        f"dead predictions: {alive:.1f} of {outcomes} are in use, yet the next observation is not told well (error {missed:.2g} of 4)",
        "anneal eps_wta more slowly, or raise beta_rec",
    )
    note(
        m["dae/luck_size"] > 0
        and abs(m["dae/luck_mean"]) > 0.3 * m["dae/luck_size"]
        and m["dae/luck_size"] > 0.1 * m["dae/adv_size"],
        f"uncentred luck: its mean is {m['dae/luck_mean']:.3g}, its size {m['dae/luck_size']:.3g}",
        "try outcome_prior=joint, more outcomes, or a larger beta_prior",
    )
    note(
        m["dae/temperature"] < 1e-4 or m["dae/temperature"] > 19,
        f"runaway temperature: T = {m['dae/temperature']:.3g}",
        "rewards may be absent, or the learning rate too high; temperature_lr_multiplier below 1 slows it",
    )
    settled = 0.5 / objective.beta_kl if objective.beta_kl else 0.0
    note(
        annealed and m["dae/kl"] < 0.25 * settled and m["dae/policy_entropy"] > 0.3,
        f"lagging temperature: the KL is {m['dae/kl']:.2g}, far below {settled:.2g}, and the target policy still soft",
        "raise temperature_lr_multiplier: T falls as fast as its learning rate lets it",
    )
    note(
        m["dae/return_variance"] < objective.variance_floor,
        f"Var(G) is {m['dae/return_variance']:.2g}: hardly any return differs from another",
        "the agent has met no reward yet: keep epsilon high for longer, or shape the reward",
    )
    note(
        annealed and m.get("dae/state_drift", 0.0) > 0.5,  # at the beginning weights move fast, and states with them
        f"stale states: stored and recomputed recurrent states differ by {m.get('dae/state_drift', 0.0):.0%}",
        "a longer burn_in_steps, a smaller replay_agent_steps, or a lower learning rate",
    )
    note(
        m.get("train/learning_rate", 1.0) == 0,
        "the learning rate is 0: nothing is learned",
        "look at its schedule; it may rise later than the run lasts",
    )
    odd = next((name for name, value in m.items() if not math.isfinite(value)), "")
    note(bool(odd), f"a number is not finite: {odd}", "look for huge rewards or observations; lower the learning rate")
    huge = next((name for name, value in m.items() if math.isfinite(value) and abs(value) > ABSURD), "")
    note(bool(huge), f"an absurd number: {huge} is {m.get(huge, 0.0):.2g}", "scale rewards and observations to a size around 1")
    return found
