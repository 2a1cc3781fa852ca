"""A run that was cut off and goes on is the run that was never cut off."""

import hashlib
import itertools
import json
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import Counter
from dae.cli import run
from dae.encoders import ObsPart
from dae.replay import Replay
from dae.run.chunks import Chunk, ReplayStore
from dae.run.record import read_jsonl
from test_train import fingerprint, trainer

LONG = {"total_agent_steps": 320, "log_every_agent_steps": 20, "eval_every_agent_steps": 60, "eval_epsilon": 0.3}


class Faithful(Counter):
    """Its episodes follow from their seeds, and noise too."""

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.episode = int(self.np_random.integers(50)) - 1
        return super().reset()

    def step(self, action):
        self.noise = self.np_random.normal()
        return super().step(action)

    def observe(self):
        return super().observe() + np.array([0, 0, self.noise if self.t else 0.0], np.float32)


def told(report):
    return report.kind, report.agent_steps, report.updates, report.episodes, sorted(report.metrics.items())


def through_files(run, folder):
    """All that is kept of a run, written and read again."""
    tensors, numbers = run.state()
    chunks = [c.to_json() for c in ReplayStore(folder).save(run.replay)]
    agent = {name: tensor.clone() for name, tensor in run.agent.state_dict().items()}
    return agent, tensors, *json.loads(json.dumps([numbers, chunks]))


