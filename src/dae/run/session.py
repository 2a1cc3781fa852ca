"""`dae train` from beginning to end: folder, progress, checkpoints, and the pictures afterwards."""

import contextlib
import itertools
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from dae.api import DAE, Player
from dae.config import Config, read_options
from dae.describe import protocol_table
from dae.diagnostics import Finding, findings
from dae.envs.gymnasium import AnyEnv, EnvSource
from dae.errors import EnvironmentFault, FileError
from dae.replay import bytes_needed
from dae.run import pictures
from dae.run.progress import Progress
from dae.run.record import Recorder, read_jsonl, run_folder
from dae.train import passed

NO_LUCK = "the run ends before luck enters its objective: eps_wta does not come down to luck_from_eps_wta"
KEPT_CHECKPOINTS = 2
LONGEST_VIDEO_AGENT_STEPS = 2000
"""Of the video at the end of a run: some episodes last an hour. `dae play` films whole ones."""


def train_to_folder(cfg: Config, presets: Sequence[str], weights: str, overwrite: bool, quiet: bool) -> Path:
    """Train as configured; returns the run folder."""
    agent = DAE(config=cfg)
    assert agent.source is not None
    agent.refuse_too_large()
    folder = run_folder(cfg, agent.source.name)
    if weights:
        agent.load_weights(weights)
        say(f"starting from the networks of {weights}: weights only, with a new replay, optimiser and schedules")
    about = {
        "environment": agent.source.name,
        "presets": list(presets),
        "from": weights,
        "frames_per_agent_step": agent.source.frames_per_agent_step,
    }
    if agent.source.protocol:
        about["protocol"] = dict(agent.source.protocol)
    recorder = Recorder.create(folder, cfg, about, overwrite)
    say(f"{folder}: {describe(agent)}")
    if not cfg.luck_enters:
        say(f"note: {NO_LUCK}")
    if agent.source.protocol:
        Console(stderr=True).print(protocol_table(agent.source))
    how, title = "failed", f"{agent.source.name} · seed {cfg.run.seed}"
    saved_at, reached = 0, False
    try:
        with (
            Progress(title, cfg.last_agent_step, cfg.objective, quiet) as progress,
            stop_on_interrupt(agent) as asked,
        ):
            for report in agent.reports():
                assert agent.trainer is not None
                recorder.write(report, progress.show(report, agent.trainer.eval_seconds))
                reached = reached or (report.kind == "eval" and agent.trainer.reached(report))
                every = cfg.run.checkpoint_every_agent_steps
                if report.kind == "end" or (report.kind == "train" and passed(saved_at, report.agent_steps, every)):
                    saved_at = report.agent_steps
                    keep_checkpoint(agent, folder)
        how = "interrupted" if asked else "finished"
    finally:
        recorder.finish(how)
        agent.close()
    if asked:
        raise KeyboardInterrupt
    finish_pictures(agent, folder)
    if cfg.acting.stop_at_score is not None:
        say(goal_line(agent, cfg.acting.stop_at_score, reached))
    return folder


def goal_line(agent: DAE, goal: float, reached: bool) -> str:
    """Whether the score that was asked for was reached; one evaluation said so, and it was selected for saying so."""
    steps = f"{agent.now().agent_steps:,} agent steps"
    if reached:
        return f"goal reached: a mean score of at least {goal:g} in an evaluation after {steps}"
    return f"goal NOT reached: no evaluation had a mean score of {goal:g} in {steps}; another --seed or more steps may"


@contextlib.contextmanager
def stop_on_interrupt(agent: DAE) -> Iterator[list[int]]:
    """Ctrl-C ends the run between two steps, with a checkpoint; a second Ctrl-C ends it at once."""
    asked: list[int] = []

    def handler(number: int, frame: object) -> None:
        if asked or agent.trainer is None:
            raise KeyboardInterrupt
        asked.append(number)
        agent.trainer.stop = True
        say("stopping: a checkpoint is being written (Ctrl-C again ends at once)")

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def describe(agent: DAE) -> str:
    """One line on what is about to learn."""
    sizes, cfg = agent.agent.net.component_sizes(), agent.config
    classes = agent.blueprint.reward_classes
    rewards = f"reward classes {list(classes)}" if classes else "general rewards"
    replay = bytes_needed(agent.envs.spec, cfg.learning.replay_agent_steps, agent.agent.net.state_dim, agent.agent.device)
    return (
        f"{sum(sizes.values()) / 1e6:.2f}M parameters on {agent.agent.device.type}, {agent.envs.num_envs} environments, {rewards}, "
        f"replay of {cfg.learning.replay_agent_steps:,} steps in {replay / 2**20:,.0f} MiB"
    )


