"""The command line as a user meets it, in this process; `.ci/smoke` runs it as a program."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import yaml

import dae.cli
import dae.run.checkpoint
from dae.api import DAE
from dae.cli import Train, _parse, run
from dae.config import OPTIONS
from dae.envs.pomdps import TMaze
from dae.run.lock import Lock
from dae.run.record import read_jsonl
from dae.run.session import announce
from test_diagnostics import WELL

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
    "--learning-rate",
    "1e-3",
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
        (["doctor", str(trained)], "train/learning_rate +0.001"),
        (["check", "--env", "dae/TMaze-v0", "--steps", "200"], "the same seed gives the same"),
        (["describe"], "22,061,184"),
        (["describe", "--preset", "laptop", "--env", "dae/TMaze-v0"], "core_blocks"),
        (["describe", "--presets"], "quickstart"),
        (["--version"], r"\d+\.\d+"),
        ([], "usage: dae COMMAND"),
        (["help"], "usage: dae COMMAND"),
        (["help", "train"], "usage: dae train"),
    ):
        assert run(command) == 0, command
        assert re.search(words, capsys.readouterr().out), command
    assert (tmp_path / "v.mp4").stat().st_size > 500


def test_a_run_that_is_there_is_not_touched(trained, capsys):
    before = (trained / "metrics.jsonl").read_bytes()
    assert train("--out", str(trained.parents[2])) == 0
    assert "finished already; --overwrite makes it anew" in capsys.readouterr().err
    assert train("--out", str(trained.parents[2]), "--discount", "0.5") == 2
    assert "already holds a run with other options (discount=" in capsys.readouterr().err
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
    assert train("--out", str(tmp_path)) == 2
    assert "no run: it is not overwritten" in capsys.readouterr().err, "the truth at once, not the advice to overwrite"
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
        ("doctor nowhere", 5, "nowhere is not there"),
        ("doctor .", 5, "has no metrics.jsonl"),
        ("doctor . --last 0", 2, "last=0: must be above 0 and at most 1"),
        ("doctor . --last nan", 2, "last=nan: must be"),
        ("doctor a b", 2, "b: one path is enough"),
        ("train CartPole-v1", 2, "CartPole-v1: options have names (did you mean --env CartPole-v1?)"),
        ("train laptop --env CartPole-v1", 2, "(did you mean --preset laptop?)"),
        ("train --quiet true --env CartPole-v1", 2, "true: --quiet takes no value"),
        ("train --preset --env CartPole-v1", 2, "--preset needs a value: paper, atari"),
        ("train --preset= --env CartPole-v1", 2, "--preset needs a value"),
        ("train --env CartPole-v1 --total-agent-steps 10x", 2, "invalid literal"),
        (
            "train --env CartPole-v1 --width 1e9",
            4,
            "a network of width=1e+09, core_dim=1024, num_outcomes=16 and the like: not enough",
        ),
        ("train --env CartPole-v1 --width 1e30", 4, "not enough memory"),
        ("train --env CartPole-v1 --core-dim 100000000", 4, "not enough memory"),
        ("train --env CartPole-v1 --num-outcomes 1000000", 4, "of which a learner needs 5 copies"),
        ("train --env test_cli:Shut --preset laptop", 3, "step 0: reset() raised KeyError"),
        ("help trian", 2, "did you mean 'train'"),
        ("eval nowhere --epsilon 2", 2, "epsilon=2.0: must be between 0 and 1"),
        ("eval nowhere --epsilon nan", 2, "epsilon=nan: must be between 0 and 1"),
        ("eval nowhere --seed=-1", 2, "seed=-1: must be at least 0"),
        ("play nowhere --epsilon 7", 2, "epsilon=7.0: must be between 0 and 1"),
        ("play nowhere --seed=-1", 2, "seed=-1: must be at least 0"),
        ("play nowhere --video foo.txt", 2, "video=foo.txt: must be the name of an .mp4 file"),
        ("play nowhere --video foo", 2, "must be the name of an .mp4 file"),
        ("play nowhere --video foo.gif", 2, "must be the name of an .mp4 file"),
        ("play nowhere --video .", 2, "must be the name of an .mp4 file"),
        ("play nowhere --video /dev/null/foo.mp4", 5, "/dev/null/foo.mp4: "),
        ("eval nowhere --env x:Y --env-kwargz a=1", 2, "no option --env-kwargz (did you mean '--env-kwargs'?)"),
        ("check --env Pendulum-v1", 3, "Box are not supported"),
        ("check --env CartPol-v1", 2, "did you mean 'CartPole-v1'"),
        ("check --env nowhere.at_all:Env", 2, "No module named"),
        ("check --env CartPole-v1 --seed=-1", 2, "seed=-1: must be at least 0"),
        ("check --env os:getcwd", 3, "not a gymnasium.Env"),
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


class Endless(gym.Env):
    """Never ends, and says nothing of a limit."""

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 1, 0.0, False, False, {}


class Shut(Endless):
    """Can't be reset."""

    def reset(self, *, seed=None, options=None):
        raise KeyError("no such level")


