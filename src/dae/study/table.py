"""Table and pictures of a study, made from results/ alone.

    python -m dae.study.table results/laptop                                             prints the table, and writes nothing
    python -m dae.study.table results/laptop --readme README.md --pictures docs/img      what `make table` does

A score is the mean of the last evaluation's episodes; the table gives its mean over seeds and Student's 95% interval of that mean:
the seed is the unit, not the episode. With three seeds the interval is honest and wide.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dae.envs import scores
from dae.errors import ConfigError, DaeError, FileError
from dae.run.checkpoint import read_json
from dae.study.results import Row, read_csv

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's 97.5% quantiles for 1, 2, ... degrees of freedom; 1.96 beyond."""
MARKERS = ("<!-- table:{} -->", "<!-- /table:{} -->")


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half of its 95% interval; NaN where one seed tells nothing of the spread."""

    mean: float
    half: float
    seeds: int


@dataclass(frozen=True)
class Curve:
    """An agent's scores on one environment: evaluation by evaluation, seed by seed."""

    agent_steps: NDArray[np.float64]
    """[K]: mean over seeds."""
    scores: NDArray[np.float64]
    """[S, K]"""
    lengths: NDArray[np.float64]
    """[S, K]: mean length of the episodes."""
    minutes: float
    """Of one core that one run took, mean over seeds: its wall-clock where it has the core for itself."""
    episodes: int
    """Of one evaluation."""


@dataclass(frozen=True)
class Results:
    """A folder of results, read."""

    manifest: dict[str, Any]
    curves: dict[str, dict[str, Curve]]
    """env -> agent -> curve"""
    choices: list[Row]

    @property
    def published(self) -> dict[str, str]:
        """Agent -> its column in the paper's tables."""
        return {a["name"]: a.get("published", "") for a in self.manifest["agents"]}

    @property
    def titles(self) -> dict[str, str]:
        """Agent -> what to call it, in the order of the experiment file."""
        return {a["name"]: a["title"] for a in self.manifest["agents"]}


