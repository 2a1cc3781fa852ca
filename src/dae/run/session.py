"""`dae train` from beginning to end: folder, progress, checkpoints, and the pictures afterwards."""

import contextlib
import itertools
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from dae.api import DAE, Player
from dae.config import Config, NetworkConfig, read_options
from dae.describe import protocol_table
from dae.diagnostics import Finding, findings
from dae.envs.gymnasium import AnyEnv, EnvSource, close_env
from dae.errors import ConfigError, DaeError, EnvironmentFault, FileError, MissingExtra, Stopped, enough_memory
from dae.run import pictures, resume
from dae.run.chunks import ReplayStore
from dae.run.progress import Progress
from dae.run.record import Recorder, read_jsonl, refuse_taken, run_folder
from dae.train import Trainer, passed

NO_LUCK = "the run ends before luck enters its objective: eps_wta does not come down to luck_from_eps_wta"
ENDLESS = (
    "no training episode has ended yet and the environment declares no limit, so this evaluation may not end either: "
    "--max-episode-agent-steps gives it one"
)
NOT_EXACT = "not exactly as if it had never stopped: on a GPU, and with environments that can't be brought back to where they were"
LONGEST_VIDEO_AGENT_STEPS = 2000
"""Of the video at the end of a run: some episodes last an hour. `dae play` films whole ones."""


def train_to_folder(cfg: Config, presets: Sequence[str], weights: str, overwrite: bool, quiet: bool) -> Path:
    """Train as configured, from where the same command was cut off if it was; returns the run folder."""
    agent = DAE(config=cfg)
    assert agent.source is not None
    agent.refuse_too_large()
    folder = run_folder(cfg, agent.source.name)
    how = "new" if overwrite else resume.same_run(folder, cfg, weights)
    if how == "finished":
        agent.close()
        say(f"{folder}: this run is finished already; --overwrite makes it anew")
        return folder
    point, wrong = resume.newest_point(folder) if how == "unfinished" else (None, [])
    for line in wrong:
        say(f"note: {line}")
    if point is None:
        resume.refuse_to_begin_again(folder, overwrite)
        refuse_taken(folder, overwrite or how == "unfinished")  # what was cut off before its first checkpoint begins again
    if cfg.run.resumable:
        resume.refuse_small_disk(agent, folder)
    if weights and point is None:
        if Path(weights).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"--from {weights}: this run would be written over it; choose another --name")
        agent.load_weights(weights)
        say(f"starting from the networks of {weights}: weights only, with a new replay, optimiser and schedules")
    # The environments' first reset. What can go wrong before the first step has gone wrong before a folder is made or replaced.
    agent.trainer = Trainer(agent.config, agent.envs, agent.agent, agent.source)
    if point is None:
        recorder = Recorder.create(folder, cfg, about_run(agent, presets, weights), overwrite or how == "unfinished")
    else:
        recorder = Recorder.go_on(folder, cfg, agent.source.frames_per_agent_step, point.blueprint.agent_steps, point.run)
        resume.drop_newer(folder, point)
    announce(agent, folder)
    try:
        reached = learn(agent, recorder, quiet, point)
    except BaseException as error:
        with contextlib.suppress(DaeError):  # the first thing that went wrong is the one to be told
            recorder.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    else:
        done = reached or agent.trainer.agent_steps >= cfg.learning.total_agent_steps
        recorder.finish("finished" if done else "stopped", agent.trainer.agent_steps)
        if done:
            shutil.rmtree(folder / "replay", ignore_errors=True)  # nothing is to go on from there any more
    finally:
        agent.close()
    finish_pictures(agent, folder)
    if cfg.acting.stop_at_score is not None:
        say(goal_line(agent, cfg.acting.stop_at_score, reached))
    return folder


def about_run(agent: DAE, presets: Sequence[str], weights: str) -> dict[str, Any]:
    """For run.json, beside where its numbers come from."""
    assert agent.source is not None
    about = {
        "environment": agent.source.name,
        "presets": list(presets),
        "from": weights,
        "frames_per_agent_step": agent.source.frames_per_agent_step,
    }
    return about | ({"protocol": dict(agent.source.protocol)} if agent.source.protocol else {})


def announce(agent: DAE, folder: Path) -> None:
    """What is about to learn, and what had better be known before it does."""
    assert agent.source is not None
    say(f"{folder}: {describe(agent)}")
    if agent.config.network == NetworkConfig() and agent.agent.device.type != "cuda":
        say("note: these are the paper's sizes and schedules, for a large GPU; on a small machine begin with --preset laptop")
    if not agent.config.luck_enters:
        say(f"note: {NO_LUCK}")
    if agent.source.protocol:
        Console(stderr=True).print(protocol_table(agent.source))


