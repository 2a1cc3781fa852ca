"""Four small POMDPs, each of which needs one thing that the algorithm does. They are laptop-sized; the best return is known.

| id                      | needs                                        | best return |
|-------------------------|----------------------------------------------|-------------|
| `dae/Confounding-v0`    | the history that the actor acted on          | 1           |
| `dae/TMaze-v0`          | a recurrent state that lasts                 | 1           |
| `dae/CartPoleHidden-v0` | velocities from successive observations      | 500         |
| `dae/Jackpot-v0`        | luck kept out of the advantages (Eq. 7)      | 0           |

`metadata["reward_classes"]` declares all rewards that an environment can pay.
"""

from typing import Any

import numpy as np
from gymnasium import Env, spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.error import InvalidAction, ResetNeeded
from numpy.typing import NDArray

from dae.errors import ConfigError

Obs = NDArray[np.float32]
Picture = NDArray[np.uint8]
Colour = tuple[int, int, int]

WHITE, PALE, GREY, DARK = (255, 255, 255), (232, 232, 236), (180, 180, 188), (70, 70, 78)
BLUE, GREEN, RED, ORANGE, GOLD = (40, 96, 200), (46, 150, 80), (205, 50, 50), (240, 150, 50), (245, 200, 50)


class _Small(Env[Obs, np.int64]):
    """What the three hand-made ones share: one float32 vector observed, few actions, a picture drawn with NumPy."""

    def __init__(self, low: float, high: float, size: int, num_actions: int, render_mode: str | None):
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"render_mode={render_mode}: must be one of {', '.join(self.metadata['render_modes'])}")
        self.observation_space = spaces.Box(low, high, (size,), np.float32)
        self._eye = np.eye(size, dtype=np.float32)
        self.action_space = spaces.Discrete(num_actions)
        self.render_mode = render_mode
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._over = False
        self._start()
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        if self._over:  # a loop that steps past the end would otherwise learn from transitions that don't exist
            raise ResetNeeded("the episode is over: call reset()")
        if not self.action_space.contains(action):
            raise InvalidAction(f"{action!r} is not in {self.action_space}")
        reward, self._over = self._move(int(action))
        return self._observe(), reward, self._over, False, {}

    def render(self) -> Picture | None:
        if self.render_mode is None:
            return None
        picture = np.full((160, 160, 3), WHITE, np.uint8)
        self._draw(picture)
        return picture

    def _one_hot(self, index: int) -> Obs:
        return self._eye[index].copy()

    def _start(self) -> None:
        """Begin an episode."""
        raise NotImplementedError

    def _move(self, action: int) -> tuple[float, bool]:
        """Reward, and whether that was the episode's end."""
        raise NotImplementedError

    def _observe(self) -> Obs:
        raise NotImplementedError

    def _draw(self, picture: Picture) -> None:
        raise NotImplementedError


