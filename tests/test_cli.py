"""The command line as a user meets it, in this process; `.ci/smoke` runs it as a program."""

import json
import re
from pathlib import Path

import pytest
import yaml

from dae.cli import run
from dae.config import OPTIONS
from dae.run.record import read_jsonl

TINY = [
    "--preset",
    "laptop",
    "--num-envs",
    "2",
    "--embedding-dim",
    "8",
    "--core-dim",
    "8",
    "--core-blocks",
    "2",
    "--value-hidden",
    "8",
    "--prediction-hidden",
    "8",
    "--prior-hidden",
    "8",
    "--backup-steps",
    "3",
    "--burn-in-steps",
    "2",
    "--batch-size",
    "4",
    "--min-replay-agent-steps",
    "40",
    "--replay-agent-steps",
    "400",
    "--total-agent-steps",
    "200",
    "--log-every-agent-steps",
    "50",
    "--eval-every-agent-steps",
    "100",
    "--checkpoint-every-agent-steps",
    "100",
    "--eval-episodes",
    "3",
    "--no-tensorboard",
]


def train(*more):
    return run(["train", "--env", "dae/TMaze-v0", "--env-kwargs", "length=3", *TINY, *more])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    assert train("--out", str(out)) == 0
    return out / "default" / "dae-TMaze-v0" / "seed0"


