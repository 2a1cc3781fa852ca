"""`dae describe`: sizes and options as tables."""

from collections.abc import Iterator

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from dae.config import Config
from dae.encoders import ObsPart, ObsSpec
from dae.envs.gymnasium import EnvSource, close_env, declared_reward_classes, env_source
from dae.envs.spaces import ObservationReader, num_actions
from dae.network import Network
from dae.presets import PRESETS
from dae.replay import bytes_needed
from dae.train import network_sizes, pick_device, pick_reward_classes

ATARI_SPEC: ObsSpec = {"obs": ObsPart((1, 84, 84), torch.uint8, 1 / 255)}
PAPER_MILLIONS = {"encoder": {1: 2, 2: 4, 4: 9, 8: 22}, "core": 3, "transition model": 21, "value heads": 4}


def component_sizes(cfg: Config, spec: ObsSpec, actions: int, reward_classes: tuple[float, ...]) -> dict[str, int]:
    """Parameters by component, counted on a network that is never allocated."""
    with torch.device("meta"):
        return Network(spec, network_sizes(cfg, actions, reward_classes)).component_sizes()


def paper_table(actions: int = 18) -> Table:
    """The paper's table of parameters, beside what this network has at m = 1, 2, 4, 8 on 84x84x4."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"parameters, 84x84x4, {actions} actions (the paper's table in millions in brackets)",
        title_justify="left",
    )
    table.add_column("component", overflow="fold")
    widths = (1, 2, 4, 8)
    columns = [component_sizes(Config().override(width=m), ATARI_SPEC, actions, (-1.0, 0.0, 1.0)) for m in widths]
    for m in widths:
        table.add_column(f"m={m}", justify="right", overflow="fold")
    for row in columns[0]:
        paper = PAPER_MILLIONS.get(row)
        millions = [paper[m] if isinstance(paper, dict) else paper for m in widths]
        cells = [f"{c[row]:,}" + (f" ({p})" if p else "") for c, p in zip(columns, millions, strict=True)]
        table.add_row(row, *cells)
    table.add_row("sum", *(f"{sum(c.values()):,}" for c in columns))
    return table


def presets_table() -> Table:
    """Every preset and what it changes."""
    table = Table(box=box.SIMPLE_HEAD, title="presets", title_justify="left")
    for column in ("preset", "what it is", "options"):
        table.add_column(column, overflow="fold")
    for name, (what, options) in PRESETS.items():
        table.add_row(name, what, ", ".join(f"{k}={v}" for k, v in options.items()))
    return table


def protocol_table(source: EnvSource) -> Table:
    """What was decided about the environment."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{escape(source.name)}: protocol", title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in source.protocol.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else escape(str(value)))
    return table


def agent_tables(cfg: Config) -> Iterator[Table]:
    """Sizes of the agent on its environment, then every option in force."""
    source = env_source(cfg.environment.env, cfg.environment.env_kwargs, cfg.environment.max_episode_agent_steps)
    env = source.make()
    spec, actions = ObservationReader(env.observation_space, cfg.network.channels).spec, num_actions(env.action_space)
    classes = pick_reward_classes(cfg, declared_reward_classes(env))
    close_env(env)
    sizes = Table(box=box.SIMPLE_HEAD, title=f"{escape(source.name)}: {actions} actions", title_justify="left")
    sizes.add_column("component", overflow="fold")
    sizes.add_column("parameters", justify="right", overflow="fold")
    for row, count in component_sizes(cfg, spec, actions, classes).items():
        sizes.add_row(row, f"{count:,}")
    yield sizes
    if source.protocol:
        yield protocol_table(source)
    about = Table(box=box.SIMPLE_HEAD, title="in force", title_justify="left")
    about.add_column("what", overflow="fold")
    about.add_column("value", overflow="fold")
    for name, part in spec.items():
        about.add_row(f"observation '{escape(name)}'", f"{part.shape} {str(part.dtype).removeprefix('torch.')} x {part.scale:.4g}")
    about.add_row("rewards", f"classes {list(classes)}" if classes else "general (any number)")
    state = 2 * cfg.network.core_dim if cfg.network.core == "lstm" else 0
    need = bytes_needed(spec, cfg.learning.replay_agent_steps, state, pick_device(cfg.run.device))
    about.add_row("replay memory", f"{need / 2**20:,.0f} MiB")
    for name, value in cfg.flat().items():
        about.add_row(name, escape(str(value)))
    yield about