def learn(agent: DAE, recorder: Recorder, quiet: bool, point: resume.Point | None = None) -> bool:
    """The run itself, with all that is written on the way. Returns whether the score that was asked for was reached."""
    trainer, cfg, reached = agent.trainer, agent.config, False
    assert trainer is not None and agent.source is not None
    store = ReplayStore(recorder.folder / "replay") if cfg.run.resumable else None
    title, where = f"{agent.source.name} · seed {cfg.run.seed}", dict[str, Any]()
    if point is not None:
        store = ReplayStore(recorder.folder / "replay", resume.chunks_of(point.run, point.path))
        exact = resume.go_on(agent, trainer, point, store)
        say(f"going on after {trainer.agent_steps:,} agent steps" + ("" if exact else f", {NOT_EXACT}"))
        where = {"seconds": float(point.run["seconds"]), "eval_seconds": trainer.eval_seconds, "updates": trainer.updates}
    saved_at = trainer.agent_steps
    trainer.before_evaluation = note_if_endless(agent)
    with (
        stop_on_signals(trainer) as asked,
        enough_memory("learning with these sizes"),
        Progress(title, cfg.last_agent_step, cfg.objective, quiet, trainer.agent_steps, **where) as progress,
    ):
        try:
            for report in trainer.run():
                numbers = progress.show(report, trainer.eval_seconds)
                if report.kind != "stopped":
                    recorder.write(report, numbers)
                reached = reached or (report.kind == "eval" and trainer.reached(report))
                last = trainer.stop or trainer.ended  # only an evaluation is still to come
                due = last or passed(saved_at, report.agent_steps, cfg.run.checkpoint_every_agent_steps)
                if report.kind in ("stopped", "end") or (report.kind == "train" and due):
                    saved_at = report.agent_steps
                    resume.keep_checkpoint(agent, recorder, store, time.time() - progress.started)
        except EnvironmentFault:  # it leaves the learner between two updates, but its environments in the middle of a step
            if trainer.updates:
                resume.keep_checkpoint(agent, recorder, None)
            raise
    if asked:
        raise Stopped(asked[0])
    return reached


def goal_line(agent: DAE, goal: float, reached: bool) -> str:
    """Whether the score that was asked for was reached; one evaluation said so, and it was selected for saying so."""
    steps = f"{agent.now().agent_steps:,} agent steps"
    if reached:
        return f"goal reached: a mean score of at least {goal:g} in an evaluation after {steps}"
    return f"goal NOT reached: no evaluation had a mean score of {goal:g} in {steps}; another --seed or more steps may"


def note_if_endless(agent: DAE) -> Callable[[], None]:
    """To be called when an evaluation begins: once, and only where episodes seem to have no end, it says so."""
    said: list[str] = []

    def note() -> None:
        trainer = agent.trainer
        assert trainer is not None
        # An episode that ends takes its steps out of `length`: as long as all of them are in there, none has ended.
        if not said and int(trainer.collector.length.sum()) == trainer.agent_steps and not has_limit(agent):
            said.append(ENDLESS)
            say(f"note: {ENDLESS}")

    return note


def has_limit(agent: DAE) -> bool:
    """Whether the environment says that episodes are cut off sooner or later."""
    assert agent.source is not None
    spec = gym.registry.get(agent.source.plain_id or "")
    declared = bool(agent.source.protocol) or (spec is not None and spec.max_episode_steps is not None)
    return declared or agent.config.environment.max_episode_agent_steps > 0


@contextlib.contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[list[int]]:
    """Ctrl-C, and the signals of batch systems and closed terminals, end the run between two steps; a second one ends it at once."""
    asked: list[int] = []

    def handler(number: int, frame: object) -> None:
        if asked:
            raise Stopped(number)
        asked.append(number)
        trainer.stop = True
        say("stopping: a checkpoint is being written (Ctrl-C again ends at once)")

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, old in before.items():
        if old is not signal.SIG_IGN:  # what `nohup` and the like have switched off stays off
            signal.signal(number, handler)
    try:
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def describe(agent: DAE) -> str:
    """One line on what is about to learn."""
    sizes, cfg = agent.agent.net.component_sizes(), agent.config
    classes = agent.blueprint.reward_classes
    rewards = f"reward classes {list(classes)}" if classes else "general rewards"
    return (
        f"{sum(sizes.values()) / 1e6:.2f}M parameters on {agent.agent.device.type}, {agent.envs.num_envs} environments, {rewards}, "
        f"replay of {cfg.learning.replay_agent_steps:,} steps in {agent.replay_bytes / 2**20:,.0f} MiB"
    )


def finish_pictures(agent: DAE, folder: Path) -> None:
    """Learning curve and video, where their packages are there; a missing one is said, and is no failure."""
    assert agent.source is not None
    made = []
    try:
        made.append(f"learning curve: {pictures.learning_curve(folder, f'{agent.source.name}, seed {agent.config.run.seed}')}")
    except MissingExtra:
        made.append("no learning curve: pip install 'dae-rl[plots]'")
    except OSError as error:
        made.append(f"no learning curve: {error}")
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
        close_env(env)
    except DaeError as error:
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
    if not 0 < last <= 1:
        raise ConfigError(f"last={last:g}: must be above 0 and at most 1, a share of the run")
    file = folder / "metrics.jsonl"
    if not file.is_file():
        what = (
            "has no metrics.jsonl: it is no run folder" if folder.is_dir() else "is a file" if folder.exists() else "is not there"
        )
        raise FileError(f"{folder} {what}; give the folder of a run")
    rows = [row for row in read_jsonl(file) if "dae/adv_size" in row]
    if not rows:
        raise FileError(f"{folder}: no metrics of learning yet: the replay was still filling")
    odd = [name for row in rows for name, value in row.items() if not isinstance(value, int | float)]
    if odd:
        raise FileError(f"{file}: '{odd[0]}' is not a number everywhere")
    rows = rows[-max(1, round(last * len(rows))) :]
    names = [name for name in rows[-1] if name.startswith(("dae/", "train/"))]
    numbers = {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
    cfg = read_options(folder / "config.yaml")
    found = findings(numbers, cfg.objective)
    if not cfg.luck_enters:
        found.append(Finding(NO_LUCK, "a longer run, an earlier end of eps_wta, or the preset luck-off, if luck shall not correct"))
    return found, numbers


def say(line: str) -> None:
    """For the person at the terminal, which may be gone; or busy, where a signal comes while something is printed."""
    with contextlib.suppress(OSError, RuntimeError):
        print(line, file=sys.stderr, flush=True)
