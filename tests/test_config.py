"""The configuration: the paper's tables typed out, schedules, limits, and what is said to a wrong option."""

import ast
import dataclasses
import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dae.config import OPTIONS, Config, Schedule
from dae.errors import ConfigError

PAPER = {
    # Table "Default hyperparameters for the experiments"
    "replay_agent_steps": 1_000_000,
    "min_replay_agent_steps": 20_000,
    "num_envs": 16,
    "eval_epsilon": 0.001,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-6,
    "backup_steps": 16,
    "burn_in_steps": 16,
    "batch_size": 16,
    "num_outcomes": 16,
    "ema_decay": 0.995,
    "beta_prior": 0.025,
    "beta_rec": 1,
    "beta_kl": 20,
    # Table "ALE preprocessing parameters", as far as it is ours
    "frame_stack": 4,
    "discount": 0.99,
    # the text: epsilon_WTA <= 0.75; 20M frames of 4; 50 episodes every million frames; 16 blocks; m = 4 for the ablations
    "luck_from_eps_wta": 0.75,
    "total_agent_steps": 20_000_000 // 4,
    "eval_episodes": 50,
    "eval_every_agent_steps": 1_000_000 // 4,
    "core_blocks": 16,
    "width": 4,
    "embedding_dim": 512,
    # no switch away from the paper
    "core": "lstm",
    "corrections": "skill+luck",
    "outcome_prior": "factorised",
    "luck_form": "product",
    "stored_states": True,
    "burn_in_grad": False,
    "behaviour": "recurrent",
    "skipinit": False,
    "temperature_lr_multiplier": 1,
    "train_steps": 0,
}
TOTAL = PAPER["total_agent_steps"]
SCHEDULES = {
    # "Linearly annealed from 1 to 0.01 in the first 1M steps"
    "epsilon": [(0, 1.0), (250_000, 0.7525), (500_000, 0.505), (1_000_000, 0.01), (1_000_001, 0.01), (TOTAL, 0.01)],
    # "Linearly annealed from 1 to 0 in the first 500000 steps"; 0.75 at 125000
    "eps_wta": [(0, 1.0), (125_000, 0.75), (250_000, 0.5), (499_999, 2e-6), (500_000, 0.0), (TOTAL, 0.0)],
    # "Linear warmup from 0 to 1.25e-4 in the first 100000 steps, then linearly annealed to 1.25e-5 throughout training"
    "learning_rate": [(0, 0.0), (20_000, 2.5e-5), (100_000, 1.25e-4), ((100_000 + TOTAL) // 2, 6.875e-5), (TOTAL, 1.25e-5)],
}


def value(cfg, name):
    return next(getattr(part, name) for part in vars(cfg).values() if hasattr(part, name))


@pytest.mark.parametrize("name", PAPER)
def test_the_defaults_are_the_papers(name):
    assert value(Config(), name) == PAPER[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_are_the_papers(name):
    schedule = value(Config(), name)
    for agent_step, expected in SCHEDULES[name]:
        assert math.isclose(schedule(agent_step, TOTAL), expected, rel_tol=1e-9, abs_tol=1e-12), agent_step


def test_the_replay_ratio_and_the_number_of_updates():
    """0.0625 updates for each environment step, after 20000 of them: 311,250 in all."""
    learning = Config().learning
    assert 1 / learning.agent_steps_per_update == 0.0625
    assert (learning.total_agent_steps - learning.min_replay_agent_steps) / learning.agent_steps_per_update == 311_250
    assert Config().window_steps * learning.batch_size == 512, "frames per batch: (backup + burn-in) x batch size"


def test_every_option_has_a_name_of_its_own():
    """Catches: two sections with the same leaf, one of which `override` would never reach."""
    names = [f.name for section in dataclasses.fields(Config) for f in dataclasses.fields(getattr(Config(), section.name))]
    assert len(set(names)) == len(names)
    assert set(OPTIONS) == set(names) == set(Config().flat())


def test_every_option_is_described():
    """Catches: an option whose line in the help is empty."""
    for section in vars(Config()).values():
        (tree,) = ast.parse(inspect.getsource(type(section))).body
        for field, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(after, ast.Expr), f"{field.target.id} has no docstring"


def test_numbers_have_the_type_they_declare():
    """Catches: 4 and 4.0, which would be two different files and two different hashes of the same run."""
    for cfg in (Config(), Config().override(width=2, beta_rec=1, beta_kl=20, discount=0)):
        for section in vars(cfg).values():
            for f in dataclasses.fields(section):
                if f.type in (int, float, bool, str):
                    assert type(getattr(section, f.name)) is f.type, f.name


# --------------------------------------------------------------------------------------------------------------- schedules


def test_a_schedule_by_hand():
    schedule = Schedule.parse("10:1, 20:3, 2k:3, end:0")
    expected = {0: 1, 10: 1, 15: 2, 20: 3, 1000: 3, 2000: 3, 3000: 1.5, 4000: 0, 9000: 0}
    assert {step: schedule(step, 4000) for step in expected} == expected
    assert schedule(1500, 1000) == 3, "an end before the last point does not pull the schedule back"


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("0.1", ((0, 0.1),)),
        ("0:1, 1M:0.01", ((0, 1.0), (1_000_000, 0.01))),
        ("1.5k:2,end:1e-5", ((1500, 2.0), (None, 1e-5))),
        (" 0 :", None), ("", None), ("0:", None), ("a", None), ("1:2:3", None), ("5:1, 5:2", None), ("5:1, 4:2", None),
        ("end:1, 5:2", None), ("end:1, end:2", None), ("0:1e", None), ("1.2.3:1", None), ("0:nan", None), ("0:1e999", None),
        ("-5:1", None),
    ],
)  # fmt: skip
def test_schedules_are_read_or_refused(text, points):
    """Catches: a traceback, or nonsense that is read as something."""
    if points is not None:
        assert Schedule.parse(text).points == points
        return
    with pytest.raises(ConfigError, match=r"^schedule ") as caught:
        Schedule.parse(text)
    assert "\n" not in str(caught.value)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(st.integers(0, 10**9), finite), min_size=1, unique_by=lambda p: p[0]), st.none() | finite)
