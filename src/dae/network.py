"""Observations to numbers: encoder, core and heads (the paper's Figure "network architecture", sizes in PAPER.md D4).

`Network.trunk` is the only way through encoder and core, for one step of acting and for a whole window alike.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dae.encoders import Encoder, ObsSpec, rms_norm
from dae.lstm import BlockLSTM


@dataclass(frozen=True)
class Inputs:
    """What the network sees at each slot, [T, B, ...]."""

    obs: Mapping[str, Tensor]
    """o_t and the frames before it, [T, B, stack, *shape]."""
    prev_action: Int[Tensor, "t b"]
    """a_{t-1}; whatever stands there where `reset`."""
    prev_reward: Float[Tensor, "t b"]
    """r_{t-1}, likewise."""
    reset: Bool[Tensor, "t b"]
    """o_t opens an episode: forget the recurrent state, the action and the reward before it."""

    def __getitem__(self, slots: slice) -> "Inputs":
        return Inputs(
            {k: v[slots] for k, v in self.obs.items()}, self.prev_action[slots], self.prev_reward[slots], self.reset[slots]
        )


@dataclass(frozen=True)
class Trunk:
    """What comes out of encoder and core."""

    embedding: Float[Tensor, "t b d"]
    """x_t, of the observation alone."""
    features: Float[Tensor, "t b d"]
    """What the heads see: the history h_t, as the core knows it."""
    core: Float[Tensor, "b s"]
    """The recurrent state after the last slot."""


@dataclass(frozen=True)
class Outcomes:
    """What the heads say of (h_t, a_t) and what may come of it."""

    prediction: Float[Tensor, "t b o d"]
    """x_hat_{t+1,z}."""
    predicted_reward: Float[Tensor, "t b o"] | None
    """r_hat_z in units of the rewards' standard deviation; general rewards only (PAPER.md D12)."""
    log_prior: Float[Tensor, "t b z"]
    """log p(z | h_t, a_t)."""
    raw_luck: Float[Tensor, "t b z"]
    """g(h_t, a_t, z), before centring."""


@dataclass(frozen=True)
class Sizes:
    """Everything that fixes the shape of the network."""

    num_actions: int
    reward_classes: tuple[float, ...]
    """Empty: general rewards."""
    frame_stack: int
    num_outcomes: int
    width: float
    encoder: str
    skipinit: bool
    embedding_dim: int
    core: str
    core_dim: int
    core_blocks: int
    value_hidden: int
    prediction_hidden: int
    prior_hidden: int
    normalise_predictions: bool
    outcome_prior: str
    luck_form: str

    @property
    def num_reward_classes(self) -> int:
        """|R|; one where rewards are general and Z = Z_O."""
        return max(1, len(self.reward_classes))


def head(inputs: int, hidden: int, outputs: int, last_gain: float | None = None) -> nn.Sequential:
    """One hidden layer, normalised before the nonlinearity."""
    last = nn.Linear(hidden, outputs)
    if last_gain is not None:
        nn.init.orthogonal_(last.weight, last_gain)
        nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.ReLU(), last)


