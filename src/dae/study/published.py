"""What the paper reports: scores of 47 games after 20M frames, mean and standard error over 5 seeds (its two per-game tables).

`published.csv` has a row for each game: the scores of random play and of people that are commonly used for normalisation, then a
mean and a standard error for each agent of the paper. The m=4 agent is the base of its ablations.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FRAMES = 20_000_000
COLUMNS = {
    "m1": "DAE, m=1",
    "m2": "DAE, m=2",
    "m4": "DAE, m=4",
    "m8": "DAE, m=8",
    "no_correction": "m=4, B = 0",
    "no_multistep": "m=4, n = 1",
    "frame_stack": "m=4, frame stack",
}
"""Agents of the paper, and what to call them."""


@dataclass(frozen=True)
class Published:
    """A score of the paper."""

    mean: float
    standard_error: float


@cache
def _rows() -> dict[str, dict[str, str]]:
    with Path(__file__).with_name("published.csv").open(newline="") as file:
        return {row["game"]: row for row in csv.DictReader(file)}


def games() -> list[str]:
    """All 47."""
    return list(_rows())


def game_of(env: str) -> str | None:
    """`Breakout` of `ALE/Breakout-v5`, if the paper has it."""
    name = env.removeprefix("ALE/").rsplit("-v", 1)[0]
    return name if env.startswith("ALE/") and name in _rows() else None


def published(env: str, column: str) -> Published | None:
    """What the paper's agent `column` scored in that environment."""
    game = game_of(env)
    if game is None or not column:
        return None
    row = _rows()[game]
    return Published(float(row[column]), float(row[f"{column}_se"]))


def known_scores(env: str) -> dict[str, float]:
    """Random play and people, by name."""
    game = game_of(env)
    return {} if game is None else {name: float(_rows()[game][name]) for name in ("random", "human")}