class Frail(Endless):
    """Lasts for a hundred steps, in training and in evaluation."""

    def __init__(self):
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > 100:
            raise OSError("lost")
        return 1, 0.0, False, False, {}


class Sick(gym.Env):
    """Pays NaN at its third step."""

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(2)

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


def test_a_run_that_never_began_is_in_nobodys_way(trained, tmp_path, capsys):
    """Catches: a folder that a wrong option leaves behind, and that has to be overwritten once the option is right; and a run
    that is deleted for the sake of one that can't even begin."""
    out = ["--out", str(tmp_path)]
    for _ in range(2):  # a reward that is none of the classes is noticed at the first step
        assert run(["train", "--env", "test_cli:Endless", "--reward-classes", "1", "2", *TINY, *out]) == 3
        assert "which is none of reward_classes" in capsys.readouterr().err
    shut = tmp_path / "default" / "Shut" / "seed0"
    shutil.copytree(trained, shut)
    assert run(["train", "--env", "test_cli:Shut", *TINY, *out, "--overwrite"]) == 3
    assert read_jsonl(shut / "metrics.jsonl")


def test_a_run_is_not_written_over_its_own_source(trained, capsys):
    assert train("--out", str(trained.parents[2]), "--overwrite", "--from", str(trained / "checkpoints")) == 2
    assert "would be written over it" in capsys.readouterr().err
    assert read_jsonl(trained / "metrics.jsonl")


def test_a_second_run_in_a_folder_is_refused(trained, capsys):
    """Catches: --overwrite that deletes what another process is writing. A lock whose holder is gone is no obstacle."""
    lock = Lock(trained)
    lock.sign()
    assert train("--out", str(trained.parents[2]), "--overwrite") == 2
    assert re.search(rf"a run is going on there \(host .*, pid {os.getpid()}\)", capsys.readouterr().err)
    lock.release()
    assert (trained / "lock").exists()
    assert train("--out", str(trained.parents[2])) == 0
    assert "finished already" in capsys.readouterr().err


def test_a_fault_in_the_last_evaluation_leaves_what_was_learned(tmp_path, capsys):
    """Catches: the only checkpoint written after the evaluation that fails, and one that is lost with a fault in training."""
    for steps in ("150", "400"):
        out = tmp_path / steps
        command = ["train", "--env", "test_cli:Frail", *TINY, "--out", str(out), "--checkpoint-every-agent-steps", "0"]
        assert run([*command, "--total-agent-steps", steps, "--eval-every-agent-steps", "0"]) == 3
        assert "raised OSError: lost" in capsys.readouterr().err
        folder = out / "default" / "Frail" / "seed0"
        assert [int(p.name) for p in (folder / "checkpoints").iterdir()] == [min(int(steps), 200)]
        assert json.loads((folder / "run.json").read_text())["ended"] == "failed"


PROGRAM = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that put us into the background has switched it off,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and `nohup` this one
if {ignored}:
    signal.signal({number}, signal.SIG_IGN)
from dae.run import session
plain = session.note_if_endless
def noting(agent):
    note = plain(agent)
    def begins():
        note()
        threading.Timer(0.2, os.kill, (os.getpid(), {number})).start()
        if {ignored}:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return begins
session.note_if_endless = noting
from dae.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")
@pytest.mark.parametrize(
    ("name", "ignored", "code"), [("SIGINT", 0, 130), ("SIGTERM", 0, 143), ("SIGHUP", 0, 129), ("SIGHUP", 1, 143)]
)
def test_signals_end_a_run_even_in_an_evaluation_without_end(name, ignored, code, tmp_path):
    """Catches: an evaluation that can't be stopped, a network that is lost, `nohup` undone, and an endless wait without a word."""
    program = PROGRAM.format(number=int(getattr(signal, name)), ignored=ignored)
    command = ["train", "--env", "test_cli:Endless", *TINY, "--out", str(tmp_path), "--checkpoint-every-agent-steps", "0"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120, env=env)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("--max-episode-agent-steps") == 1
    assert ended.stderr.rstrip().endswith("dae: stopped")
    folder = tmp_path / "default" / "Endless" / "seed0"
    assert json.loads((folder / "run.json").read_text())["ended"] == "interrupted"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert run(["export", str(checkpoint), "--to", str(tmp_path / "a.safetensors")]) == 0