class RecurrentCore(nn.Module):
    """y = LN(e + W_p h): the residual connection runs around LSTM and projection (Kim et al. 2017)."""

    def __init__(self, embedding_dim: int, core_dim: int, blocks: int):
        super().__init__()
        self.lstm = BlockLSTM(embedding_dim, core_dim, blocks)
        self.project = nn.Linear(core_dim, embedding_dim, bias=False)
        self.norm = nn.LayerNorm(embedding_dim)
        self.state_dim = self.lstm.state_dim

    def forward(self, e: Tensor, reset: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, state = self.lstm(e, reset, state)
        return self.norm(e + self.project(h)), state


class FeedForwardCore(nn.Module):
    """The frame-stacking ablation: one hidden layer with about as many parameters in the LSTM's place, residual kept."""

    state_dim = 0

    def __init__(self, embedding_dim: int, core_dim: int, blocks: int):
        super().__init__()
        lstm = 4 * core_dim * (embedding_dim + core_dim // blocks + 1) + core_dim * embedding_dim
        hidden = max(64, round(lstm / (2 * embedding_dim + 3) / 64) * 64)
        self.mlp = head(embedding_dim, hidden, embedding_dim)
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, e: Tensor, reset: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(e + self.mlp(e)), state


class Network(nn.Module):
    """f_theta of Algorithm 1."""

    def __init__(self, spec: ObsSpec, sizes: Sizes):
        super().__init__()
        s, d = sizes, sizes.embedding_dim
        self.sizes, self.spec = sizes, dict(spec)
        self.encoder = Encoder(spec, s.frame_stack, d, s.width, s.encoder, s.skipinit)
        self.prev_action = nn.Embedding(s.num_actions + 1, d)  # the last row: none, at an episode's first step
        self.prev_reward = nn.Embedding(len(s.reward_classes) + 1, d) if s.reward_classes else nn.Linear(1, d)
        self.core = (RecurrentCore if s.core == "lstm" else FeedForwardCore)(d, s.core_dim, s.core_blocks)
        self.reward_values: Tensor
        self.register_buffer("reward_values", torch.tensor(s.reward_classes), persistent=False)

        self.adv = head(d, s.value_hidden, s.num_actions, last_gain=0.1)
        self.value = head(d, s.value_hidden, 1, last_gain=1.0)
        luck_outputs = s.num_outcomes * s.num_reward_classes if s.luck_form == "product" else s.num_outcomes + s.num_reward_classes
        self.luck = head(2 * d, s.value_hidden, luck_outputs, last_gain=0.1)

        self.next_action = nn.Embedding(s.num_actions, d)  # conditions luck and transition heads on a_t
        per_outcome = d + (0 if s.reward_classes else 1)
        self.prediction = head(2 * d, s.prediction_hidden, s.num_outcomes * per_outcome)
        joint = s.outcome_prior == "joint" or not s.reward_classes
        self.prior = head(2 * d, s.prior_hidden, s.num_outcomes * (s.num_reward_classes if joint else 1))
        self.next_reward = None if joint else head(2 * d, s.prior_hidden, s.num_reward_classes)

    @property
    def state_dim(self) -> int:
        """Width of the recurrent state."""
        return int(self.core.state_dim)

    def reward_class(self, reward: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Index of each reward among the declared classes; 0 where rewards are general."""
        if not self.sizes.reward_classes:
            return torch.zeros_like(reward, dtype=torch.long)
        return (reward[..., None] - self.reward_values).abs().argmin(-1)

    def embed(self, x: Float[Tensor, "t b d"], inputs: Inputs) -> Float[Tensor, "t b d"]:
        """e_t = x_t + Emb(a_{t-1}) + Emb(r_{t-1}); `none` for both at an episode's first step."""
        action = inputs.prev_action.masked_fill(inputs.reset, self.sizes.num_actions)
        if isinstance(self.prev_reward, nn.Embedding):
            reward = self.reward_class(inputs.prev_reward).masked_fill(inputs.reset, len(self.sizes.reward_classes))
            return x + self.prev_action(action) + self.prev_reward(reward)
        reward = inputs.prev_reward.masked_fill(inputs.reset, 0.0)[..., None]
        return x + self.prev_action(action) + self.prev_reward(reward.sign() * reward.abs().log1p())

    def trunk(self, inputs: Inputs, core: Float[Tensor, "b s"]) -> Trunk:
        """Encoder and core over the slots of `inputs`, from the state BEFORE the first of them."""
        shape = inputs.reset.shape
        x = self.encoder({name: o.flatten(0, 1) for name, o in inputs.obs.items()}).unflatten(0, shape)  # [T, B, d]
        features, core = self.core(self.embed(x, inputs), inputs.reset, core)
        return Trunk(x, features, core)

    def raw_adv(self, features: Float[Tensor, "t b d"]) -> Float[Tensor, "t b a"]:
        """f_A(h_t, .), before centring."""
        return self.adv(features).float()

    def state_value(self, features: Float[Tensor, "t b d"]) -> Float[Tensor, "t b"]:
        """V(h_t)."""
        return self.value(features).float().squeeze(-1)

    def outcomes(self, features: Float[Tensor, "t b d"], action: Int[Tensor, "t b"]) -> Outcomes:
        """The discrete latent dynamics model and luck, for the action taken."""
        s = self.sizes
        ha = torch.cat([features, self.next_action(action)], -1)  # [T, B, 2d]
        prediction, predicted_reward = self.prediction(ha).float().unflatten(-1, (s.num_outcomes, -1)), None
        if not s.reward_classes:
            prediction, predicted_reward = prediction[..., :-1], prediction[..., -1]
        if s.normalise_predictions:
            prediction = rms_norm(prediction)
        log_prior, raw_luck = self.prior(ha).float().log_softmax(-1), self.luck(ha).float()
        if self.next_reward is not None:  # p(z) = p(z_o) p(c)
            log_prior = (log_prior[..., :, None] + self.next_reward(ha).float().log_softmax(-1)[..., None, :]).flatten(-2)
        if s.luck_form == "additive":
            of_obs, of_reward = raw_luck.split([s.num_outcomes, s.num_reward_classes], -1)
            raw_luck = (of_obs[..., :, None] + of_reward[..., None, :]).flatten(-2)
        return Outcomes(prediction, predicted_reward, log_prior, raw_luck)

    def component_sizes(self) -> dict[str, int]:
        """Parameters by the rows of the paper's table, embeddings of actions and rewards in a row of their own."""
        rows: dict[str, list[nn.Module | None]] = {
            "encoder": [self.encoder],
            "core": [self.core],
            "transition model": [self.prediction, self.prior, self.next_reward],
            "value heads": [self.adv, self.luck, self.value],
            "action and reward embeddings": [self.prev_action, self.prev_reward, self.next_action],
        }
        return {row: sum(p.numel() for m in parts if m is not None for p in m.parameters()) for row, parts in rows.items()}


def make_sizes(network: object, num_actions: int, reward_classes: tuple[float, ...], **more: object) -> Sizes:
    """`Sizes` from a NetworkConfig and the few numbers that lie elsewhere."""
    names = {f.name for f in dataclasses.fields(Sizes)}
    known = {f.name: getattr(network, f.name) for f in dataclasses.fields(network) if f.name in names}  # type: ignore[arg-type]
    return Sizes(num_actions=num_actions, reward_classes=reward_classes, **known, **more)  # type: ignore[arg-type]
