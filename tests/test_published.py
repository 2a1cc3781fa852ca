"""The paper's numbers, against a few that were typed out of its tables by hand."""

import gymnasium as gym
import pytest

from dae.study import published


@pytest.mark.parametrize(
    ("game", "column", "mean", "error"),
    [
        ("Alien", "m1", 2310.7, 314.3),
        ("Breakout", "m1", 418.9, 8.5),
        ("Zaxxon", "m8", 17897.6, 1049.9),
        ("BattleZone", "frame_stack", 26240.0, 1349.7),
        ("DoubleDunk", "no_multistep", -11.5, 1.0),
        ("Gopher", "no_correction", 4191.4, 450.7),
    ],
)
def test_rows_of_the_paper(game, column, mean, error):
    found = published.published(f"ALE/{game}-v5", column)
    assert (found.mean, found.standard_error) == (mean, error)


def test_all_games_are_there_and_exist():
    """Catches: a game that ale-py calls otherwise."""
    ale = pytest.importorskip("ale_py")
    gym.register_envs(ale)
    assert len(published.games()) == 47
    assert [name for name in published.games() if f"ALE/{name}-v5" not in gym.registry] == []
    for name in published.games():
        assert all(published.published(f"ALE/{name}-v5", column) for column in published.COLUMNS)
        assert published.known_scores(f"ALE/{name}-v5").keys() == {"random", "human"}


def test_what_the_paper_does_not_have():
    assert published.published("dae/TMaze-v0", "m1") is None
    assert published.published("ALE/Breakout-v5", "") is None
    assert published.known_scores("ALE/MontezumaRevenge-v5") == {}