def test_the_run_folder(trained):
    """Catches: a file that is missing, a step that is written twice or not at all, an option that is not recorded."""
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert {name for section in config.values() for name in section} == set(OPTIONS)
    assert config["environment"]["env_kwargs"] == {"length": 3}
    about = json.loads((trained / "run.json").read_text())
    assert about["ended"] == "finished"
    assert about["presets"] == ["laptop"]
    metrics, episodes, points = (read_jsonl(trained / f"{n}.jsonl") for n in ("metrics", "episodes", "eval"))
    assert [row["agent_steps"] // 50 for row in metrics] == [1, 2, 3, 4]
    assert metrics[-1]["updates"] == 20
    assert {"time/seconds", "time/agent_steps_per_second", "dae/adv_size", "train/loss_dae"} <= metrics[-1].keys()
    assert sum(e["length"] for e in episodes) <= 200
    assert [sum(row["agent_steps"] == s for row in points) for s in sorted({row["agent_steps"] for row in points})] == [3, 3]
    assert (trained / "curve.png").stat().st_size > 1000
    assert (trained / "videos" / "final.mp4").stat().st_size > 500
    assert [int(p.name) // 100 for p in sorted((trained / "checkpoints").iterdir())] == [1, 2]


def test_the_other_verbs(trained, tmp_path, capsys):
    export = tmp_path / "a.safetensors"
    for command, words in (
        (["eval", str(trained), "--episodes", "2"], r"dae/TMaze-v0: mean score .* 2 episodes"),
        (["export", str(trained), "--to", str(export)], "play it with: dae play"),
        (["play", str(export), "--episodes", "2", "--video", str(tmp_path / "v.mp4")], r"episode 1: score .*\n.*video: "),
        (["doctor", str(trained)], "healthy"),
        (["check", "--env", "dae/TMaze-v0", "--steps", "200"], "the same seed gives the same"),
        (["describe"], "22,061,184"),
        (["describe", "--preset", "laptop", "--env", "dae/TMaze-v0"], "core_blocks"),
        (["describe", "--presets"], "quickstart"),
        (["--version"], r"\d+\.\d+"),
        ([], "usage: dae COMMAND"),
    ):
        assert run(command) == 0, command
        assert re.search(words, capsys.readouterr().out), command
    assert (tmp_path / "v.mp4").stat().st_size > 500


def test_a_run_that_is_there_is_not_touched(trained, capsys):
    before = (trained / "metrics.jsonl").read_bytes()
    assert train("--out", str(trained.parents[2])) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_a_config_file_makes_the_same_run(trained, tmp_path):
    """Catches: an option that config.yaml loses, and a file that is read and not used."""
    assert run(["train", "--file", str(trained / "config.yaml"), "--out", str(tmp_path), "--quiet"]) == 0
    again = tmp_path / "default" / "dae-TMaze-v0" / "seed0"
    for name in ("episodes", "eval"):
        assert read_jsonl(again / f"{name}.jsonl") == read_jsonl(trained / f"{name}.jsonl")


def test_overwriting_touches_runs_only(tmp_path, capsys):
    """Catches: somebody's own files deleted by --overwrite."""
    folder = tmp_path / "default" / "dae-TMaze-v0" / "seed0"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    assert train("--out", str(tmp_path), "--overwrite") == 2
    assert "no run: it is not overwritten" in capsys.readouterr().err
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_weights_from_another_run(trained, tmp_path, capsys):
    assert train("--out", str(tmp_path), "--from", str(trained), "--seed", "5", "--quiet") == 0
    assert "weights only, with a new replay" in capsys.readouterr().err


def test_presets_stack_and_options_override_them(capsys):
    command = "describe --preset laptop frame-stack --env dae/TMaze-v0 --batch-size 7 --eps-wta 0:1,5k:0.5"
    assert run(command.split()) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    values = {name: shown[name].strip() for name in ("core", "core_dim", "batch_size", "eps_wta")}
    assert values == {"core": "mlp", "core_dim": "128", "batch_size": "7", "eps_wta": "0:1.0, 5000:0.5"}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("trian", 2, "did you mean 'train'"),
        ("train", 2, "no environment given: --env ID"),
        ("train --env CartPol-v1", 2, "did you mean 'CartPole-v1'"),
        ("train --env nowhere.at_all:Env", 2, "No module named"),
        ("train --env test_cli:Nothing", 2, "has no Nothing"),
        ("train --env CartPole-v1 --num-envz 3", 2, "did you mean '--num-envs'"),
        ("train --env CartPole-v1 --num-envs three", 2, "invalid literal"),
        ("train --env CartPole-v1 --num-envs 0", 2, "num_envs=0: must be at least 1"),
        ("train --env CartPole-v1 --core gru", 2, "Expected one of"),
        ("train --env CartPole-v1 --epsilon soon", 2, "schedule 'soon'"),
        ("train --env CartPole-v1 --env-kwargs length", 2, "must be NAME=VALUE"),
        ("train --env CartPole-v1 --preset lap", 2, "did you mean 'laptop'"),
        ("train --env Pendulum-v1", 3, "Box are not supported"),
        ("train --env CartPole-v1 --env-kwargs size=3", 3, "can't be made with"),
        ("train --env CartPole-v1 --replay-agent-steps 1000000000000", 4, "GiB are free"),
        ("train --env CartPole-v1 --rewards classes", 2, "name them, for example --reward-classes"),
        ("train --env dae/TMaze-v0 --from nowhere", 5, "neither a run folder"),
        ("train --env CartPole-v1 --name ../x", 2, "name='../x': must be of letters"),
        ("train --overwite --env CartPole-v1", 2, "did you mean '--overwrite'"),
        ("train --file nowhere.yaml", 5, "can't be read as YAML"),
        ("eval nowhere", 5, "no such file"),
        ("play nowhere --episodes 0", 2, "episodes=0"),
        ("doctor nowhere", 5, "no metrics of learning"),
        ("check --env Pendulum-v1", 3, "Box are not supported"),
    ],
)
def test_bad_input_ends_in_one_line_and_a_code(command, code, words, tmp_path, monkeypatch, capsys):
    """Catches: a traceback, an exit code other than the documented one, a folder that is left behind."""
    monkeypatch.chdir(tmp_path)
    assert run(command.split()) == code
    complaint = capsys.readouterr().err.strip()
    assert words in complaint
    assert complaint.count("\n") == 0
    assert complaint.startswith("dae: ")
    assert not list(Path().iterdir())


class Sick(__import__("gymnasium").Env):
    """Pays NaN at its third step."""

    observation_space = __import__("gymnasium").spaces.Discrete(3)
    action_space = __import__("gymnasium").spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return 1, float("nan") if self.t == 3 else 0.0, False, False, {}


def test_an_environment_that_goes_wrong_is_named(tmp_path, capsys):
    assert run(["train", "--env", "test_cli:Sick", *TINY, "--out", str(tmp_path)]) == 3
    assert re.search(r"dae: environment 0, episode seed \d+, step 3: step\(\) returned the reward nan", capsys.readouterr().err)
    assert json.loads((tmp_path / "default" / "Sick" / "seed0" / "run.json").read_text())["ended"] == "failed"
    assert run(["check", "--env", "test_cli:Sick"]) == 3
    assert "rewards are finite: step 3" in capsys.readouterr().err
