"""Algorithm 1: how the agent acts (l.8-9), and one update (l.16-33; l.14-15 are train.py's) from top to bottom."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dae import objective as obj
from dae.config import ActingConfig, LearningConfig, ObjectiveConfig
from dae.diagnostics import update_metrics
from dae.graphs import Captured, fetch
from dae.network import Inputs, Network
from dae.replay import Window

LOG_TEMPERATURE_RANGE = (-12.0, 3.0)


@dataclass
class Signals:
    """What changes from update to update beside the data; 0-d tensors, so that a captured graph can read them."""

    eps_wta: Float[Tensor, ""]
    learning_rate: Float[Tensor, ""]
    return_variance: Float[Tensor, ""]
    reward_scale: Float[Tensor, ""]
    """Standard deviation of the replay's rewards; read where rewards are general."""


@dataclass
class ActorState:
    """What acting carries from step to step, for B environments."""

    core: Float[Tensor, "b s"]
    """Recurrent state before the coming observation."""
    embeddings: Float[Tensor, "k b d"] | None = None
    """The last k embeddings e_t, and ..."""
    resets: Bool[Tensor, "k b"] | None = None
    """... where among them an episode opened: all that an aligned actor remembers."""

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [x for x in (self.core, self.embeddings, self.resets) if x is not None]


