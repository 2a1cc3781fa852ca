"""The losses of the paper, in paper order, as functions of tensors.

Nothing here knows about networks, replay or configuration. Every function takes tensors and returns tensors, so that each can be
checked against a slow transcription of its equation (tests/test_objective.py). `detach` is here and nowhere else.

Axes (docs/time_axis.md)      Transition t is (o_t, a_t, r_t, o_{t+1}), t = 0 .. n-1, of a window behind its burn-in
    n  trained slots          adv_t, luck_t, reward_t, discount_t, valid_t   t = 0 .. n-1
    b  windows                ema_value_t                                    t = 0 .. n
    a  actions
    o  outcomes of the observation, Z_O         c  reward classes, R (one where rewards are general)
    z  outcomes, Z = Z_O x R, flattened: z = o * |R| + c
    d  embedding
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def target_policy(ema_raw_adv: Float[Tensor, "n b a"], ema_temperature: Float[Tensor, ""]) -> Float[Tensor, "n b a"]:
    """pi_target = softmax(A_EMA / T_EMA).                                               Alg. 1 l.26"""
    return (ema_raw_adv.detach() / ema_temperature.detach()).softmax(-1)


def centre_advantage(
    raw_adv: Float[Tensor, "n b a"],
    policy: Float[Tensor, "n b a"],
    action: Int[Tensor, "n b"],
) -> Float[Tensor, "n b"]:
    """A(h_t, a_t) with E_pi[A] = 0.                              First constraint of Eq. 6; Alg. 1 l.27"""
    mean = (policy.detach() * raw_adv).sum(-1)
    return raw_adv.gather(-1, action[..., None]).squeeze(-1) - mean


def outcome_distance(
    prediction: Float[Tensor, "n b o d"],
    ema_embedding: Float[Tensor, "n b d"],
) -> Float[Tensor, "n b o"]:
    """(1/d) |x_hat_{t+1,z} - sg(x_{t+1})|^2, the 1/d being PAPER.md D5.                        Eq. 8"""
    return (prediction - ema_embedding.detach()[:, :, None]).square().mean(-1)


def wta_posterior(distance: Float[Tensor, "n b o"], eps_wta: Float[Tensor, ""]) -> Float[Tensor, "n b o"]:
    """q(z_o | h_t, a_t, x_{t+1}): the nearest prediction, softened by eps_WTA.       App. B.1; Alg. 1 l.18"""
    winner = F.one_hot(distance.detach().argmin(-1), distance.shape[-1]).to(distance.dtype)
    return (1 - eps_wta) * winner + eps_wta / distance.shape[-1]


def reconstruction_loss(distance: Float[Tensor, "n b o"], posterior: Float[Tensor, "n b o"]) -> Float[Tensor, "n b"]:
    """L_rec: each prediction learns by its share of the posterior.                      Eq. 8; Alg. 1 l.19"""
    return (posterior * distance).sum(-1)


def joint_posterior(
    posterior: Float[Tensor, "n b o"],
    reward_class: Int[Tensor, "n b"],
    num_classes: int,
) -> Float[Tensor, "n b z"]:
    """q(z) = q(z_o) 1[c = r_t] over Z = Z_O x R.                                              App. B.1"""
    seen = F.one_hot(reward_class, num_classes).to(posterior.dtype)
    return (posterior[..., :, None] * seen[..., None, :]).flatten(-2)


def prior_loss(posterior: Float[Tensor, "n b z"], log_prior: Float[Tensor, "n b z"]) -> Float[Tensor, "n b"]:
    """L_prior: cross entropy of the prior with the posterior.                                  Alg. 1 l.20"""
    return -(posterior * log_prior).sum(-1)


def centre_luck(
    raw_luck: Float[Tensor, "n b z"],
    posterior: Float[Tensor, "n b z"],
    log_prior: Float[Tensor, "n b z"],
) -> Float[Tensor, "n b"]:
    """B_t = E_q[g] - E_p[g]; the prior is not bent by it.    Eq. 7; second constraint of Eq. 6; Alg. 1 l.22"""
    return ((posterior - log_prior.detach().exp()) * raw_luck).sum(-1)


def dae_residual(
    reward: Float[Tensor, "n b"],
    discount: Float[Tensor, "n b"],
    adv: Float[Tensor, "n b"],
    luck: Float[Tensor, "n b"],
    value: Float[Tensor, "n b"],
    ema_value: Float[Tensor, "n+1 b"],
    valid: Bool[Tensor, "n b"],
    backup_steps: int,
    correct_skill: bool = True,
) -> Float[Tensor, "n b"]:
    """The inside of the square of Eq. 6, once per start step s; Alg. 1 l.28 with its indices mended (PAPER.md D1, D2).

        delta_s = sum_{t=s}^{e-1} (prod_{s<=u<t} discount_u) (r_t - A_t - B_t) + (prod_{s<=u<e} discount_u) V_EMA(h_e) - V(h_s)

    `discount` is gamma inside an episode and 0 where o_{t+1} is terminal. The backup of start s ends at e, the end of the block of
    `backup_steps` slots that s lies in: the row of a block's first slot is the full n-step residual, later rows bootstrap sooner.
    A slot that holds only an episode's last observation (`valid` false) ends the backup too, so that a truncated episode bootstraps
    from the value there, and a terminal one, whose discount is 0, from nothing.

    Without `correct_skill`, A enters for the first action alone: the usual n-step target (PAPER.md D9).
    """
    # unbind, not adv[t]: the gradient of an index is a whole [n, b] of zeros for each step.
    gain, skill, decay, real, slow = (x.unbind() for x in (reward - luck, adv, discount, valid, ema_value))
    rows, backup = list[Tensor](), slow[-1]
    for t in reversed(range(len(gain))):
        if (t + 1) % backup_steps == 0:
            backup = slow[t + 1]
        uncorrected = gain[t] + decay[t] * backup
        rows.append(uncorrected - skill[t])
        backup = torch.where(real[t], rows[-1] if correct_skill else uncorrected, slow[t])
    return torch.stack(rows[::-1]) - value


def start_mask(valid: Bool[Tensor, "n b"], backup_steps: int, starts: str) -> Bool[Tensor, "n b"]:
    """The start steps that count: every real one, or only the first of each block (`dae_starts`, PAPER.md D2)."""
    if starts == "all":
        return valid
    first = torch.arange(valid.shape[0], device=valid.device) % backup_steps == 0
    return valid & first[:, None]


def policy_kl(
    raw_adv: Float[Tensor, "n b a"],
    log_temperature: Float[Tensor, ""],
    policy: Float[Tensor, "n b a"],
) -> Float[Tensor, "n b"]:
    """KL(pi_target || pi), pi = softmax(sg(A) / T).                                        Alg. 1 l.26, 29"""
    log_pi = F.log_softmax(raw_adv.detach() / log_temperature.exp(), -1)
    return (torch.xlogy(policy, policy) - policy * log_pi).sum(-1)


def temperature_loss(
    kl: Float[Tensor, "n b"],
    log_temperature: Float[Tensor, ""],
    beta_kl: float,
) -> Float[Tensor, "n b"]:
    """L_T = log T + beta_KL KL(pi_target || pi).                                               Alg. 1 l.29"""
    return log_temperature + beta_kl * kl


def value_weight(eps_wta: Float[Tensor, ""], return_variance: Float[Tensor, ""], floor: float) -> Float[Tensor, ""]:
    """beta_V = (1 - eps_WTA) / Var(G), with a floor where returns hardly vary (PAPER.md D7).     Alg. 1 l.30"""
    return (1 - eps_wta) / return_variance.clamp_min(floor)


def masked_mean(x: Float[Tensor, "n b"], mask: Bool[Tensor, "n b"]) -> Float[Tensor, ""]:
    """Mean over the slots that hold a real transition."""
    return (x * mask).sum() / mask.sum().clamp_min(1)
