"""Pictures of a study: learning curves as small multiples, and Jackpot's wrong choices."""

from pathlib import Path
from typing import Any

import numpy as np

from dae.envs import scores
from dae.errors import MissingExtra
from dae.run.pictures import have
from dae.study.published import FRAMES, game_of, known_scores, published
from dae.study.table import Curve, Results, estimate, shares, short, thousands

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555", "#E69F00", "#56B4E9")
"""Okabe and Ito's, which stay apart for the colour-blind."""
LINES = ("-", "-", "-", "-", (0, (4, 1.5)), "-", "-")
WITH_LUCK, WITHOUT_LUCK = "full", "luck-off"


def pyplot() -> Any:
    """Matplotlib, drawing to files."""
    if not have("matplotlib"):
        raise MissingExtra("the pictures", "plots")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"})
    return plt


def draw_curves(results: Results, path: Path) -> Path:
    """A panel for each environment: mean over seeds, 95% band, and what random play and a good policy score."""
    plt = pyplot()
    columns = min(3, len(results.curves))
    rows = -(-len(results.curves) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.3 * columns, 3.1 * rows + 0.7), squeeze=False, layout="constrained")
    for axes in grid.flat[len(results.curves) :]:
        axes.remove()
    for i, (env, curves) in enumerate(results.curves.items()):
        axes = grid.flat[i]
        for j, agent in enumerate(results.titles):
            if agent in curves:
                _band(axes, curves[agent], COLOURS[j % len(COLOURS)], LINES[j % len(LINES)])
                _published(axes, env, results.published.get(agent, ""), COLOURS[j % len(COLOURS)])
        _known_scores(axes, env, curves)
        axes.set_title(short(env), loc="left")
        axes.xaxis.set_major_formatter(lambda x, _: thousands(x) if x else "0")
        axes.set_xlim(left=0)
        if i % columns == 0:
            axes.set_ylabel("score, mean over episodes")
        if i >= len(results.curves) - columns:
            axes.set_xlabel("agent steps")
    lines = [
        plt.Line2D([], [], color=COLOURS[j % len(COLOURS)], ls=LINES[j % len(LINES)], lw=2.2) for j in range(len(results.titles))
    ]
    figure.legend(lines, results.titles.values(), loc="outside upper left", ncols=len(lines), frameon=False)
    return _save(plt, figure, path)


def _band(axes: Any, curve: Curve, colour: str, line: Any) -> None:
    points = [estimate(column) for column in curve.scores.T]
    mean, half = np.array([p.mean for p in points]), np.nan_to_num(np.array([p.half for p in points]))
    axes.plot(curve.agent_steps, mean, color=colour, lw=2.2, ls=line, solid_capstyle="round")
    axes.fill_between(curve.agent_steps, mean - half, mean + half, color=colour, alpha=0.13, lw=0)


def _published(axes: Any, env: str, column: str, colour: str) -> None:
    """What the paper's own agent scored at the end of its run: mean and standard error over its 5 seeds."""
    found = published(env, column)
    if found is None:
        return
    axes.errorbar(
        FRAMES / 4, found.mean, found.standard_error, fmt="D", ms=6, color=colour, mfc="white", mew=1.5, capsize=4, clip_on=False
    )
    axes.annotate("paper", (FRAMES / 4, found.mean), (-8, 0), textcoords="offset points", ha="right", va="center", fontsize=8)


def _known_scores(axes: Any, env: str, curves: dict[str, Curve]) -> None:
    """Dashed lines, named at the right; the y-axis shows what seeds scored, and does not grow with the bands."""
    known = scores.load().get(env, {})
    values = {name: s["mean"] if s["exact"] is None else s["exact"] for name, s in known.items()} or known_scores(env)
    low = min([*values.values(), axes.get_ylim()[0] if game_of(env) else np.inf, *(float(c.scores.min()) for c in curves.values())])
    high = max(
        [*values.values(), axes.get_ylim()[1] if game_of(env) else -np.inf, *(float(c.scores.max()) for c in curves.values())]
    )
    margin = 0.08 * (high - low or 1)
    axes.set_ylim(low - margin, high + margin)
    for name, value in values.items():
        axes.axhline(value, color="black", lw=0.9, ls=(0, (2, 2)), zorder=1)
        axes.annotate(
            name, (1, value), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
            ha="right", va="bottom", fontsize=8,
        )  # fmt: skip


def draw_jackpot(results: Results, path: Path) -> Path:
    """How often the greedy policy takes the risky action after a coin won and after one lost, with and without luck."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    sides = (("won", "after a coin won", "#E69F00"), ("lost", "after a coin lost", "#4A4A55"))
    groups = ((WITH_LUCK, "luck B in the objective"), (WITHOUT_LUCK, "without it (B = 0)"))
    for g, (agent, _) in enumerate(groups):
        for s, (after, label, colour) in enumerate(sides):
            each = 100 * np.array(shares(results.choices, agent, after))
            if not len(each):
                continue
            x, mean = g + 0.36 * (s - 0.5), each.mean()
            axes.bar(x, mean, 0.32, color=colour, label=label if g == 0 else None, zorder=2)
            axes.plot(
                x + np.linspace(-0.1, 0.1, len(each)), each, "o", ms=5, mfc="white", mec="black", mew=1, zorder=3, clip_on=False
            )
            axes.annotate(
                f"{mean:.0f}%", (x, max(mean, each.max())), (0, 7), textcoords="offset points", ha="center", weight="bold"
            )
    axes.axhline(50, color="black", lw=0.9, ls=(0, (2, 2)), zorder=1)
    axes.annotate("chance", (1.47, 50), (0, 2), textcoords="offset points", ha="right", va="bottom", fontsize=8)
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 25), [f"{y}%" for y in range(0, 101, 25)])
    axes.set_xticks(range(2), [words for _, words in groups], fontsize=11)
    axes.set_ylabel("wrong choices of the greedy policy")
    axes.set_title("Jackpot: does a coin toss change the choice that follows?", loc="left")
    axes.legend(frameon=False, loc="upper left", title="dots: seeds", alignment="left")
    return _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
