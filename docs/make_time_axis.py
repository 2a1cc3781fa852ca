"""docs/img/time_axis.png: one window of the replay, who sees which slot, and what happens at an episode's end.

python docs/make_time_axis.py
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

K, N = 4, 6  # of the picture; the paper has 16 and 16
BURN_IN, TRAINED, LAST, INK, SOFT = "#e3e6ec", "#cfe3f7", "#fbe5c8", "#222831", "#6b7280"
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
PATH = Path(__file__).with_name("img") / "time_axis.png"


def title(axes: Any, text: str) -> None:
    """Of a panel."""
    axes.set_title(text, loc="left", fontsize=11, weight="bold")


def cell(axes: Any, x: float, y: float, text: str, colour: str, edge: str = "white", ink: str = INK) -> None:
    """One slot of one row."""
    axes.add_patch(plt.Rectangle((x + 0.03, y - 0.4), 0.94, 0.8, fc=colour, ec=edge, lw=1.4))
    axes.text(x + 0.5, y, text, ha="center", va="center", fontsize=9.5, color=ink)


def row(axes: Any, y: float, name: str) -> None:
    """The name of a row, at the left."""
    axes.text(-0.15, y, name, ha="right", va="center", fontsize=9.5, color=INK)


def span(axes: Any, left: float, right: float, y: float, text: str, colour: str) -> None:
    """An arrow over some slots, with words above it."""
    arrow = {"arrowstyle": "->", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (right, y), (left, y), arrowprops=arrow)
    axes.text((left + right) / 2, y + 0.14, text, ha="center", va="bottom", fontsize=9, color=colour)


def colour_of(t: int) -> str:
    """Burn-in, trained, or the slot that is only bootstrapped from."""
    return BURN_IN if t < K else TRAINED if t < K + N else LAST


def window(axes: Any) -> None:
    """Without an episode's end."""
    total = K + N
    title(axes, f"A window: k = {K} slots of burn-in, n = {N} trained, one to bootstrap from")
    for t in range(total + 1):
        axes.text(t + 0.5, 5.75, str(t), ha="center", va="center", fontsize=9, color=SOFT)
        cell(axes, t, 5, f"$o_{{{t}}}$", colour_of(t))
        cell(axes, t, 4, f"$a_{{{t - 1}}},\\ r_{{{t - 1}}}$", colour_of(t))
        cell(axes, t, 3, f"$a_{{{t}}},\\ r_{{{t}}}$" if t < total else "", colour_of(t) if t < total else "#f6f6f6")
    for y, name in ((5.75, "slot"), (5, "observation"), (4, "action, reward before it"), (3, "transition that left it")):
        row(axes, y, name)
    row(axes, 2, "online network")
    span(axes, 0, K, 1.85, "brings the state up to date, no gradient", SOFT)
    span(axes, K, total, 1.85, "A, B, V, x̂, p", BLUE)
    row(axes, 1, "slow network (EMA)")
    span(axes, 0, K, 0.85, "burn-in of its own", SOFT)
    span(axes, K, total + 1, 0.85, "target policy; targets x; V at the end", GREEN)
    row(axes, 0, "DAE residuals")
    for i, start in enumerate(range(K, total)):
        y = 0.12 - 0.22 * i
        axes.plot([start + 0.5, total + 0.5], [y, y], color=RED, lw=1.3, solid_capstyle="round")
        axes.plot(start + 0.5, y, "o", ms=5, color=RED)
        axes.plot(total + 0.5, y, "|", ms=7, mew=1.6, color=RED)
    axes.text(K + 0.2, -0.62, "one from every start (dot)\nto V at the end (bar)", ha="right", va="center", fontsize=9, color=RED)
    axes.text(0.08, 6.6, "core_in: the recurrent state BEFORE $o_0$", va="center", fontsize=9.5, color=BLUE)
    axes.annotate("", (0.16, 5.42), (0.16, 6.45), arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 1.4})
    axes.set_xlim(-3.6, total + 1.3)
    axes.set_ylim(-1.25, 6.9)


def ends(axes: Any) -> None:
    """Across an episode's end, terminal or cut off."""
    title(axes, "The same across an episode's end: its last observation has a slot of its own")
    slots = ("$o_{T-2}$", "$o_{T-1}$", "$o_{T}$ (last)", "$o'_0$", "$o'_1$")
    for t, text in enumerate(slots):
        colour = LAST if t == 2 else TRAINED
        cell(axes, 2 * t, 4, text, colour)
        cell(axes, 2 * t, 3, "1" if t == 3 else "0", colour, ink=RED if t == 3 else SOFT)
        cell(axes, 2 * t, 2, "0" if t == 2 else "1", colour, ink=RED if t == 2 else SOFT)
        cell(axes, 2 * t, 1, "1 or 0" if t == 1 else "0", colour, ink=RED if t == 1 else SOFT)
        if t + 1 < len(slots):
            words = ("$a_{T-2}, r_{T-2}$", "$a_{T-1}, r_{T-1}$", "no transition", "$a'_0, r'_0$")[t]
            axes.text(2 * t + 1.5, 4.06, words, ha="center", va="bottom", fontsize=8.5, color=RED if t == 2 else INK)
            axes.annotate(
                "", (2 * t + 1.98, 4), (2 * t + 1.02, 4),
                arrowprops={"arrowstyle": "->", "color": RED if t == 2 else INK, "lw": 1.2, "ls": ":" if t == 2 else "-"},
            )  # fmt: skip
    names = (
        "observation",
        "reset: forget what was before",
        "valid: a transition left this slot",
        "terminal: $o_{t+1}$ ended it for good",
    )
    for y, name in zip((4, 3, 2, 1), names, strict=True):
        row(axes, y, name)
    words = "1: no bootstrap.  0: cut off,\nbootstrap from V of the last observation"
    axes.text(2.5, 0.32, words, ha="center", va="top", fontsize=9, color=RED)
    axes.set_xlim(-3.6, 2 * len(slots) + 0.3)
    axes.set_ylim(-0.75, 5.0)


def main() -> None:
    """Draw both."""
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11.5, 8.4), height_ratios=(8.2, 5.4), layout="constrained")
    window(top)
    ends(bottom)
    for axes in (top, bottom):
        axes.set_axis_off()
    PATH.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PATH, dpi=120)


if __name__ == "__main__":
    main()