class Actor:
    """A network that acts. Playing an exported agent needs no more."""

    def __init__(
        self, network: Network, behaviour: str, burn_in_steps: int, precision: torch.dtype = torch.float32, fast: bool = False
    ):
        self.net, self.behaviour, self.memory_steps, self.precision = network, behaviour, burn_in_steps, precision
        self._choose = Captured(self._greedy, self.device, fast)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.net.parameters()).device

    def initial_state(self, num_envs: int) -> ActorState:
        """Before the first observation of each environment."""
        core = torch.zeros(num_envs, self.net.state_dim, device=self.device)
        if self.behaviour == "recurrent":
            return ActorState(core)
        k, d = self.memory_steps, self.net.sizes.embedding_dim
        opened = torch.ones(k, num_envs, dtype=torch.bool, device=self.device)
        return ActorState(core, torch.zeros(k, num_envs, d, device=self.device), opened)

    @torch.no_grad()
    def features(self, inputs: Inputs, state: ActorState) -> tuple[Float[Tensor, "b d"], ActorState]:
        """h_t of one slot, and the state after it.                                                        # l.8"""
        if state.embeddings is None or state.resets is None:
            trunk = self.net.trunk(inputs, state.core)
            return trunk.features[-1], ActorState(trunk.core)
        # Aligned: the core runs anew, from zero, over the last k embeddings and this one; resets keep episodes apart.
        x = self.net.encoder({name: o.flatten(0, 1) for name, o in inputs.obs.items()})[None]
        embeddings = torch.cat([state.embeddings, self.net.embed(x, inputs)])
        resets = torch.cat([state.resets, inputs.reset])
        features, core = self.net.core(embeddings, resets, torch.zeros_like(state.core))
        return features[-1], ActorState(core, embeddings[1:], resets[1:])

    def act(
        self, inputs: Inputs, state: ActorState, epsilon: float, rng: np.random.Generator,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Int[np.ndarray, "b"], ActorState]:
        """Epsilon-greedy on A, for one slot of B environments; `meanwhile` the device answers.             # l.8-9"""
        parts = inputs.prev_action, inputs.prev_reward, inputs.reset, *(inputs.obs[name] for name in self.net.spec)
        best, *after = self._choose(*parts, *state.tensors())
        state = ActorState(*(tensor.clone() for tensor in after))  # a recorded graph writes over its own at the next step
        answer = fetch(best)
        if meanwhile is not None:
            meanwhile()
        greedy = answer().numpy()
        explore, random = rng.random(greedy.shape) < epsilon, rng.integers(0, self.net.sizes.num_actions, greedy.shape)
        return np.where(explore, random, greedy), state

    @torch.no_grad()
    def _greedy(self, action: Tensor, reward: Tensor, reset: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Tensors in, tensors out: argmax of A, and the state after."""
        names = list(self.net.spec)
        inputs = Inputs(dict(zip(names, more, strict=False)), action, reward, reset)
        with self.autocast():
            features, state = self.features(inputs, ActorState(*more[len(names) :]))
            return self.net.raw_adv(features[None])[0].argmax(-1), *state.tensors()

    def autocast(self) -> torch.autocast:
        """Products of the network in `precision`. Its outputs, and everything behind them, are 32 bits in any case."""
        half = self.precision is torch.bfloat16  # the cache of cast weights is wrong inside a recorded graph
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=False)


class Agent(Actor):
    """The online network, its slow copy (EMA), the temperature, and the optimiser of both."""

    def __init__(
        self,
        network: Network,
        objective: ObjectiveConfig,
        learning: LearningConfig,
        acting: ActingConfig,
        precision: torch.dtype = torch.float32,
        fast: bool = False,
    ):
        super().__init__(network, acting.behaviour, objective.burn_in_steps, precision, fast)
        self.cfg, self.learning = objective, learning
        self.train_steps = objective.train_steps or objective.backup_steps
        device = self.device
        self.ema = copy.deepcopy(network).requires_grad_(False)  # l.2
        slow = Actor(self.ema, self.behaviour, self.memory_steps, precision, fast)
        self.player: Actor = self if acting.eval_weights == "online" else slow
        """Who is scored and played (PAPER.md D33); data are collected by the online network in any case."""
        self.log_temperature = torch.zeros((), device=device, requires_grad=True)  # l.3: log T, so that T > 0 (PAPER.md D3)
        self.ema_temperature = torch.ones((), device=device)  # l.3
        groups: list[dict[str, Any]] = [  # each with a learning rate of its own, a tensor so that a captured graph can read it
            {"params": list(network.parameters()), "lr": torch.zeros((), device=device)},
            {"params": [self.log_temperature], "lr": torch.zeros((), device=device)},
        ]
        self.optimizer = torch.optim.Adam(
            groups, betas=(learning.adam_beta1, learning.adam_beta2), eps=learning.adam_eps,
            fused=device.type in ("cpu", "cuda"), capturable=device.type == "cuda",
        )  # fmt: skip
        vars(self.optimizer)["_warned_capturable_if_run_uncaptured"] = True  # a few plain steps before recording are meant

    # ---------------------------------------------------------------------------------------------------------- learning

    def losses(self, w: Window, s: Signals) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Tensor]]:
        """The four weighted losses of one batch of windows, and what `update_metrics` reports of them."""
        c, k, end = self.cfg, self.cfg.burn_in_steps, self.cfg.burn_in_steps + self.train_steps
        core = w.core_in if c.stored_states else torch.zeros_like(w.core_in)

        with torch.set_grad_enabled(c.burn_in_grad):  # burn-in: slots 0 .. k-1
            start = self.net.trunk(w.inputs[:k], core).core if k else core
        online = self.net.trunk(w.inputs[k:end], start)  # slots k .. k+n-1                               # l.16
        with torch.no_grad():
            ema = self.ema.trunk(w.inputs, core)  # its own unroll, slots 0 .. k+n                        # l.17
            ema_raw_adv, ema_value = self.ema.raw_adv(ema.features[k:end]), self.ema.state_value(ema.features[k:])
        action, reward, valid = w.action[k:], w.reward[k:], w.valid[k:]  # [n, B]
        discount = c.discount * (~w.terminal[k:]).to(reward.dtype)
        raw_adv, value = self.net.raw_adv(online.features), self.net.state_value(online.features)
        outcomes = self.net.outcomes(online.features, action)

        distance = obj.outcome_distance(outcomes.prediction, ema.embedding[k + 1 :])
        if outcomes.predicted_reward is not None:  # general rewards: z tells the reward too (PAPER.md D12)
            distance = distance + c.beta_reward * (outcomes.predicted_reward - (reward / s.reward_scale)[..., None]).square()
        posterior_o = obj.wta_posterior(distance, s.eps_wta)                                              # l.18
        rec = obj.reconstruction_loss(distance, posterior_o)                                              # l.19  Eq. 8
        posterior = obj.joint_posterior(posterior_o, self.net.reward_class(reward), self.net.sizes.num_reward_classes)
        prior = obj.prior_loss(posterior, outcomes.log_prior)                                             # l.20

        luck_counts = (s.eps_wta <= c.luck_from_eps_wta) if c.corrections == "skill+luck" else torch.zeros_like(s.eps_wta)  # l.21
        luck = obj.centre_luck(outcomes.raw_luck, posterior, outcomes.log_prior)                          # l.22  Eq. 7
        luck = luck * luck_counts                                                                         # l.24
        policy = obj.target_policy(ema_raw_adv, self.ema_temperature)                                     # l.26
        adv = obj.centre_advantage(raw_adv, policy, action)                                               # l.27  Eq. 6
        residual = obj.dae_residual(                                                                      # l.28  Eq. 6
            reward, discount, adv, luck, value, ema_value, valid, c.backup_steps, correct_skill=c.corrections != "none"
        )
        starts = obj.start_mask(valid, c.backup_steps, c.dae_starts)
        kl = obj.policy_kl(raw_adv, self.log_temperature, policy)
        temperature = obj.temperature_loss(kl, self.log_temperature, c.beta_kl)                           # l.29

        beta_v = obj.value_weight(s.eps_wta, s.return_variance, c.variance_floor)                         # l.30
        dae = obj.masked_mean(residual.square(), starts)
        weighted = {
            "dae": beta_v * dae,
            "prior": c.beta_prior * obj.masked_mean(prior, valid),
            "rec": c.beta_rec * obj.masked_mean(rec, valid),
            "temperature": obj.masked_mean(temperature, valid),
        }
        parts = {
            "dae": dae, "beta_v": beta_v, "adv": adv, "luck": luck, "value": value, "ema_value": ema_value, "kl": kl,
            "posterior_o": posterior_o, "posterior": posterior, "log_prior": outcomes.log_prior, "policy": policy, "valid": valid,
        }  # fmt: skip
        return weighted, parts

    def update(self, w: Window, s: Signals) -> dict[str, Tensor]:
        """One gradient step. Returns 0-d tensors on the device: reading them is left to whoever needs them."""
        with self.autocast():
            weighted, parts = self.losses(w, s)
        for group, multiplier in zip(self.optimizer.param_groups, (1.0, self.learning.temperature_lr_multiplier), strict=True):
            group["lr"].copy_(s.learning_rate * multiplier)
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(list(weighted.values())).sum().backward()                                             # l.31
        self.optimizer.step()
        with torch.no_grad():
            self.log_temperature.clamp_(*LOG_TEMPERATURE_RANGE)
            weight = 1 - self.learning.ema_decay
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.net.parameters()), weight)        # l.32
            self.ema_temperature.lerp_(self.log_temperature.exp(), weight)                                # l.33
        return update_metrics(weighted, parts, self.log_temperature, s)

    # ------------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that `update` reads and writes, as flat named tensors."""
        state = {f"net.{k}": v for k, v in self.net.state_dict().items()}
        state |= {f"ema.{k}": v for k, v in self.ema.state_dict().items()}
        state |= {"log_temperature": self.log_temperature.detach(), "ema_temperature": self.ema_temperature}
        for i, slots in self.optimizer.state_dict()["state"].items():
            state |= {f"adam.{i}.{k}": v for k, v in slots.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
        self.load_weights(state)
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])
            self.ema_temperature.copy_(state["ema_temperature"])
            for i, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
                slots = self.optimizer.state[p]  # in place, like all of it: a recorded graph knows no other memory
                for slot in slots.values():
                    slot.zero_()
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if (found := state.get(f"adam.{i}.{key}")) is not None:
                        like = p if found.shape == p.shape else found  # a parameter's strides are its moments' too
                        slots.setdefault(key, torch.zeros_like(like, device=self.device)).copy_(found)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """The two networks only, as `train --from` wants it."""
        for name, module in (("net.", self.net), ("ema.", self.ema)):
            module.load_state_dict({k.removeprefix(name): v for k, v in state.items() if k.startswith(name)})
