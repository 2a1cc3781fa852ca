"""The command line. `dae VERB --help` lists every option; exit codes are those of dae.errors, 128 + its number after a signal."""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from dae.config import OPTIONS, Config, Schedule, read_options
from dae.errors import ConfigError, DaeError, DaeWarning, EnvironmentFault, MissingExtra, Stopped, nearest, within
from dae.files import failure
from dae.presets import PRESETS, with_presets

T = TypeVar("T")


@dataclass(frozen=True)
class Train:
    """Train an agent, and write everything to OUT/NAME/ENV/seedSEED."""

    preset: tuple[str, ...] = ()
    """Presets, applied from left to right before the options: see `dae describe --presets`."""
    file: str = ""
    """A config.yaml of another run, applied before the presets."""
    weights: Annotated[str, arg(name="from")] = ""
    """Start from the networks of another run (weights only: new replay, optimiser and schedules)."""
    overwrite: bool = False
    """Replace a run that is already there."""
    quiet: bool = False
    """No progress display."""
    config: OmitArgPrefixes[Config] = field(default_factory=Config)


@dataclass(frozen=True)
class Eval:
    """Score a trained agent over fresh episodes."""

    path: Positional[str]
    """A run folder, a checkpoint or an exported agent."""
    env: str = ""
    """The environment, where it is no plain Gymnasium id."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment, in place of those that the agent was trained with: name=value ..."""
    episodes: int = 50
    """The first episode of each of so many environments."""
    epsilon: float | None = None
    """Share of random actions; as in the run's own evaluations where it is not given."""
    seed: int = 0
    """Of environments and random actions."""
    ledger: str = ""
    """Write value, skill and luck of every step of these episodes to this .csv file; needs more than an export has."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    """Where tensors live."""


@dataclass(frozen=True)
class Play:
    """Let a trained or exported agent play, and write a video where the environment renders."""

    path: Positional[str]
    """A run folder, a checkpoint or an exported agent."""
    env: str = ""
    """The environment, where it is no plain Gymnasium id."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment, in place of those that the agent was trained with: name=value ..."""
    episodes: int = 1
    """How many episodes."""
    epsilon: float = 0.0
    """Share of random actions."""
    seed: int = 0
    """Of environment and random actions."""
    video: str = ""
    """Write the episodes to this .mp4 file."""


@dataclass(frozen=True)
class Check:
    """Check an environment: will dae be able to learn on it?"""

    env: str
    """A Gymnasium id, or package.module:Class."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment: name=value ..."""
    steps: int = 1000
    """Random steps to watch."""
    seed: int = 0
    """Of the environment and of the actions."""


@dataclass(frozen=True)
class Describe:
    """Show the network's size and every option in force; without an environment, the paper's table of sizes."""

    preset: tuple[str, ...] = ()
    """Presets, applied from left to right before the options."""
    presets: bool = False
    """List the presets instead."""
    config: OmitArgPrefixes[Config] = field(default_factory=Config)


@dataclass(frozen=True)
class Doctor:
    """Say what is unhealthy about a run, and the remedy."""

    path: Positional[str]
    """A run folder."""
    last: float = 0.2
    """Share of the run, at its end, that is looked at."""


@dataclass(frozen=True)
class Export:
    """Write what acting needs, and only that, in 16 bit: actions that were nearly tied may come out the other way."""

    path: Positional[str]
    """A run folder or a checkpoint."""
    to: str = "agent.safetensors"
    """The file to write."""


@dataclass(frozen=True)
class Bench:
    """Measure how long an iteration of training takes here, and where its time goes."""

    preset: tuple[str, ...] = ()
    """Presets, applied from left to right before the options."""
    iterations: int = 200
    """Iterations of a round; their median is reported."""
    rounds: int = 2
    """How many rounds."""
    to: str = ""
    """Write all numbers to this .json file."""
    config: OmitArgPrefixes[Config] = field(default_factory=Config)