class Confounding(_Small):
    """The paper's toy (App. 'Confounding'): two actions, and a reward of 1 if the second repeats the first.

        o0 --up/down--> s1 or s2, which look the same (o1) --up/down--> end

    Tests: that values are learned on the history which the actor acted on. Where the actor remembers its first action and the
    learner does not, every trajectory of a good actor is paid 1 whatever its last action is, and the learner concludes
    V(o1) = Q(o1, up) = Q(o1, down) = 1 for any policy. Nothing in Eq. 6-8 repairs that. Stored recurrent states or a long enough
    burn-in do (`stored_states`, `burn_in_steps`); `behaviour=aligned` makes the actor forget what the learner can't see.

    An agent that is told its previous action, as ours is, knows a_0 at o_1 without any memory. `gap` puts that many steps between
    the two, on which actions do nothing; with 0 this is the paper's toy.

    Observation: one-hot of the step (o0, the gap's, o1, the end). Actions: 0 up, 1 down.
    Best return 1, by repeating; uniformly random 0.5.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2, "reward_classes": (0.0, 1.0)}

    def __init__(self, gap: int = 0, render_mode: str | None = None):
        if gap < 0:
            raise ConfigError(f"gap={gap}: must be 0 or more")
        super().__init__(0, 1, 3 + gap, 2, render_mode)
        self.gap = gap
        self._actions: list[int] = []

    def _start(self) -> None:
        self._actions = []

    def _move(self, action: int) -> tuple[float, bool]:
        self._actions.append(action)
        over = len(self._actions) == 2 + self.gap
        return float(over and self._repeated()), over

    def _repeated(self) -> bool:
        return self._actions[0] == self._actions[-1]

    def _observe(self) -> Obs:
        return self._one_hot(len(self._actions))

    def _draw(self, picture: Picture) -> None:
        """States left to right, s1 and s2 in the box; the way taken is blue, the end green if it paid and red if not."""
        start, middle, end = (0.14, 0.5), ((0.5, 0.24), (0.5, 0.76)), (0.86, 0.5)
        taken = self._actions[:1] + self._actions[1 + self.gap :]
        _box(picture, 0.38, 0.08, 0.62, 0.92, PALE)
        for first in (0, 1):
            _curve(picture, start, middle[first], 0, BLUE if taken[:1] == [first] else GREY)
            for second in (0, 1):
                _curve(picture, middle[first], end, 0.24 * second - 0.12, BLUE if taken == [first, second] else GREY)
        for place in (start, *middle, end):
            _disc(picture, place, 0.075, DARK)
            _disc(picture, place, 0.06, WHITE)
        here = (start, middle[taken[0]] if taken else start, end)[len(taken)]
        _disc(picture, here, 0.06, BLUE if not self._over else GREEN if self._repeated() else RED)


class TMaze(_Small):
    """A corridor of `length` steps with a junction at its end. The first observation alone tells which turn pays.

    Tests: memory. At the junction the cue lies at least `length` observations back and nothing since depends on it, so that a stack
    of 4 frames scores 0 at best and the recurrent state has to last. Exploration is no obstacle: turns do nothing in the corridor
    and there is no way back, so that a random walk needs 3 * length + 1.5 steps on average, and only 2 of 10^8 episodes meet the
    limit of 100 steps. What is left to learn is what to remember.

    What pays: the LSTM with burn-in and stored states. A gradient from the junction reaches the cue only inside the trained part of
    a window: `train_steps` should exceed `length`, better several times, since early walks are slow. Exploratory turns only waste
    time, which the skill correction (Eq. 6) accounts for. Once the cue is seen nothing is random: the luck correction (Eq. 7) has
    nothing to correct.

    A longer corridor wants a longer limit too: `gymnasium.make("dae/TMaze-v0", length=50, max_episode_steps=500)`.

    Observation: one-hot of (cue left, cue right, corridor, junction, end). Actions: 0 forward, 1 left, 2 right.
    Rewards: 1 for the right turn, -1 for the wrong one; both end the episode. Best return 1; without memory 0.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8, "reward_classes": (-1.0, 0.0, 1.0)}
    FORWARD, LEFT, RIGHT = 0, 1, 2
    CUE_LEFT, CUE_RIGHT, CORRIDOR, JUNCTION, END = range(5)

    def __init__(self, length: int = 10, render_mode: str | None = None):
        if length < 1:
            raise ConfigError(f"length={length}: must be at least 1")
        super().__init__(0, 1, 5, 3, render_mode)
        self.length = length
        self._goal, self._position, self._turn, self._first = self.LEFT, 0, 0, True

    def _start(self) -> None:
        self._goal = int(self.np_random.integers(self.LEFT, self.RIGHT + 1))
        self._position, self._turn, self._first = 0, 0, True

    def _move(self, action: int) -> tuple[float, bool]:
        self._first = False
        if action == self.FORWARD:
            self._position = min(self._position + 1, self.length)
        elif self._position == self.length:
            self._turn = action
            return (1.0 if action == self._goal else -1.0), True
        return 0.0, False

    def _observe(self) -> Obs:
        if self._first:
            return self._one_hot(self.CUE_LEFT if self._goal == self.LEFT else self.CUE_RIGHT)
        if self._turn:
            return self._one_hot(self.END)
        return self._one_hot(self.JUNCTION if self._position == self.length else self.CORRIDOR)

    def _draw(self, picture: Picture) -> None:
        """Seen from above, walking to the right. The paying arm is green for whoever watches; the agent does not see it."""
        cell = 0.92 / (self.length + 1)
        wide = min(cell, 0.1)
        arm = {self.LEFT: 0.5 - 2.5 * wide, self.RIGHT: 0.5 + 2.5 * wide}
        junction = 0.04 + self.length * cell
        _box(picture, 0.04, 0.5 - wide / 2, junction + wide, 0.5 + wide / 2, GREY)
        _box(picture, junction, arm[self.LEFT], junction + wide, arm[self.RIGHT], GREY)
        ends = {
            side: (arm[side] - (wide if side == self.LEFT else 0), arm[side] + (wide if side == self.RIGHT else 0)) for side in arm
        }
        for side, (top, bottom) in ends.items():
            _box(picture, junction, top, junction + wide, bottom, GREEN if side == self._goal else RED)
        if self._first:  # the cue, beside the start, on the side of the turn that pays
            top, bottom = ends[self._goal]
            _box(picture, 0.04, top, 0.04 + wide, bottom, GOLD)
        here = sum(ends[self._turn]) / 2 if self._turn else 0.5
        _disc(picture, (0.04 + self._position * cell + wide / 2, here), max(0.42 * wide, 0.015), BLUE)


