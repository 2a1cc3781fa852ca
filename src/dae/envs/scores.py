"""What chance and a good policy score on the bundled environments: `python -m dae.envs.scores` measures, `load()` reads the result.

Every episode has its own random numbers, spawned from one seed, so that a run with more episodes contains a run with fewer.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypedDict

import gymnasium
import numpy as np
from numpy.typing import NDArray

from dae.envs.pomdps import Jackpot, TMaze

Policy = Callable[[NDArray[np.float32]], int]
"""Observation to action, for one episode: what it remembers begins and ends with it."""
Maker = Callable[[np.random.Generator], Policy]


class Score(TypedDict):
    """Undiscounted return of an episode."""

    policy: str
    mean: float
    standard_error: float
    episodes: int
    seed: int
    exact: float | None
    """Expected return where it is known without measuring; a better yardstick than `mean` then."""


@dataclass(frozen=True)
class Reference:
    """A policy to compare with."""

    words: str
    make: Maker
    exact: float | None
    exact_random: float | None
    """Expected return of the uniformly random policy."""


def uniform(num_actions: int) -> Maker:
    """Any of the actions, whatever is observed."""
    return lambda rng: lambda obs: int(rng.integers(num_actions))


def repeat_first(rng: np.random.Generator) -> Policy:
    """Confounding: either action first, and then the same again."""
    action = int(rng.integers(2))
    return lambda obs: action


def follow_cue(rng: np.random.Generator) -> Policy:
    """TMaze: walk to the junction and turn to where the first observation pointed."""
    cue: list[int] = []

    def act(obs: NDArray[np.float32]) -> int:
        seen = int(obs.argmax())
        if not cue:
            cue.append(TMaze.LEFT if seen == TMaze.CUE_LEFT else TMaze.RIGHT)
        return cue[0] if seen == TMaze.JUNCTION else TMaze.FORWARD

    return act


def balance(rng: np.random.Generator) -> Policy:
    """CartPoleHidden: push where a weighted sum of positions and velocities points; velocities are differences in time."""
    gains, seconds = np.array([0.1, 1.0, 0.2, 0.3]), 0.02  # cart, pole, and their velocities; time between observations
    last: list[NDArray[np.float32]] = []

    def act(obs: NDArray[np.float32]) -> int:
        velocity = (obs - last[0]) / seconds if last else np.zeros(2)
        last[:] = [obs]
        return int(gains @ np.concatenate([obs, velocity]) > 0)

    return act


def always_safe(rng: np.random.Generator) -> Policy:
    """Jackpot: never risk anything."""
    return lambda obs: 0


def references() -> dict[str, Reference]:
    """By environment id."""
    jackpot = Jackpot()
    chances = jackpot.steps // 2  # odd steps; the coins of the even ones add 0 on average
    return {
        "dae/Confounding-v0": Reference("repeats its action", repeat_first, 1.0, 0.5),
        # Whatever a random walker does, the two cues are equally likely: right and wrong turns cancel.
        "dae/TMaze-v0": Reference("remembers the cue", follow_cue, 1.0, 0.0),
        "dae/CartPoleHidden-v0": Reference("linear in differences", balance, None, None),
        "dae/Jackpot-v0": Reference("always plays safe", always_safe, 0.0, -chances * jackpot.risk / 2),
    }


def play(env: gymnasium.Env[Any, Any], policy: Policy, seed: int) -> float:
    """The return of one episode."""
    obs, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(policy(obs))
        total, over = total + float(reward), terminated or truncated
    return total


def measure(env_id: str, maker: Maker | None, episodes: int, seed: int) -> tuple[float, float]:
    """Mean return and its standard error. Without a policy: the uniformly random one's."""
    env = gymnasium.make(env_id, disable_env_checker=True)
    maker = maker or uniform(env.action_space.n)  # type: ignore[attr-defined]
    returns = []
    for episode in np.random.SeedSequence(seed).spawn(episodes):
        for_env, for_policy = episode.spawn(2)
        returns.append(play(env, maker(np.random.default_rng(for_policy)), int(for_env.generate_state(1)[0])))
    env.close()
    return float(np.mean(returns)), float(np.std(returns, ddof=1) / np.sqrt(episodes))


def measure_all(episodes: int = 1000, seed: int = 0) -> dict[str, dict[str, Score]]:
    """{id: {"random": ..., "reference": ...}} of all bundled environments."""
    scores: dict[str, dict[str, Score]] = {}
    for env_id, known in references().items():
        policies = {"random": ("uniformly random", None, known.exact_random), "reference": (known.words, known.make, known.exact)}
        scores[env_id] = {}
        for name, (words, maker, exact) in policies.items():
            mean, error = measure(env_id, maker, episodes, seed)
            scores[env_id][name] = Score(policy=words, mean=mean, standard_error=error, episodes=episodes, seed=seed, exact=exact)
    return scores


def load() -> dict[str, dict[str, Score]]:
    """The scores that come with the package."""
    scores: dict[str, dict[str, Score]] = json.loads(resources.files("dae.envs").joinpath("scores.json").read_text("utf-8"))
    return scores


def table(scores: dict[str, dict[str, Score]]) -> str:
    """For people."""
    lines = [f"{'environment':<24}{'policy':<24}{'mean return':>12}{'std. error':>12}{'exact':>8}{'episodes':>10}"]
    for env_id, by_name in scores.items():
        for s in by_name.values():
            exact = "" if s["exact"] is None else f"{s['exact']:.2f}"
            lines.append(
                f"{env_id:<24}{s['policy']:<24}{s['mean']:>12.3f}{s['standard_error']:>12.3f}{exact:>8}{s['episodes']:>10}"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m dae.envs.scores", description="Measure the bundled environments anew.")
    parser.add_argument("--episodes", type=int, default=1000, help="of each policy on each environment (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="everything random descends from it (default: 0)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scores.json"), help="default: the package's own file")
    options = parser.parse_args()
    if options.episodes < 2:
        parser.error("--episodes: at least 2, for a standard error")
    scores = measure_all(options.episodes, options.seed)
    options.out.write_text(json.dumps(scores, indent=2) + "\n", "utf-8")
    print(table(scores))


if __name__ == "__main__":
    main()
