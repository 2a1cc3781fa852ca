"""`dae check`: watch an environment take random steps, and name every rule that it breaks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dae.envs.gymnasium import AnyEnv, declared_reward_classes, env_source
from dae.envs.spaces import ObservationReader, num_actions
from dae.errors import DaeError


@dataclass(frozen=True)
class Row:
    """One rule."""

    verdict: Literal["ok", "note", "bad"]
    rule: str
    seen: str


class _Broken(Exception):
    def __init__(self, rule: str, seen: str):
        super().__init__(seen)
        self.row = Row("bad", rule, seen)


def check_env(name: str, kwargs: dict[str, Any], steps: int, seed: int) -> list[Row]:
    """Every rule, in the order in which it matters; a broken contract ends the list."""
    rows: list[Row] = []
    try:
        source = env_source(name, kwargs)
        env = source.make()
    except DaeError as error:
        return [Row("bad", "can be made", str(error))]
    except Exception as error:  # whatever a foreign constructor raises is the finding
        return [Row("bad", "can be made", f"{type(error).__name__}: {error}")]
    try:
        rows += _spaces(env)
        rows += _behaviour(env, steps, seed)
        rows += _seeding(source.make(), source.make(), seed)
    except _Broken as broken:
        rows.append(broken.row)
    finally:
        env.close()
    return rows


def _spaces(env: AnyEnv) -> Iterator[Row]:
    try:
        yield Row("ok", "actions are one choice of finitely many", f"{num_actions(env.action_space)} actions")
        reader = ObservationReader(env.observation_space)
    except DaeError as error:
        raise _Broken("spaces are supported", str(error)) from error
    parts = ", ".join(f"{n} {p.shape} {str(p.dtype).removeprefix('torch.')}" for n, p in reader.spec.items())
    yield Row("ok", "observations are numbers, vectors, pictures or dicts of these", parts)


def _behaviour(env: AnyEnv, steps: int, seed: int) -> Iterator[Row]:
    reader, rng = ObservationReader(env.observation_space), np.random.default_rng(seed)
    actions, start = num_actions(env.action_space), int(env.action_space.start)  # type: ignore[attr-defined]
    rewards: set[float] = set()
    lengths, terminations, truncations, length, began = [], 0, 0, 0, time.perf_counter()
    _read(reader, _reset(env, seed), "reset", 0, seed)
    for step in range(1, steps + 1):
        obs, reward, terminated, truncated = _step(env, start + int(rng.integers(actions)), step, seed)
        _read(reader, obs, "step", step, seed)
        rewards.add(reward)
        length += 1
        if terminated or truncated:
            terminations, truncations = terminations + terminated, truncations + (truncated and not terminated)
            lengths.append(length)
            length = 0
            _read(reader, _reset(env, None), "reset", step, seed)
    speed = steps / (time.perf_counter() - began)
    yield Row("ok", "reset and step keep the contract", f"{steps} random steps at {speed:,.0f} steps/s")
    if lengths:
        seen = f"{len(lengths)} episodes of {np.mean(lengths):.0f} steps; {terminations} terminated, {truncations} truncated"
        yield Row("ok", "episodes end", seen)
    else:
        yield Row(
            "note", "episodes end", f"none of {steps} random steps ended one; give --max-episode-agent-steps if none ever will"
        )
    yield from _rewards(rewards, declared_reward_classes(env))


def _rewards(seen: set[float], declared: tuple[float, ...]) -> Iterator[Row]:
    values = ", ".join(f"{r:g}" for r in sorted(seen)[:8]) + (" ..." if len(seen) > 8 else "")
    if declared:
        stray = sorted(r for r in seen if not np.isclose(r, declared).any())
        if stray:
            raise _Broken("rewards are among metadata['reward_classes']", f"{stray[0]:g} is not among {list(declared)}")
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
    pairs = [(_reset(one, seed), _reset(two, seed))]
    for step in range(50):
        action = start + int(rng.integers(actions))
        a, b = _step(one, action, step, seed), _step(two, action, step, seed)
        pairs.append((a[0], b[0]))
        if a[2] or a[3] or b[2] or b[3]:
            break
    same = all(
        np.array_equal(x, y) for a, b in pairs for x, y in zip(reader.read(a).values(), reader.read(b).values(), strict=True)
    )
    yield Row(
        "ok" if same else "note", "the same seed gives the same episode", "yes" if same else "no: runs can't be repeated exactly"
    )
    one.close()
    two.close()


def _reset(env: AnyEnv, seed: int | None) -> Any:
    try:
        returned = env.reset(seed=seed)
    except Exception as error:
        raise _Broken("reset works", f"seed {seed}: {type(error).__name__}: {error}") from error
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise _Broken("reset returns (observation, info)", f"seed {seed}: {type(returned).__name__}")
    return returned[0]


def _step(env: AnyEnv, action: int, step: int, seed: int) -> tuple[Any, float, bool, bool]:
    place = f"step {step}, seed {seed}"
    try:
        returned = env.step(action)
    except Exception as error:
        raise _Broken("step works", f"{place}: {type(error).__name__}: {error}") from error
    if not (isinstance(returned, tuple) and len(returned) == 5):
        raise _Broken("step returns (observation, reward, terminated, truncated, info)", place)
    obs, reward, terminated, truncated, _ = returned
    try:
        number = float(reward)
    except (TypeError, ValueError):
        raise _Broken("rewards are numbers", f"{place}: {reward!r}") from None
    if not np.isfinite(number):
        raise _Broken("rewards are finite", f"{place}: {number}")
    for word, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise _Broken(f"{word} is a bool", f"{place}: {flag!r}")
    return obs, number, bool(terminated), bool(truncated)


def _read(reader: ObservationReader, obs: Any, where: str, step: int, seed: int) -> None:
    try:
        reader.read(obs)
    except ValueError as error:
        raise _Broken("observations are in their space", f"{where}, step {step}, seed {seed}: {error}") from error