class CartPoleHidden(CartPoleEnv):
    """Gymnasium's CartPole-v1 without the velocities: 1 for each step, at most 500 of them.

    Tests: that hidden velocities are inferred from successive observations. Two of them and the action between tell the whole
    state, after which nothing is random: the skill correction (Eq. 6) pays, the luck correction (Eq. 7) has next to nothing to
    correct and must not cost much. The limit of 500 truncates: a learner that takes it for a failure sees it here.

    Observation: (cart position, pole angle). Actions: 0 left, 1 right. Best return 500.
    """

    metadata = {**CartPoleEnv.metadata, "render_modes": ["rgb_array"], "reward_classes": (1.0,)}

    def __init__(self, render_mode: str | None = None):
        super().__init__(render_mode=render_mode)
        high = np.array([2 * self.x_threshold, 2 * self.theta_threshold_radians], np.float32)  # the fall itself lies within
        self.observation_space = spaces.Box(-high, high)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        state, info = super().reset(seed=seed, options=options)
        return self._visible(state), info

    def step(self, action: Any) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        state, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return self._visible(state), reward, terminated, truncated, info

    @staticmethod
    def _visible(state: Obs) -> Obs:
        return state[[0, 2]]


class Jackpot(_Small):
    """Large luck, small skill: at even steps a coin pays plus or minus `stake`, at odd steps action 1 is a small mistake.

    Tests: the luck correction (Eq. 7). Even steps: a coin is tossed, whatever the action. Odd steps: action 0 pays nothing, action
    1 loses 1 with probability `risk`, so that it costs `risk` on average and never gains. Without B the residual of a window keeps
    the coins tossed since its start, which the history shows. Advantages are centred under the target policy but the data follow
    another one: exploratory actions look good in histories that were lucky and bad in unlucky ones. So count the wrong actions at
    odd steps, after a win and after a loss; the return hardly tells (standard deviation 2, and 0.2 between random and best).

    Observation: one-hot of the step (0 .. steps; the last one is the end) and the coin just tossed: 1 or -1 at odd steps, else 0. A
    loss at an odd step shows in its reward, as the coins do too. Actions: 0 safe, 1 risky. Best return 0 on average.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2, "reward_classes": (-1.0, 0.0, 1.0)}

    def __init__(self, steps: int = 8, risk: float = 0.1, stake: float = 1.0, render_mode: str | None = None):
        if steps < 1:
            raise ConfigError(f"steps={steps}: must be at least 1")
        if not 0 <= risk <= 1:
            raise ConfigError(f"risk={risk}: must be between 0 and 1")
        if not stake > 0:
            raise ConfigError(f"stake={stake}: must be above 0")
        super().__init__(-1, 1, steps + 2, 2, render_mode)
        self.steps, self.risk, self.stake = steps, risk, float(stake)
        self.metadata = {**self.metadata, "reward_classes": tuple(sorted({-self.stake, -1.0, 0.0, self.stake}))}
        self._past: list[tuple[int, float]] = []  # (action, reward) of each step

    def _start(self) -> None:
        self._past = []

    def _move(self, action: int) -> tuple[float, bool]:
        chance = self.np_random.random()  # one draw per step: the same seed tosses the same coins whatever the actions are
        if len(self._past) % 2 == 0:
            reward = self.stake if chance < 0.5 else -self.stake
        else:
            reward = -1.0 if action == 1 and chance < self.risk else 0.0
        self._past.append((action, reward))
        return reward, len(self._past) == self.steps

    def _observe(self) -> Obs:
        obs = self._one_hot(len(self._past))
        if len(self._past) % 2 == 1:
            obs[-1] = np.sign(self._past[-1][1])
        return obs

    def _draw(self, picture: Picture) -> None:
        """A column for each step: coins won are gold and up, lost dark and down; safe is grey, risky orange, risky and lost red."""
        wide = 0.92 / self.steps
        for i in range(self.steps):
            x = 0.04 + (i + 0.5) * wide
            if i == len(self._past):
                _box(picture, x - wide / 2, 0.08, x + wide / 2, 0.78, PALE)
            if i >= len(self._past):
                _disc(picture, (x, 0.43), 0.02, GREY)
            elif i % 2 == 0:
                won = self._past[i][1] > 0
                _disc(picture, (x, 0.22 if won else 0.64), min(0.45 * wide, 0.08), GOLD if won else DARK)
            else:
                action, reward = self._past[i]
                colour = GREY if action == 0 else RED if reward < 0 else ORANGE
                _box(picture, x - 0.3 * wide, 0.38, x + 0.3 * wide, 0.48, colour)
        total, most = sum(reward for _, reward in self._past), self.steps * max(1.0, self.stake) / 2
        _box(picture, 0.5, 0.86, 0.5 + 0.46 * max(-1.0, total / most), 0.93, GREEN if total > 0 else RED)  # the return so far
        _box(picture, 0.495, 0.84, 0.505, 0.95, DARK)


def _box(picture: Picture, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
    """Filled rectangle; all places are shares of the picture's side, from the upper left."""
    x, y = (sorted(round(edge * len(picture)) for edge in edges) for edges in ((left, right), (top, bottom)))
    picture[y[0] : y[1], x[0] : x[1]] = colour


def _disc(picture: Picture, centre: tuple[float, float], radius: float, colour: Colour) -> None:
    y, x = (np.indices(picture.shape[:2]) + 0.5) / len(picture)
    picture[np.hypot(x - centre[0], y - centre[1]) <= radius] = colour


def _curve(picture: Picture, start: tuple[float, float], end: tuple[float, float], bend: float, colour: Colour) -> None:
    """A line, whose middle is moved down by `bend`."""
    for along in np.linspace(0, 1, 48):
        x, y = ((1 - along) * a + along * b for a, b in zip(start, end, strict=True))
        _disc(picture, (x, y + 4 * bend * along * (1 - along)), 0.01, colour)