def estimate(values: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """Student's interval of a mean over seeds."""
    numbers = np.asarray(values, float)
    n = len(numbers)
    if n < 2:
        return Estimate(float(numbers.mean()), float("nan"), n)
    quantile = T_975[n - 2] if n - 2 < len(T_975) else 1.96
    return Estimate(float(numbers.mean()), float(quantile * numbers.std(ddof=1) / np.sqrt(n)), n)


def read_results(folder: Path) -> Results:
    """Manifest and CSVs."""
    manifest = read_json(folder / "manifest.json")
    curves: dict[str, dict[str, Curve]] = {}
    for env in manifest["seeds"]:
        path = folder / f"{env.replace('/', '-')}.csv"
        if path.is_file():
            rows = read_csv(path)
            runs = {name: [r for r in manifest["runs"] if (r["env"], r["agent"]) == (env, name)] for name in _agents(manifest)}
            curves[env] = {name: _curve([r for r in rows if r["agent"] == name], of) for name, of in runs.items() if of}
    if not curves:
        raise FileError(f"{folder}: a manifest, but none of its CSVs")
    choices = folder / "jackpot_choices.csv"
    return Results(manifest, curves, read_csv(choices) if choices.is_file() else [])


def _agents(manifest: Mapping[str, Any]) -> list[str]:
    return [a["name"] for a in manifest["agents"]]


def _curve(rows: Sequence[Row], runs: Sequence[Mapping[str, Any]]) -> Curve:
    """Seeds are put side by side by the number of the evaluation: its agent step differs a little from seed to seed."""
    by_seed: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        points = by_seed.setdefault(row["seed"], {})
        points.setdefault(int(row["agent_steps"]), []).append((float(row["score"]), float(row["length"])))
    shortest = min(len(points) for points in by_seed.values())
    steps, means = [], []
    for points in by_seed.values():
        last = sorted(points)[-shortest:]  # from the end: the last evaluation is the one that counts
        steps.append(last)
        means.append([np.mean(points[step], 0) for step in last])
    both = np.array(means)  # [S, K, 2]
    minutes = float(np.mean([run["cpu_seconds"] for run in runs])) / 60
    episodes = len(next(iter(next(iter(by_seed.values())).values())))
    return Curve(np.mean(np.array(steps, float), 0), both[..., 0], both[..., 1], minutes, episodes)


def shares(choices: Sequence[Row], agent: str, after: str) -> list[float]:
    """Of wrong choices, seed by seed."""
    return [int(r["wrong"]) / int(r["decisions"]) for r in choices if (r["agent"], r["after"]) == (agent, after)]


# ------------------------------------------------------------------------------------------------------------- Markdown


def number(value: float, scale: float) -> str:
    """As many digits as the environment's scores need: `scale` is their size."""
    text = f"{value:.0f}" if scale >= 100 else f"{value:.1f}" if scale >= 10 else f"{value:.2f}"
    return "0" + text[2:] if text.startswith("-0") and not float(text) else text


def thousands(steps: float) -> str:
    """50k, 1.5M."""
    return f"{steps / 1e6:.3g}M" if steps >= 1e6 else f"{steps / 1e3:.0f}k" if steps >= 1e4 else f"{steps / 1e3:.2g}k"


def score_text(curve: Curve, scale: float, planned: int) -> str:
    """One cell of the table."""
    e = estimate(curve.scores[:, -1])
    text = number(e.mean, scale) + ("" if np.isnan(e.half) else f" ± {number(e.half, scale)}")
    seeds = "" if e.seeds == planned else f", {e.seeds} of {planned} seeds"
    return f"{text}<br><sub>{thousands(curve.agent_steps[-1])} steps, {curve.minutes:.1f} min{seeds}</sub>"


def markdown(results: Results) -> str:
    """The table, and what must be known to read it."""
    known = scores.load()
    envs = list(results.curves)
    luck = bool(results.choices)
    scale = {env: _scale(env, results.curves[env], known) for env in envs}
    seeds = {env: len(results.manifest["seeds"][env]) for env in envs}
    head = [
        *(f"{short(env)}<br><sub>{seeds[env]} seeds x {_episodes(results.curves[env])} episodes</sub>" for env in envs),
        *(["Jackpot: wrong choices<br><sub>after a win / a loss</sub>"] * luck),
    ]
    lines = ["| | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for agent, title in results.titles.items():
        cells = [
            score_text(results.curves[env][agent], scale[env], seeds[env]) if agent in results.curves[env] else "" for env in envs
        ]
        lines.append(f"| {title} | " + " | ".join([*cells, *([_choices_text(results.choices, agent)] * luck)]) + " |")
    for policy in ("reference", "random"):
        cells = [_known_text(known, env, policy, scale[env]) for env in envs]
        lines.append(
            f"| *{policy} policy* | " + " | ".join([*cells, *(["50% / 50%" if policy == "random" else "0% / 0%"] * luck)]) + " |"
        )
    return "\n".join(lines) + "\n\n" + caption(results) + "\n"


def caption(results: Results) -> str:
    """Protocol, price and origin, from the manifest."""
    m = results.manifest
    machines = "; ".join(f"{x['cpu']}, {x['cores']} cores, torch {x['versions'].get('torch') or '?'}" for x in m["machines"])
    commits = ", ".join(c[:10] for c in m["commits"] if c) or "unknown"
    missing = "" if m["runs_finished"] == m["runs_planned"] else f" ({m['runs_planned'] - m['runs_finished']} more are planned)"
    return (
        "Mean score of the last evaluation (the first episode of each of so many fresh environments) over seeds, ± half of "
        "Student's 95% interval over seeds; below it the agent steps and the minutes of one core that a run took. "
        f"{m['runs_finished']} runs{missing}, {m['cpu_hours']:.1f} CPU-hours on {machines}. "
        f"`python -m dae.study.run experiments/{m['file']}` at commit {commits}, {m['started'][:10]}."
    )


def _episodes(curves: Mapping[str, Curve]) -> int:
    return next(iter(curves.values())).episodes


def short(env: str) -> str:
    """`TMaze` of `dae/TMaze-v0`."""
    return env.split("/")[-1].rsplit("-v", 1)[0]


def _scale(env: str, curves: Mapping[str, Curve], known: Mapping[str, Any]) -> float:
    if env in known:
        return max(abs(_value(s)) for s in known[env].values())
    return float(max(abs(c.scores[:, -1]).max() for c in curves.values()))


def _value(score: Mapping[str, Any]) -> float:
    return float(score["mean"] if score["exact"] is None else score["exact"])


def _known_text(known: Mapping[str, Any], env: str, policy: str, scale: float) -> str:
    return number(_value(known[env][policy]), scale) if env in known else ""


def _choices_text(choices: Sequence[Row], agent: str) -> str:
    both = [shares(choices, agent, after) for after in ("won", "lost")]
    return " / ".join(f"{100 * np.mean(s):.0f}%" for s in both) if all(both) else ""


def put_between(text: str, name: str, table: str, where: str) -> str:
    """`text` with everything between the two markers replaced."""
    start, end = (marker.format(name) for marker in MARKERS)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ConfigError(f"{where}: needs one line {start} and one line {end} after it")
    before, rest = text.split(start)
    return f"{before}{start}\n{table}{end}{rest.split(end)[1]}"


def run(options: argparse.Namespace) -> None:
    """Print; write and draw what is asked for."""
    results = read_results(options.results)
    text = markdown(results)
    print(text)
    if options.readme or options.pictures:
        (options.results / "table.md").write_text(text, encoding="utf-8")
    if options.readme:
        readme = options.readme.read_text(encoding="utf-8")
        changed = put_between(readme, results.manifest["experiment"], text, str(options.readme))
        options.readme.write_text(changed, encoding="utf-8")
    if options.pictures:
        from dae.study.figures import draw_curves, draw_jackpot

        name = results.manifest["experiment"]
        drawn = [draw_curves(results, options.pictures / f"{name}_curves.png")]
        if results.choices:
            drawn.append(draw_jackpot(results, options.pictures / "jackpot.png"))
        print("\n".join(str(path) for path in drawn), file=sys.stderr)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m dae.study.table", description="Table and pictures of a study's results.")
    parser.add_argument("results", type=Path, help="the folder with manifest.json")
    parser.add_argument(
        "--readme", type=Path, help="replace the text between its markers <!-- table:NAME --> and <!-- /table:NAME -->"
    )
    parser.add_argument("--pictures", type=Path, help="draw them into this folder")
    try:
        run(parser.parse_args())
    except DaeError as error:
        print(f"dae: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