def gone_on(folder, kept, **options):
    agent, tensors, numbers, chunks = kept
    run = trainer(Faithful, **options)
    run.agent.load_state_dict(agent)
    ReplayStore(folder, [Chunk.from_json(c, "here") for c in chunks]).load(run.replay)
    return run, run.go_on(tensors, numbers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frame_stack": 3, "batch_size": 3},
        {"rewards": "general"},
        {"behaviour": "aligned", "stored_states": False},
        {"core": "mlp", "burn_in_steps": 0},
        {"replay_agent_steps": 100},
        {"eval_beside": True, "eval_every_agent_steps": 24},
        {"agent_steps_per_update": 6, "min_replay_agent_steps": 37},
    ],
)
def test_it_goes_on_to_the_last_bit(options, tmp_path, unchecked):
    """Cut at each of its reports in turn. Catches: anything that a run carries and a checkpoint forgets."""
    options = LONG | options
    whole = trainer(Faithful, **options)
    reports = [told(r) for r in whole.run()]
    cuts = [i for i, r in enumerate(reports) if r[0] == "train"]
    assert len(cuts) > 10
    for cut in cuts[:: max(1, len(cuts) // 3)]:
        first = trainer(Faithful, **options)
        before = [told(r) for r in itertools.islice(first.run(), cut + 1)]
        folder = tmp_path / str(cut)
        second, exact = gone_on(folder, through_files(first, folder), **options)
        assert exact
        after = [told(r) for r in second.run()]
        evaluated = [r for r in (*before, *after) if r[0] == "eval"]
        assert evaluated == [r for r in reports if r[0] == "eval"], "each evaluation once, and the same"
        assert [r for r in (*before, *after) if r[0] != "eval"] == [r for r in reports if r[0] != "eval"], cut
        assert fingerprint(second) == fingerprint(whole), cut


def test_stopped_by_a_signal_it_goes_on_to_the_last_bit(tmp_path, unchecked):
    """Catches: updates that a stop makes early, and an evaluation that it drops for ever."""
    whole = trainer(Faithful, **LONG)
    reports = [told(r) for r in whole.run()]
    for stop in (57, 60, 61, 130, 180):
        first, before = trainer(Faithful, **LONG), []
        plain = first.collector.store

        def store(stepped, first=first, plain=plain, stop=stop):
            episodes = plain(stepped)
            first.stop = first.agent_steps >= stop
            return episodes

        first.collector.store, kept = store, None
        for report in first.run():
            if report.kind in ("train", "eval"):
                before.append(told(report))
            if report.kind == "stopped":
                kept = through_files(first, tmp_path / str(stop))
        second, exact = gone_on(tmp_path / str(stop), kept, **LONG)
        assert exact
        after = [told(r) for r in second.run()]
        assert fingerprint(second) == fingerprint(whole), stop
        for kind in ("train", "eval"):
            assert [r for r in (*before, *after) if r[0] == kind] == [r for r in reports if r[0] == kind], stop


class Moody(Counter):
    """Not told by seeds and actions alone: it counts on."""

    made = 0

    def observe(self):
        type(self).made += 1
        return np.array([self.number, self.episode, type(self).made], np.float32)


def test_environments_that_can_not_be_brought_back_begin_anew(tmp_path):
    """Catches: a window that takes the first observation of a new episode for the next one of the old."""
    options = LONG | {"evaluation": False, "min_replay_agent_steps": 2_000}
    first = trainer(Moody, **options)
    for report in first.run():
        if report.agent_steps > 100:
            break
    second = trainer(Moody, **options)
    kept = through_files(first, tmp_path)
    ReplayStore(tmp_path, [Chunk.from_json(c, "here") for c in kept[3]]).load(second.replay)
    assert not second.go_on(kept[1], kept[2])
    count = first.replay.count
    assert (second.replay.count == count + 1).all()
    last = torch.from_numpy(count % second.replay.slots), torch.arange(4)
    assert not second.replay.valid[last].any()
    assert not second.replay.terminal[last].any()
    assert second.collector.reset.all()
    assert second.collector.valid.all()
    second.collector.step(0.5)
    opened = torch.from_numpy((count + 1) % second.replay.slots), torch.arange(4)
    assert second.replay.reset[opened].all()
    assert second.replay.valid[opened].all()
    assert not second.replay.core_in[opened].any()


def test_all_rings_are_kept():
    """Catches: a ring that is added to the replay and not to what is kept of it."""
    replay = Replay({"obs": ObsPart((2,), torch.float32)}, 2, 20, 4, 1)
    tensors = [x for x in (*vars(replay).values(), *replay.obs.values()) if isinstance(x, torch.Tensor)]
    assert {x.data_ptr() for x in tensors} == {x.data_ptr() for x in replay.rings().values()}


# ------------------------------------------------------------------------------------------------------------- as a command

SMALL = [
    "train", "--env", "dae/TMaze-v0", "--env-kwargs", "length=3", "--preset", "laptop", "--embedding-dim", "8", "--core-dim", "8",
    "--core-blocks", "2", "--value-hidden", "8", "--prediction-hidden", "8", "--prior-hidden", "8", "--batch-size", "4",
    "--num-envs", "4", "--min-replay-agent-steps", "200", "--replay-agent-steps", "600", "--total-agent-steps", "1500",
    "--log-every-agent-steps", "50", "--eval-every-agent-steps", "300", "--eval-episodes", "3", "--checkpoint-every-agent-steps",
    "100", "--epsilon", "0.5", "--no-video", "--no-tensorboard", "--quiet",
]  # fmt: skip


def left(out):
    """All that a run leaves that is not of the clock."""
    (folder,) = out.glob("default/*/seed0")
    rows = {
        name: [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(folder / f"{name}.jsonl")]
        for name in ("metrics", "episodes", "eval")
    }
    weights = (sorted((folder / "checkpoints").iterdir())[-1] / "agent.safetensors").read_bytes()
    return rows, hashlib.sha256(weights).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    assert run([*SMALL, "--out", str(out)]) == 0
    return left(out)


def process(out):
    command = [sys.executable, "-m", "dae", *SMALL, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_killed_again_and_again_the_same_command_finishes_the_same_run(whole, tmp_path):
    """kill -9 at any moment. Catches: a file that is written over, a line that stands there twice or not at all, a lost chunk."""
    rng, killed, gone_on = np.random.default_rng(), 0, 0
    for _ in range(4):
        running, begun = process(tmp_path), time.monotonic()
        while not list(tmp_path.glob("default/*/seed0/metrics.jsonl")) and time.monotonic() - begun < 60:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 3.0))
        running.kill()
        killed += running.wait() == -signal.SIGKILL
        gone_on += "going on after" in running.stderr.read()
    assert killed
    assert run([*SMALL, "--out", str(tmp_path)]) == 0
    assert left(tmp_path) == whole
    (folder,) = tmp_path.glob("default/*/seed0")
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert not [path.name for path in folder.rglob("*.partial")]


def test_stopped_by_a_signal_the_same_command_finishes_the_same_run(whole, tmp_path):
    running = process(tmp_path)
    while not list(tmp_path.glob("default/*/seed0/checkpoints/*")):
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 143
    assert run([*SMALL, "--out", str(tmp_path)]) == 0
    assert left(tmp_path) == whole


def test_the_same_command_again(whole, tmp_path, capsys):
    """Catches: a finished run that is run again, another run that is written over or gone on with, damage that is not noticed."""
    words = [*SMALL, "--out", str(tmp_path), "--stop-after-agent-steps", "400"]
    assert run(words) == 0
    (folder,) = tmp_path.glob("default/*/seed0")
    capsys.readouterr()
    assert run(words) == 0
    assert "finished already; --overwrite" in capsys.readouterr().err
    assert run([*words, "--batch-size", "5"]) == 2
    assert "another run" in (said := capsys.readouterr().err) or "with other options (batch_size=4 there, 5 here)" in said
    assert json.loads((folder / "run.json").read_text())["ended"] == "stopped"
    newest = max((folder / "checkpoints").iterdir())
    (newest / "run.safetensors").write_bytes(b"damaged")
    assert run([*SMALL, "--out", str(tmp_path)]) == 0  # on to the end, from the checkpoint before
    said = capsys.readouterr().err
    assert "run.safetensors: missing or damaged" in said
    assert "going on after 3" in said
    assert left(tmp_path)[1] == whole[1]
    assert json.loads((folder / "run.json").read_text())["ended"] == "finished"
    assert not (folder / "replay").exists()


def test_a_run_that_can_not_go_on_is_not_thrown_away(tmp_path, capsys):
    words = [*SMALL, "--out", str(tmp_path), "--no-resumable"]
    assert run([*words, "--stop-after-agent-steps", "300"]) == 0
    (folder,) = tmp_path.glob("default/*/seed0")
    assert not (folder / "replay").exists()
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"ended": "interrupted"}))
    assert run(words) == 2
    assert "nothing that this run could go on from" in capsys.readouterr().err
    assert run([*words, "--overwrite", "--stop-after-agent-steps", "300"]) == 0
