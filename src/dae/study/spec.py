"""The experiment file: which agents on which environments with which seeds, as differences from the defaults.

    [study]             name, description, seeds, evaluations, preset, options
    [[environment]]     id, env_kwargs, seeds, evaluations, total_agent_steps, options, and agent_options.<agent>
    [[agent]]           name, title, preset, options, outsider, source, published

Each layer overrides the one before: the study's presets and options, the environment's options, the agent's presets and options,
and last what one environment says of one agent. An outsider (`outsider = "RecurrentPPO"`) has options of its own kind; of the
study's and the environment's it takes those that both kinds share. A file holds data only, and any unknown key is an error.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dae.config import Config
from dae.errors import ConfigError, FileError, nearest
from dae.presets import with_presets
from dae.study.outsider import OUTSIDERS, Settings
from dae.study.published import COLUMNS

RESULTS = 0
"""Raised by every change that is tagged [results]: a finished run is one of this code only."""
METRIC_POINTS = 40
"""Training metrics are means over so many equal parts of a run."""
SHARED = ("total_agent_steps", "max_episode_agent_steps", "eval_episodes")
"""Options that mean the same to our agents and to outsiders."""

_STUDY = {"name": str, "description": str, "seeds": list, "evaluations": int, "preset": list, "options": dict}
_ENVIRONMENT = {
    "id": str, "env_kwargs": dict, "seeds": list, "evaluations": int, "total_agent_steps": int, "options": dict,
    "agent_options": dict,
}  # fmt: skip
_AGENT = {
    "name": str, "title": str, "preset": list, "options": dict, "outsider": str, "source": str, "published": str,
}  # fmt: skip
_NAMED_ELSEWHERE = ("env", "env_kwargs", "seed", "eval_every_agent_steps", "log_every_agent_steps", "out", "name")
"""Options that the study sets by itself."""


@dataclass(frozen=True)
class AgentSpec:
    """A row of the table."""

    name: str
    title: str
    preset: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    outsider: str = ""
    source: str = ""
    published: str = ""
    """Its column in the paper's tables (published.py), to be drawn beside it."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """A column of the table."""

    id: str
    seeds: tuple[int, ...]
    evaluations: int
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    agent_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """For file names."""
        return self.id.replace("/", "-")