def test_a_schedule_survives_being_written(points, end):
    """Catches: a value that is rounded on its way to config.yaml, so that a resumed run is another run."""
    schedule = Schedule((*sorted(points), *([] if end is None else [(None, end)])))
    assert Schedule.parse(str(schedule)) == schedule


# ---------------------------------------------------------------------------------------------------------------- override


def test_override_reaches_every_section_and_copies():
    cfg = Config().override(env="CartPole-v1", width=1, discount=0.9, batch_size=2, epsilon="0.1", seed=7, reward_classes=[0, 1])
    assert (cfg.environment.env, cfg.objective.discount, cfg.learning.batch_size, cfg.run.seed) == ("CartPole-v1", 0.9, 2, 7)
    assert cfg.acting.epsilon == Schedule(((0, 0.1),))
    assert cfg.environment.reward_classes == (0.0, 1.0)
    assert Config().run.seed == 0
    assert cfg.override(seed=0).environment == cfg.environment


def test_numbers_of_numpy_are_numbers():
    """Catches: a seed drawn by NumPy that is refused, and one that is kept as NumPy's, which JSON and YAML can't write."""
    cfg = Config().override(
        num_envs=np.int64(3), seed=np.uint32(3), width=np.float32(0.5), stop_at_score=np.int16(4), total_agent_steps=np.float64(100),
        burn_in_grad=np.bool_(True), core=np.str_("mlp"), reward_classes=[np.float32(0), np.int8(1)], eps_wta=np.float64(0.5),
    )  # fmt: skip
    assert cfg == Config().override(
        num_envs=3, seed=3, width=0.5, stop_at_score=4, total_agent_steps=100, burn_in_grad=True, core="mlp", reward_classes=(0, 1), eps_wta="0.5"
    )  # fmt: skip
    assert {type(value) for value in cfg.flat().values()} <= {int, float, bool, str, list, dict, type(None)}
    assert Config().override(reward_classes=np.array([0, 1])).environment.reward_classes == (0.0, 1.0)