def test_a_diverged_run_ends_with_a_word(tmp_path, capsys):
    """Catches: a run of NaN that ends as if all were well, and a checkpoint of it."""
    assert train("--out", str(tmp_path), "--learning-rate", "100:1e-3, 101:1e30", "--checkpoint-every-agent-steps", "50") == 1
    assert re.search(r"\ndae: learning has diverged: .* lower learning_rate.*\n$", capsys.readouterr().err)
    folder = tmp_path / "default" / "dae-TMaze-v0" / "seed0"
    assert json.loads((folder / "run.json").read_text())["ended"] == "failed"
    assert [int(p.name) // 50 for p in (folder / "checkpoints").iterdir()] == [1, 2]


def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    """Catches: a traceback, a second one from closing the files, a torn checkpoint, an older one that is lost."""
    plain = dae.run.checkpoint._write

    def write(folder, *rest):
        plain(folder, *rest)
        if len(list(folder.parent.iterdir())) > 1:
            monkeypatch.setattr("pathlib.Path.write_text", full)
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dae.run.checkpoint, "_write", write)
    assert train("--out", str(tmp_path), "--checkpoint-every-agent-steps", "50") == 4
    folder = tmp_path / "default" / "dae-TMaze-v0" / "seed0"
    (complaint,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dae: ")]
    assert re.fullmatch(rf"dae: {folder}/checkpoints/\d+: can't be written: No space left on device", complaint)
    (left,) = (folder / "checkpoints").iterdir()
    assert len(list(left.iterdir())) == 4


def test_all_presets_are_recorded():
    """Catches: a --preset that is in force and not in run.json."""
    options = _parse(Train, "train", ["--preset", "laptop", "--env", "X", "--preset", "luck-off", "frame-stack"])
    assert options.preset == ("laptop", "luck-off", "frame-stack")
    assert (options.config.objective.corrections, options.config.network.core, options.config.run.threads) == ("skill", "mlp", 1)


@pytest.mark.parametrize(
    ("text", "steps"), [("10k", 10_000), ("1.5M", 1_500_000), ("1e4", 10_000), ("1.001k", 1_001), ("70000", 70_000)]
)
def test_agent_steps_may_be_short(text, steps):
    for words in (["--total-agent-steps", text], [f"--total-agent-steps={text}"], ["--total_agent_steps", text]):
        assert _parse(Train, "train", ["--env", "X", *words]).config.learning.total_agent_steps == steps
    assert _parse(Train, "train", ["--env", "X", "--name", text]).config.run.name == text


@pytest.mark.parametrize(("options", "said"), [({}, True), ({"preset": "laptop"}, False)])
def test_the_papers_sizes_on_a_small_machine_are_remarked_on(options, said, tmp_path, capsys):
    """Catches: a beginner whose run takes weeks, and a note to those who chose a preset."""
    announce(DAE("dae/TMaze-v0", device="cpu", **options), tmp_path)
    assert ("begin with --preset laptop" in capsys.readouterr().err) == said


def test_what_metrics_can_t_be_read_is_said(trained, tmp_path, capsys):
    """Catches: a traceback in `dae doctor` on files that something else wrote."""
    for text, words in (
        (b"null\n", "line 1 is no JSON object"),
        (b'{"dae/adv_size": "large"}\n', "'dae/adv_size' is not a number"),
        (b'{"dae/adv_size": null}\n', "'dae/adv_size' is not a number"),
        (b"\xff\xfe\n", "is no text in UTF-8"),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(text)
        assert run(["doctor", str(tmp_path)]) == 5
        assert words in capsys.readouterr().err
    assert run(["doctor", str(tmp_path / "metrics.jsonl")]) == 5
    assert "is a file" in capsys.readouterr().err
    assert run(["doctor", ""]) == 2


def test_the_doctor_does_not_praise_luck_that_is_off(trained, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("corrections: skill")
    for size, words in ((0.0, "luck is off so far"), (0.5, "luck centred")):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(WELL | {"dae/luck_size": size, "dae/luck_mean": 0.0}))
        assert run(["doctor", str(tmp_path)]) == 0
        assert f"\nhealthy: predictions alive, {words}," in capsys.readouterr().out


def test_an_export_replaces_plain_files_only(trained, tmp_path, capsys):
    """Catches: a device that is replaced by a file, and a traceback."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for to in (tmp_path / "link", tmp_path / "pipe", tmp_path, "."):
        assert run(["export", str(trained), "--to", str(to)]) == 5
        assert capsys.readouterr().err == f"dae: {to} is no regular file: it is not replaced; name another one\n"
    assert run(["export", str(trained), "--to", str(tmp_path / "file" / "below")]) == 5
    assert re.fullmatch(r"dae: .*below: can't be written: .*\n", capsys.readouterr().err)
    assert (tmp_path / "file").read_text() == "old"
    assert run(["export", str(trained), "--to", str(tmp_path / "file")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_tables_are_wrapped_and_never_cut(monkeypatch, capsys):
    """Catches: an ellipsis in place of what was asked for; narrow tables where no terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(["describe", "--presets"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) > 120
    monkeypatch.setenv("COLUMNS", "40")
    for command in ("describe", "describe --presets", "describe --preset laptop --env dae/TMaze-v0"):
        assert run(command.split()) == 0
        shown = capsys.readouterr().out
        assert "…" not in shown
        assert max(len(line) for line in shown.splitlines()) <= 40


INTERRUPTED = """
import sys
from importlib.abc import MetaPathFinder
class Finder(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "tyro":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from dae.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_output_that_can_t_be_written():
    """Catches: tracebacks for a full disk behind stdout and for a terminal without ±, and `python -m dae` that is not there."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "dae", "describe", "--presets"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, timeout=60)
    assert (ended.returncode, ended.stderr) == (4, "dae: the output: can't be written: No space left on device\n")
    ended = subprocess.run(command, capture_output=True, text=True, env=env | {"PYTHONIOENCODING": "ascii"}, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, env=env, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "dae: stopped\n")


def test_tensorboard_that_is_asked_for_by_name(monkeypatch, capsys):
    monkeypatch.setattr(dae.cli.importlib.util, "find_spec", lambda name: None)
    assert run(["train", "--env", "dae/TMaze-v0", "--tensorboard"]) == 6
    assert "pip install 'dae-rl[tensorboard]'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ eval, play and check


class Maze(TMaze):
    """Somebody's own T-maze, with a time limit."""

    def reset(self, *, seed=None, options=None):
        self.left = 20
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.left -= 1
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, self.left == 0, info


class Blind(Maze):
    """Has nothing to show."""

    metadata = {"render_modes": [], "reward_classes": (-1.0, 0.0, 1.0)}

    def __init__(self, length=10):
        super().__init__(length)


class Shows(Maze):
    """What it renders can be chosen."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": "fast", "reward_classes": (-1.0, 0.0, 1.0)}

    def __init__(self, what, render_mode=None):
        super().__init__(3, render_mode)
        self.what = what

    def render(self):
        if self.what == "no pygame":
            raise gym.error.DependencyNotInstalled('pygame is not installed, run `pip install "gymnasium[classic-control]"`')
        return {
            "nothing": None,
            "floats": np.zeros((16, 16, 3)),
            "a plane": np.zeros((16, 16), np.uint8),
            "a dot": np.zeros((1, 1, 3), np.uint8),
            "ever less": np.zeros((13 + self.left, 13 + self.left, 3), np.uint8),
            "odd": np.zeros((33, 21, 3), np.uint8),
        }[self.what]


class Leaks(Maze):
    """Raises when it is closed."""

    def close(self):
        raise RuntimeError("the socket is gone")


class Marked(Maze):
    """Speaks in what rich takes for markup."""

    def step(self, action):
        raise ValueError("bad tag [/red] in dae-rl[atari]")


def complaint(capsys):
    """The one line on stderr."""
    words = capsys.readouterr().err.strip()
    assert words.count("\n") == 0, words
    return words


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("nothing", 3, "dae: render() returned no picture to write"),
        ("floats", 3, "dae: render() returned float64 (16, 16, 3): a picture is uint8 (height, width, 3)"),
        ("a plane", 3, "returned uint8 (16, 16)"),
        ("a dot", 3, "a picture of (1, 1)"),
        ("ever less", 3, "a picture of (31, 31): a video needs at least (32, 32)"),
        ("no pygame", 6, "dae: rendering needs an extra: pip install 'dae-rl[render]'"),
    ],
)
def test_a_video_that_cannot_be_made_is_no_video(trained, what, code, words, tmp_path, capsys):
    """Catches: a video that is reported and not there, half a file, and a traceback."""
    target = tmp_path / "videos" / "v.mp4"
    command = ["play", str(trained), "--env", "test_cli:Shows", "--env-kwargs", f"what={what}", "--video", str(target)]
    assert run(command) == code
    assert words in complaint(capsys)
    assert not list(target.parent.iterdir())


def test_a_video_of_odd_pictures_at_no_known_rate(trained, tmp_path, capsys):
    target = tmp_path / "v.mp4"
    assert run(["play", str(trained), "--env", "test_cli:Shows", "--env-kwargs", "what=odd", "--video", str(target)]) == 0
    assert f"video: {target}" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["v.mp4"]


def test_a_video_of_an_environment_without_pictures(trained, tmp_path, capsys):
    """Catches: an hour of play, and no picture at its end."""
    command = ["play", str(trained), "--env", "test_cli:Blind", "--env-kwargs", "length=3", "--video", str(tmp_path / "v.mp4")]
    assert run(command) == 3
    assert complaint(capsys) == "dae: Blind renders no pictures (render_mode='rgb_array'): play it without --video"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["eval", "play"])
def test_keyword_arguments_of_another_name(trained, verb, capsys):
    """Catches: another task that is played without a word."""
    command = [verb, str(trained), "--episodes", "1"]
    assert run([*command, "--env", "test_cli:Maze"]) == 0
    assert "dae: the checkpoint's env_kwargs {'length': 3} are not used" in complaint(capsys)
    for more in (["--env", "test_cli:Maze", "--env-kwargs", "length=3"], ["--env-kwargs", "length=5"], ["--env", "dae/TMaze-v0"]):
        assert run([*command, *more]) == 0
        assert complaint(capsys) == ""


def test_the_warning_comes_once_with_a_ledger(trained, tmp_path, capsys):
    command = ["eval", str(trained), "--episodes", "1", "--env", "test_cli:Maze", "--ledger", str(tmp_path / "steps.csv")]
    assert run(command) == 0
    assert "are not used" in complaint(capsys)


def test_what_an_agent_cannot_play_or_load(trained, tmp_path, capsys):
    assert run(["play", str(trained), "--env", "Pendulum-v1", "--env-kwargs", "g=9.81"]) == 3
    assert "actions of type Box are not supported" in complaint(capsys)
    exported = tmp_path / "a.safetensors"
    assert run(["export", str(trained), "--to", str(exported)]) == 0
    assert run(["eval", str(exported), "--ledger", str(tmp_path / "steps.csv")]) == 5
    assert "an export can only be played" in complaint(capsys)


def test_results_outlive_what_close_raises(trained, tmp_path, capsys):
    """Catches: an evaluation, or a run's end, that is lost to a socket."""
    for verb in ("eval", "play"):
        assert run([verb, str(trained), "--env", "test_cli:Leaks", "--env-kwargs", "length=3", "--episodes", "2"]) == 0
        shown = capsys.readouterr()
        assert "dae: close() of Leaks raised RuntimeError: the socket is gone" in shown.err
        assert "score" in shown.out
    assert run(["train", "--env", "test_cli:Leaks", *TINY, "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().err.count("dae: close() of Leaks raised") == 2  # after training, and after the video
    assert (tmp_path / "default" / "Leaks" / "seed0" / "curve.png").is_file()


def test_check_shows_words_as_they_are(monkeypatch, capsys):
    """Catches: brackets that rich takes for markup."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["check", "--env", "test_cli:Marked"]) == 3
    shown = capsys.readouterr()
    assert "bad tag [/red] in dae-rl[atari]" in shown.out
    assert "bad tag [/red] in dae-rl[atari]" in shown.err


def test_describe_and_doctor_show_words_as_they_are(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["describe", "--preset", "laptop", "--env", "dae/TMaze-v0", "--out", "results[/red]"]) == 0
    assert "results[/red]" in capsys.readouterr().out
    (tmp_path / "[bold]").symlink_to(trained)
    assert run(["doctor", str(tmp_path / "[bold]")]) == 0
    assert "[bold]" in capsys.readouterr().out