VERBS: dict[str, type] = {
    "train": Train, "eval": Eval, "play": Play, "check": Check, "describe": Describe, "doctor": Doctor, "export": Export,
    "bench": Bench,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `dae` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ± gets a question mark
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """The exit code."""
    try:
        if argv[:1] == ["help"] and len(argv) > 1:
            argv = [argv[1], "--help"]
        if not argv or argv[0] in ("-h", "--help", "help"):
            return _overview()
        if argv[0] == "--version":
            import dae

            print(dae.__version__)
            return 0
        verb = argv[0]
        if verb not in VERBS:
            raise ConfigError(f"no command '{verb}'{nearest(verb, VERBS)}; there are {', '.join(VERBS)}")
        options = _parse(VERBS[verb], verb, argv[1:])
        with _warnings_in_one_line():
            code = 0 if options is None else int(_ACTIONS[verb](options))
        sys.stdout.flush()  # what can't be written is to be noticed here
        return code
    except DaeError as error:
        return _complain(error)
    except KeyboardInterrupt as stopped:
        _tell("dae: stopped")
        return stopped.exit_code if isinstance(stopped, Stopped) else 130
    except BrokenPipeError:  # whoever read our output, `head` say, has seen enough
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        if error.filename is not None:
            return _complain(DaeError(f"{error.filename}: {error.strerror}"))
        return _complain(failure("the output", error))


def _complain(error: DaeError) -> int:
    _tell(f"dae: {error}")
    return error.exit_code


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone: the exit code still tells
        print(line, file=sys.stderr)


def _drop_output() -> None:
    """What is in stdout's buffer and can't be written must not be tried again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------------------------------------------------------- the verbs


def train(options: Train) -> int:
    """`dae train`."""
    from dae.run.session import train_to_folder

    folder = train_to_folder(options.config, options.preset, options.weights, options.overwrite, options.quiet)
    return 0 if folder else 1


def evaluate(options: Eval) -> int:
    """`dae eval`."""
    from dae.api import DAE, load_player
    from dae.evaluate import evaluate as score
    from dae.ledger import Diary, write_ledger

    _refuse_bad_play(options.episodes, options.epsilon, options.seed)
    whole, kwargs = None, options.env_kwargs or None
    if options.ledger:
        given = {} if kwargs is None else {"env_kwargs": kwargs}
        whole = DAE.load(options.path, options.env or None, device=options.device, num_envs=1, **given)
        kwargs = whole.config.environment.env_kwargs
    diary = Diary() if whole else None
    player, source = load_player(options.path, options.env or None, device=options.device, env_kwargs=kwargs)
    seed = np.random.SeedSequence(options.seed)
    epsilon = player.config.acting.eval_epsilon if options.epsilon is None else options.epsilon
    episodes = score(player.actor, source, options.episodes, epsilon, seed, player.config.network.channels, diary)
    scores = np.array([e.score for e in episodes])
    error = scores.std(ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else 0.0
    lengths = np.mean([e.length_agent_steps for e in episodes])
    print(f"{source.name}: mean score {scores.mean():.6g} ± {error:.3g} (standard error), median {np.median(scores):.6g}, "
          f"mean length {lengths:.1f}, {len(scores)} episodes, epsilon {epsilon:g}, seed {options.seed}")  # fmt: skip
    if whole is not None and diary is not None:
        write_ledger(Path(options.ledger), whole.agent, diary, whole.reward_scale)
        print(f"ledger: {options.ledger}")
    return 0


def play(options: Play) -> int:
    """`dae play`."""
    from dae.api import load_player
    from dae.envs.gymnasium import close_env
    from dae.run.pictures import make_rendering, video_target
    from dae.run.session import film

    _refuse_bad_play(options.episodes, options.epsilon, options.seed)
    video = video_target(options.video) if options.video else None
    kwargs = options.env_kwargs or None
    player, source = load_player(options.path, options.env or None, options.epsilon, options.seed, env_kwargs=kwargs)
    env = make_rendering(source) if video else source.make()
    if video and env.render_mode != "rgb_array":
        raise EnvironmentFault(f"{source.name} renders no pictures (render_mode='rgb_array'): play it without --video")
    scores = film(player, env, options.episodes, options.seed, video)
    close_env(env)
    for i, (score, length) in enumerate(scores):
        print(f"{source.name} episode {i}: score {score:.6g}, length {length}")
    if video:
        print(f"video: {video}")
    return 0


def check(options: Check) -> int:
    """`dae check`."""
    from dae.envs.check import check_env

    within("steps", options.steps, 1)
    within("seed", options.seed, 0)
    rows = check_env(options.env, dict(options.env_kwargs), options.steps, options.seed)
    table = Table(box=box.SIMPLE_HEAD, title=f"dae check {escape(options.env)}", title_justify="left")
    for column in ("", "rule", "what was seen"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            {"ok": "[green]ok", "note": "[yellow]note", "bad": "[red]bad"}[row.verdict], escape(row.rule), escape(row.seen)
        )
    _console().print(table)
    bad = [row for row in rows if row.verdict == "bad"]
    if bad:
        print(f"dae: {options.env}: {len(bad)} rule(s) broken, the first: {bad[0].rule}: {bad[0].seen}", file=sys.stderr)
    return 3 if bad else 0


def describe(options: Describe) -> int:
    """`dae describe`."""
    from dae import describe as pages

    console = _console()
    if options.presets:
        console.print(pages.presets_table())
    elif not options.config.environment.env:
        console.print(pages.paper_table())
    else:
        for part in pages.agent_tables(options.config):
            console.print(part)
    return 0


def doctor(options: Doctor) -> int:
    """`dae doctor`."""
    from dae.run.session import examine

    if not options.path:
        raise ConfigError("no run given: dae doctor RUN")
    found, numbers = examine(Path(options.path), options.last)
    table = Table(
        box=box.SIMPLE_HEAD, title=f"health over the last {options.last:.0%} of {escape(options.path)}", title_justify="left"
    )
    table.add_column("number")
    table.add_column("mean", justify="right")
    for name, value in numbers.items():
        table.add_row(name, f"{value:.4g}")
    _console().print(table)
    for finding in found:
        print(f"unhealthy: {finding.what}\n   remedy: {finding.remedy}")
    if not found:
        luck = "luck centred" if numbers.get("dae/luck_size") else "luck is off so far"
        print(f"healthy: predictions alive, {luck}, temperature in range, returns vary, states fresh")
    return 0


def export(options: Export) -> int:
    """`dae export`."""
    from dae.run.checkpoint import export as write
    from dae.run.checkpoint import latest_checkpoint, load_checkpoint

    tensors, blueprint, _ = load_checkpoint(latest_checkpoint(Path(options.path)))
    path = write(Path(options.to), tensors, blueprint)
    print(f"{path}: {path.stat().st_size / 2**20:.2f} MiB; play it with: dae play {path}")
    return 0


def bench(options: Bench) -> int:
    """`dae bench`."""
    from dae import bench as benchmark

    within("iterations", options.iterations, 1)
    within("rounds", options.rounds, 1)
    found = benchmark.bench(options.config, options.iterations, options.rounds)
    _console().print(benchmark.table(found))
    if options.to:
        benchmark.write(Path(options.to), found)
        print(f"numbers: {options.to}")
    return 0


def _console() -> Console:
    """As wide as the terminal; where there is none, wide enough for most tables, as others will read it."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)


_ACTIONS: dict[str, Callable[[Any], int]] = {
    "train": train, "eval": evaluate, "play": play, "check": check, "describe": describe, "doctor": doctor, "export": export,
    "bench": bench,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ parsing


def _parse(kind: type[T], verb: str, argv: list[str]) -> T | None:
    """The options of a verb; presets first, so that single options override them. None: help was shown."""
    argv = [_expanded(word, before) for before, word in zip(["", *argv], argv, strict=False)]
    default: Any = None
    names: list[str] = []
    if any(f.name == "preset" for f in dataclasses.fields(kind)):  # type: ignore[arg-type]
        names, file = _values(argv, "--preset"), _values(argv, "--file")
        base = read_options(Path(file[-1])) if file and kind is Train else None
        default = kind(preset=tuple(names), config=with_presets(names, base))  # type: ignore[call-arg]
    if kind is Train and "--tensorboard" in argv and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtra("--tensorboard", "tensorboard")  # asked for by name; by default its files are left out in silence
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            options = tyro.cli(kind, args=argv, prog=f"dae {verb}", default=default, registry=_registry())
    except SystemExit as stop:
        if not stop.code:
            return None
        raise ConfigError(_one_line(complaint.getvalue(), argv, kind)) from None
    # Of a --preset given twice tyro knows the last; all of them are in force.
    return dataclasses.replace(options, preset=tuple(names)) if names else options


def _expanded(word: str, before: str) -> str:
    """`10k`, `1.5M` and `1e4` as whole numbers, where a number of agent steps is expected."""
    option, equals, text = word.rpartition("=")
    number = re.fullmatch(r"(\d+\.?\d*(?:e\d{1,2})?)([kM]?)", text)
    if number is None or not re.fullmatch(r"--[\w-]+[-_]agent[-_]steps", option if equals else before):
        return word
    count = Decimal(number[1]) * {"": 1, "k": 1_000, "M": 1_000_000}[number[2]]  # exact: 1.001k is 1001
    return f"{option}{equals}{int(count)}" if count == int(count) else word


def _values(argv: list[str], option: str) -> list[str]:
    """What is given to an option that must be known before the others are read."""
    names: list[str] = []
    for i, word in enumerate(argv):
        given: list[str] = []
        if word == option:
            given = list(itertools.takewhile(lambda value: not value.startswith("-"), argv[i + 1 :]))
        elif word.startswith(f"{option}="):
            given = word.removeprefix(f"{option}=").split()
        else:
            continue
        if not given:
            raise ConfigError(f"{option} needs a value" + (f": {', '.join(PRESETS)}" if option == "--preset" else ""))
        names += given
    return names


def _one_line(box: str, argv: list[str], kind: type) -> str:
    """Tyro's boxed complaint as one line: what is wrong, and the nearest right name."""
    lines = [line.strip("│╭╮╰╯─|+ \t") for line in box.splitlines()]
    text = " ".join(line for line in lines[1:] if line.strip("-"))  # the first line is the box's title; rules may be dashes
    text = (
        text.split("For full helptext")[0].split("Argument helptext")[0].split("Perhaps you meant")[0].split("Similar arguments")[0]
    )
    text = " ".join(text.split()).rstrip(".")
    if not text.startswith("Unrecognized"):
        return text
    words = [word.rstrip(",") for word in text.split()]
    unknown = [word.split("=")[0] for word in argv if word.startswith("--") and word in words]
    if not unknown:
        return _stray(text.split(":", 1)[-1].split()[0], argv, kind)
    own = [f.name for f in dataclasses.fields(kind)]
    names = [*own, *OPTIONS] if "config" in own else own
    hints = [nearest(word, [f"--{name.replace('_', '-')}" for name in names if name != "config"]) for word in unknown]
    return f"no option {' '.join(unknown)}" + next((h for h in hints if h), "")


def _stray(word: str, argv: list[str], kind: type) -> str:
    """What to say of a word that belongs to no option."""
    before = argv[argv.index(word) - 1] if word in argv[1:] else ""
    if before.startswith("--") and "=" not in before:
        return f"{word}: {before} takes no value"
    if any(f.name == "path" for f in dataclasses.fields(kind)):
        return f"{word}: one path is enough; options have names"
    return f"{word}: options have names (did you mean --{'preset' if word in PRESETS else 'env'} {word}?)"


def _registry() -> ConstructorRegistry:
    """How tyro reads the two types of ours: schedules, and keyword arguments."""
    registry = ConstructorRegistry()

    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type is Schedule:
            return PrimitiveConstructorSpec(
                nargs=1, metavar="STEP:VALUE,...", instance_from_str=lambda words: Schedule.parse(words[0]),
                is_instance=lambda x: isinstance(x, Schedule), str_from_instance=lambda s: [str(s)],
            )  # fmt: skip
        if info.type_origin is Mapping:
            return PrimitiveConstructorSpec(
                nargs="*", metavar="NAME=VALUE", instance_from_str=_keywords,
                is_instance=lambda x: isinstance(x, Mapping), str_from_instance=lambda m: [f"{k}={json.dumps(v)}" for k, v in m.items()],
            )  # fmt: skip
        return None

    registry.primitive_rule(rule)
    return registry


def _keywords(words: list[str]) -> dict[str, Any]:
    """`length=5 mode=hard` -> {"length": 5, "mode": "hard"}: values are JSON where they can be."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and name.isidentifier()):
            raise ConfigError(f"--env-kwargs {word}: must be NAME=VALUE")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _refuse_bad_play(episodes: int, epsilon: float | None, seed: int) -> None:
    within("episodes", episodes, 1)
    within("epsilon", epsilon or 0.0, 0, 1)
    within("seed", seed, 0)


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Our own, without the line of code that Python shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", DaeWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, DaeWarning):
                print(f"dae: {message}", file=sys.stderr)
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _overview() -> int:
    print("usage: dae COMMAND [OPTIONS]      dae COMMAND --help lists the options\n")
    for verb, kind in VERBS.items():
        print(f"  {verb:<10}{(kind.__doc__ or '').strip()}")
    print(f"\npresets: {', '.join(PRESETS)}")
    print("try:     dae train --preset quickstart      (five minutes on a laptop)")
    return 0


if __name__ == "__main__":
    main()