def test_what_is_written_is_read_back():
    """Catches: an option that `flat` or `nested` lose or change."""
    cfg = Config().override(
        epsilon="0:1, 3k:0.123456789", reward_classes=[0, 1], env_kwargs={"a": [1]}, core="mlp", stored_states=False, width=0.3
    )
    assert Config().override(**cfg.flat()) == cfg
    assert {name: v for section in cfg.nested().values() for name, v in section.items()} == cfg.flat()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batchsize": 4}, r"no option 'batchsize' \(did you mean 'batch_size'\?\)"),
        ({"xyzzy": 4}, r"no option 'xyzzy'$"),
        ({"core": "lstn"}, r"core=lstn: must be one of lstm, mlp \(did you mean 'lstm'\?\)"),
        ({"corrections": "luck"}, "corrections=luck: must be one of"),
        ({"num_envs": 0}, "num_envs=0: must be at least 1"),
        ({"num_envs": 1.5}, r"num_envs=1\.5: must be of type int"),
        ({"num_envs": "4"}, "num_envs='4': must be of type int"),
        ({"num_envs": True}, "num_envs=True: must be of type int"),
        ({"num_envs": float("nan")}, "num_envs=nan: must be"),
        ({"num_envs": float("inf")}, "num_envs=inf: must be"),
        ({"width": float("inf")}, "width=inf: must be"),
        ({"beta_kl": float("nan")}, "beta_kl=nan: must be"),
        ({"beta_kl": float("inf")}, "beta_kl=inf: must be"),
        ({"stored_states": 1}, "stored_states=1: must be of type bool"),
        ({"width": 0}, "width=0.*: must be above 0"),
        ({"discount": 1.0}, r"discount=1\.0: must be at least 0 and below 1"),
        ({"ema_decay": -0.1}, r"ema_decay=-0\.1: must be at least 0 and below 1"),
        ({"eval_epsilon": 2}, "eval_epsilon=2.*: must be between 0 and 1"),
        ({"burn_in_steps": -1}, "burn_in_steps=-1: must be 0 or more"),
        ({"env": 3}, "env=3: must be of type str"),
        ({"epsilon": "fast"}, "schedule 'fast'"),
        ({"train_steps": 24}, "train_steps=24: must be a multiple of backup_steps=16"),
        ({"core_blocks": 3}, "core_blocks=3: must divide core_dim=1024"),
        ({"min_replay_agent_steps": 2_000_000}, "min_replay_agent_steps=2000000: must be at most replay_agent_steps=1000000"),
        ({"reward_classes": [0, 1, 1]}, "reward_classes=.*: the values must differ"),
        ({"reward_classes": ["a"]}, "reward_classes="),
        ({"reward_classes": [0, 1], "rewards": "general"}, "reward_classes go with rewards=classes"),
        ({"epsilon": "0:1, 1k:7"}, "epsilon=.*: must be between 0 and 1"),
        ({"eps_wta": "-1"}, "eps_wta=.*: must be between 0 and 1"),
        ({"learning_rate": "-1e-3"}, "learning_rate=.*: must be 0 or more"),
        ({"threads": 99_999_999_999}, "threads=99999999999: must be between 0 and 1024"),
        ({"name": "a" * 101}, r"name=a{20}\.\.\.: must have at most 100 characters"),
        ({"stop_at_score": float("nan")}, "stop_at_score=nan: must be a finite number"),
        ({"num_envs": np.float32(1.5)}, r"num_envs=1\.5: must be of type int"),
        ({"num_envs": np.bool_(True)}, "num_envs=True: must be of type int"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    """Catches: a traceback, a wrong value that passes, a message without the option's name."""
    with pytest.raises(ConfigError, match=message) as caught:
        Config().override(**options)
    assert "\n" not in str(caught.value)


def test_windows():
    cfg = Config().override(backup_steps=4, burn_in_steps=3)
    assert (cfg.train_steps, cfg.window_steps) == (4, 7)
    cfg = cfg.override(train_steps=12)
    assert (cfg.train_steps, cfg.window_steps) == (12, 15)


@pytest.mark.parametrize(
    ("options", "enters"),
    [
        ({}, True),
        ({"total_agent_steps": 100_000}, False),
        ({"total_agent_steps": 125_000}, True),
        ({"total_agent_steps": 124_999}, False),
        ({"total_agent_steps": 1_000, "corrections": "skill"}, True),
        ({"total_agent_steps": 1_000, "eps_wta": "0:1, end:0", "luck_from_eps_wta": 0.0}, True),
        ({"total_agent_steps": 1_000, "eps_wta": "0:1, 500:0.2, 600:0.9", "luck_from_eps_wta": 0.1}, False),
    ],
)
def test_whether_luck_enters(options, enters):
    """Catches: a run that is said to correct for luck and ends before it begins to."""
    assert Config().override(**options).luck_enters == enters
