"""`dae check`: watch an environment take random steps, and name every rule that it breaks."""

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dae.envs.gymnasium import AnyEnv, Arrays, Broken, close_env, declared_reward_classes, env_source, read_obs, reset_env, step_env
from dae.envs.spaces import ObservationReader, in_words, num_actions
from dae.errors import DaeWarning, EnvironmentFault


@dataclass(frozen=True)
class Row:
    """One rule."""

    verdict: Literal["ok", "note", "bad"]
    rule: str
    seen: str


def check_env(name: str, kwargs: dict[str, Any], steps: int, seed: int) -> list[Row]:
    """Every rule, in the order in which it matters; a broken contract ends the list."""
    source = env_source(name, kwargs)
    try:
        env = source.make()
    except EnvironmentFault as error:
        return [Row("bad", "can be made", str(error))]
    rows: list[Row] = []
    envs = [env]
    try:
        rows += _spaces(env)
        rows += _behaviour(env, steps, seed)
        envs += [source.make(), source.make()]
        rows += _seeding(envs[1], envs[2], seed)
    except Broken as broken:
        rows.append(Row("bad", broken.rule, str(broken)))
    except EnvironmentFault as error:
        rows.append(Row("bad", "spaces and reward classes are supported", str(error)))
    rows += _closing(envs)
    return rows


def _spaces(env: AnyEnv) -> Iterator[Row]:
    yield Row("ok", "actions are one choice of finitely many", f"{num_actions(env.action_space)} actions")
    reader = ObservationReader(env.observation_space)
    yield Row("ok", "observations are numbers, vectors, pictures or dicts of these", in_words(reader.spec))
    for name, leaf in reader.leaves.items():
        if leaf.layout is not None:
            found = f"'{name}' {leaf.space.shape}: {'last' if leaf.layout.last else 'first'} ({leaf.layout.why})"
            advice = "; if not, train with --channels first or last" if leaf.layout.guessed else ""
            yield Row("note" if leaf.layout.guessed else "ok", "where a picture's channels are", found + advice)


def _behaviour(env: AnyEnv, steps: int, seed: int) -> Iterator[Row]:
    reader, rng = ObservationReader(env.observation_space), np.random.default_rng(seed)
    actions, start = num_actions(env.action_space), int(env.action_space.start)  # type: ignore[attr-defined]
    rewards: set[float] = set()
    lengths, terminations, truncations, length, began = [], 0, 0, 0, time.perf_counter()
    declared = declared_reward_classes(env)
    _reset(env, reader, 0, seed)
    for step in range(1, steps + 1):
        _, reward, terminated, truncated = _step(env, reader, start + int(rng.integers(actions)), step, seed)
        rewards.add(reward)
        length += 1
        if terminated or truncated:
            terminations, truncations = terminations + terminated, truncations + (truncated and not terminated)
            lengths.append(length)
            length = 0
            _reset(env, reader, step, seed, again=True)
    speed = steps / (time.perf_counter() - began)
    yield Row("ok", "reset and step keep the contract", f"{steps} random steps at {speed:,.0f} steps/s")
    if lengths:
        seen = f"{len(lengths)} episodes of {np.mean(lengths):.0f} steps; {terminations} terminated, {truncations} truncated"
        yield Row("ok", "episodes end", seen)
    else:
        yield Row(
            "note", "episodes end", f"none of {steps} random steps ended one; give --max-episode-agent-steps if none ever will"
        )
    yield from _rewards(rewards, declared)


def _rewards(seen: set[float], declared: tuple[float, ...]) -> Iterator[Row]:
    values = ", ".join(f"{r:g}" for r in sorted(seen)[:8]) + (" ..." if len(seen) > 8 else "")
    if declared:
        stray = sorted(r for r in seen if not np.isclose(r, declared).any())
        if stray:
            raise Broken("rewards are among metadata['reward_classes']", f"{stray[0]:g} is not among {list(declared)}")
        yield Row("ok", "rewards are among metadata['reward_classes']", f"{values} of {list(declared)}")
    elif len(seen) <= 5:
        yield Row(
            "note",
            "reward values",
            f"{values}: if these are all, --reward-classes {' '.join(f'{r:g}' for r in sorted(seen))} is exact",
        )
    else:
        yield Row("ok", "reward values", f"{values}: general rewards")
    if seen == {0.0}:
        yield Row("note", "rewards are met by chance", "random play earned nothing: exploration will be hard")


def _seeding(one: AnyEnv, two: AnyEnv, seed: int) -> Iterator[Row]:
    reader, rng = ObservationReader(one.observation_space), np.random.default_rng(seed)
    actions, start = num_actions(one.action_space), int(one.action_space.start)  # type: ignore[attr-defined]
    pairs = [(_reset(one, reader, 0, seed), _reset(two, reader, 0, seed))]
    for step in range(1, 51):
        action = start + int(rng.integers(actions))
        a, b = _step(one, reader, action, step, seed), _step(two, reader, action, step, seed)
        pairs.append((a[0], b[0]))
        if a[2] or a[3] or b[2] or b[3]:
            break
    same = all(np.array_equal(x, y) for a, b in pairs for x, y in zip(a.values(), b.values(), strict=True))
    yield Row(
        "ok" if same else "note", "the same seed gives the same episode", "yes" if same else "no: runs can't be repeated exactly"
    )


def _closing(envs: list[AnyEnv]) -> Iterator[Row]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DaeWarning)
        for env in envs:
            close_env(env)
    for words in dict.fromkeys(str(warning.message) for warning in said):
        yield Row("note", "close works", words)


def _reset(env: AnyEnv, reader: ObservationReader, step: int, seed: int, again: bool = False) -> Arrays:
    with _at(step, seed):
        return _read(reader, reset_env(env, None if again else seed), "reset")


def _step(env: AnyEnv, reader: ObservationReader, action: int, step: int, seed: int) -> tuple[Arrays, float, bool, bool]:
    with _at(step, seed):
        raw, reward, terminated, truncated, _ = step_env(env, action)
        return _read(reader, raw, "step"), reward, terminated, truncated


def _read(reader: ObservationReader, raw: Any, where: str) -> Arrays:
    found, stray = read_obs(reader, raw, where), reader.outside(raw)
    if stray:
        raise Broken("observations are in their space", f"{where}() returned what its space does not promise: {stray}")
    return found


@contextlib.contextmanager
def _at(step: int, seed: int) -> Iterator[None]:
    try:
        yield
    except Broken as broken:
        raise Broken(broken.rule, f"step {step}, seed {seed}: {broken}") from broken.__cause__