@dataclass(frozen=True)
class Cell:
    """One run: an agent, an environment, a seed, and everything that they settle."""

    agent: str
    env: str
    seed: int
    outsider: str
    config: Config
    settings: Settings | None
    """Of an outsider, whose `config` holds only what is shared."""

    @property
    def key(self) -> str:
        """Folder below the working folder."""
        return f"{self.env.replace('/', '-')}/{self.agent}/seed{self.seed}"

    @property
    def total_agent_steps(self) -> int:
        """Length of the run."""
        return self.config.last_agent_step

    @property
    def fingerprint(self) -> str:
        """Of all settings: a finished run is used again only while they are the same.

        An option that is new and at its default makes no other run; a default that changes does, which `RESULTS` must tell.
        """
        usual = Config().flat()
        known = {
            name: value for name, value in self.config.flat().items() if name != "stop_after_minutes"
        }  # a matter of the machine
        options = {name: value for name, value in known.items() if value != usual[name]}
        settings = self.settings and self.settings.flat()
        facts = {"options": options, "outsider": self.outsider, "settings": settings, "results": RESULTS}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """The file, checked."""

    name: str
    description: str
    preset: tuple[str, ...]
    options: Mapping[str, Any]
    environments: tuple[EnvironmentSpec, ...]
    agents: tuple[AgentSpec, ...]
    path: str
    sha256: str

    def cells(self, agents: Sequence[str] = (), environments: Sequence[str] = ()) -> list[Cell]:
        """All runs, or those of the named agents and environments."""
        _known("agent", agents, [a.name for a in self.agents])
        _known("environment", environments, [e.id for e in self.environments])
        return [
            self._cell(agent, env, seed)
            for env in self.environments
            if not environments or env.id in environments
            for agent in self.agents
            if not agents or agent.name in agents
            for seed in env.seeds
        ]

    def _cell(self, agent: AgentSpec, env: EnvironmentSpec, seed: int) -> Cell:
        last = env.agent_options.get(agent.name, {})
        try:
            if agent.outsider:
                own = {**agent.options, **last}
                shared = {k: v for layer in (self.options, env.options, own) for k, v in layer.items() if k in SHARED}
                cfg = Config().override(**shared)
                settings = OUTSIDERS[agent.outsider].settings().override(**{k: v for k, v in own.items() if k not in SHARED})
            else:
                cfg, settings = with_presets(self.preset).override(**self.options).override(**env.options), None
                cfg = with_presets(agent.preset, cfg).override(**agent.options).override(**last)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: agent '{agent.name}' on {env.id}: {error}") from error
        total = cfg.learning.total_agent_steps
        cfg = cfg.override(
            env=env.id, env_kwargs=env.env_kwargs, seed=seed, tensorboard=False, video=False,
            eval_every_agent_steps=-(-total // env.evaluations), log_every_agent_steps=-(-total // METRIC_POINTS),
        )  # fmt: skip
        return Cell(agent.name, env.id, seed, agent.outsider, cfg, settings)


def read_study(path: str | Path) -> Study:
    """Read and check all of it, down to every cell's configuration: nothing starts that would fail at its start."""
    where = str(path)
    try:
        raw = Path(path).read_bytes()
        data = tomllib.loads(raw.decode())
    except OSError as error:
        raise FileError(f"{where}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: not TOML ({error})") from error
    _keys(data, {"study": dict, "environment": list, "agent": list}, where, needed=("study", "environment", "agent"))
    head = _keys(data["study"], _STUDY, f"{where}: [study]", needed=("name", "seeds"))
    agents = tuple(_agent(entry, where) for entry in data["agent"])
    environments = tuple(_environment(entry, head, where, [a.name for a in agents]) for entry in data["environment"])
    _unique("agent", [a.name for a in agents], where)
    _unique("environment", [e.id for e in environments], where)
    _no_settled(head.get("options", {}), f"{where}: [study]")
    study = Study(
        head["name"], head.get("description", ""), tuple(head.get("preset", ())), head.get("options", {}), environments, agents,
        where, hashlib.sha256(raw).hexdigest(),
    )  # fmt: skip
    study.cells()
    return study


def _agent(entry: Any, where: str) -> AgentSpec:
    place = f"{where}: [[agent]]"
    entry = _keys(entry, _AGENT, place, needed=("name",))
    outsider = entry.get("outsider", "")
    if outsider and outsider not in OUTSIDERS:
        raise ConfigError(f"{place} outsider='{outsider}': must be one of {', '.join(OUTSIDERS)}{nearest(outsider, OUTSIDERS)}")
    if outsider and entry.get("preset"):
        raise ConfigError(f"{place} '{entry['name']}': presets are of our own agents; an outsider takes options only")
    if not entry["name"].replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{place} name='{entry['name']}': letters, digits, '-' and '_' only, since it names a folder")
    options, title = entry.get("options", {}), entry.get("title", entry["name"])
    _no_settled(options, place)
    published = entry.get("published", "")
    if published and published not in COLUMNS:
        raise ConfigError(f"{place} published='{published}': must be one of {', '.join(COLUMNS)}{nearest(published, COLUMNS)}")
    return AgentSpec(entry["name"], title, tuple(entry.get("preset", ())), options, outsider, entry.get("source", ""), published)


def _environment(entry: Any, head: Mapping[str, Any], where: str, agents: Sequence[str]) -> EnvironmentSpec:
    place = f"{where}: [[environment]]"
    entry = _keys(entry, _ENVIRONMENT, place, needed=("id",))
    place = f"{place} {entry['id']}"
    if ":" in entry["id"]:
        raise ConfigError(f"{place}: only plain Gymnasium ids can stand in a file")
    seeds, evaluations = entry.get("seeds", head["seeds"]), entry.get("evaluations", head.get("evaluations", 10))
    whole = all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds)
    if not seeds or not whole or len(set(seeds)) != len(seeds):
        raise ConfigError(f"{place} seeds={seeds}: must be different whole numbers from 0 on")
    if evaluations < 1:
        raise ConfigError(f"{place} evaluations={evaluations}: must be at least 1")
    options = dict(entry.get("options", {}))
    if "total_agent_steps" in entry:
        options["total_agent_steps"] = entry["total_agent_steps"]
    by_agent = entry.get("agent_options", {})
    for name, more in by_agent.items():
        if name not in agents:
            raise ConfigError(f"{place}: agent_options of '{name}'{nearest(name, agents)}, but there is no such agent")
        if not isinstance(more, dict):
            raise ConfigError(f"{place}: agent_options.{name} must be a table of options")
        _no_settled(more, place)
    _no_settled(options, place)
    return EnvironmentSpec(entry["id"], tuple(seeds), evaluations, entry.get("env_kwargs", {}), options, by_agent)


def _keys(entry: Any, known: Mapping[str, type], place: str, needed: Iterable[str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: must be a table")
    for key, value in entry.items():
        if key not in known:
            raise ConfigError(f"{place}: no key '{key}'{nearest(key, known)}; there are {', '.join(known)}")
        if not isinstance(value, known[key]) or (known[key] is int and isinstance(value, bool)):
            raise ConfigError(f"{place} {key}={value!r}: must be of type {known[key].__name__}")
    for key in needed:
        if not entry.get(key):
            raise ConfigError(f"{place}: {key} is missing")
    return entry


def _no_settled(options: Mapping[str, Any], place: str) -> None:
    for name in options:
        if name in _NAMED_ELSEWHERE:
            raise ConfigError(f"{place}: option {name} is settled by the study; see id, env_kwargs, seeds and evaluations")


def _unique(kind: str, names: Sequence[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: {kind} '{name}' stands there twice")


def _known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"no {kind} '{name}'{nearest(name, known)}; there are {', '.join(known)}")