def keep_checkpoint(agent: DAE, folder: Path) -> Path:
    """Save, and drop all but the newest few."""
    path = folder / "checkpoints" / f"{agent.now().agent_steps:012d}"
    kept = path if path.exists() else agent.save(path)
    for old in sorted(p for p in kept.parent.iterdir() if p.name.isdigit())[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(old)
    return kept


def finish_pictures(agent: DAE, folder: Path) -> None:
    """Learning curve and video, where their packages are there; a missing one is said, and is no failure."""
    assert agent.source is not None
    made = []
    if pictures.have("matplotlib"):
        made.append(f"learning curve: {pictures.learning_curve(folder, f'{agent.source.name}, seed {agent.config.run.seed}')}")
    else:
        say("no learning curve: pip install 'dae-rl[plots]'")
    if agent.config.run.video:
        made += film_if_possible(agent, agent.source, folder / "videos" / "final.mp4")
    for line in made:
        say(line)


def film_if_possible(agent: DAE, source: EnvSource, path: Path) -> list[str]:
    """A short video of the trained agent, if the environment renders pictures."""
    if not pictures.have("av"):
        return ["no video: pip install 'dae-rl[video]'"]
    try:
        env = pictures.make_rendering(source)
        if env.render_mode != "rgb_array":
            return []
        ((score, length),) = film(agent.player(), env, 1, seed=12345, path=path, longest=LONGEST_VIDEO_AGENT_STEPS)
        env.close()
    except EnvironmentFault as error:
        return [f"no video: {error}"]
    except Exception as error:  # rendering is the environment's own code and must not fail a finished run
        return [f"no video: rendering {source.name} raised {type(error).__name__}: {' '.join(str(error).split())}"]
    what = "one episode" if length < LONGEST_VIDEO_AGENT_STEPS else f"the first {length:,} steps of an episode"
    return [f"video: {path} ({what}, score {score:.4g})"]


def film(
    player: Player, env: AnyEnv, episodes: int, seed: int, path: Path | None, longest: int | None = None
) -> list[tuple[float, int]]:
    """Play; returns (score, length) of each episode, and writes what was rendered if a path is given."""
    scores: list[tuple[float, int]] = []

    def frames() -> Iterator[NDArray[np.uint8]]:
        for episode in range(episodes):
            score, length = 0.0, 0
            for reward, picture in itertools.islice(player.play(env, seed=seed + episode), longest):
                score, length = score + reward, length + 1
                if picture is not None:
                    yield picture
            scores.append((score, length))

    if path is None:
        for _ in frames():
            pass
    else:
        pictures.write_video(path, frames(), int(env.metadata.get("render_fps", 30)))
    return scores


def examine(folder: Path, last: float) -> tuple[list[Finding], dict[str, float]]:
    """What the end of a run's metrics says of its health."""
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "dae/adv_size" in row]
    if not rows:
        raise FileError(f"{folder}: no metrics of learning yet (metrics.jsonl is missing, or the replay was still filling)")
    rows = rows[-max(1, round(last * len(rows))) :]
    names = [name for name in rows[-1] if name.startswith(("dae/", "train/"))]
    numbers = {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
    cfg = read_options(folder / "config.yaml")
    found = findings(numbers, cfg.objective)
    if not cfg.luck_enters:
        found.append(Finding(NO_LUCK, "a longer run, an earlier end of eps_wta, or the preset luck-off, if luck shall not correct"))
    return found, numbers


def say(line: str) -> None:
    """For the person at the terminal."""
    print(line, file=sys.stderr, flush=True)
