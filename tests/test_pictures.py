"""The learning curve."""

import json

import numpy as np
import pytest

from dae.run.pictures import learning_curve


def write(folder, **files):
    for name in ("episodes", "metrics", "eval"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in files.get(name, [])))


def test_scores_of_0_and_1_have_a_curve(tmp_path, monkeypatch):
    """Catches: two lines of dots and no mean, and a legend that lies over the points."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    scores = np.random.default_rng(0).random(2_000) < np.linspace(0.1, 0.9, 2_000)
    rows = [{"agent_steps": 10 * i, "score": float(score)} for i, score in enumerate(scores)]
    write(
        tmp_path,
        episodes=rows,
        eval=[{"agent_steps": 5_000 * i, "score": score} for i in range(1, 5) for score in (0.0, 1.0)],
        metrics=[{"agent_steps": 1_000 * i, "dae/adv_size": i / 20, "dae/luck_size": 0.0} for i in range(20)],
    )
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert learning_curve(tmp_path, "a maze").stat().st_size > 10_000
    figure = pyplot.gcf()
    (mean,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "mean of the last 100"]
    np.testing.assert_allclose(mean.get_ydata(), [scores[i - 100 : i].mean() for i in range(100, 2_001)], atol=1e-9)
    for axes in figure.axes:
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1 - 1


def test_a_run_without_an_episode_has_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path)
    assert learning_curve(tmp_path, "nothing yet").exists()
