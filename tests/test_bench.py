"""The benchmark measures what it says."""

import json
import time

import numpy as np
import pytest

from conftest import tiny_config
from dae import bench, cli
from dae.errors import ConfigError
from dae.train import Trainer

SMALL = {
    "env": "dae/TMaze-v0", "num_envs": 2, "frame_stack": 1, "batch_size": 4, "agent_steps_per_update": 2, "min_replay_agent_steps": 10_000,
    "replay_agent_steps": 10_000, "eval_episodes": 2, "device": "cpu",
}  # fmt: skip


def test_an_iteration_is_the_sum_of_what_it_does(monkeypatch):
    """Catches: a part that is not measured, one that is measured twice, and updates that do not happen."""
    slow, plain, updates = 0.02, Trainer.step, []

    def step(run):
        time.sleep(slow)
        result = plain(run)
        updates.append(run.updates)
        return result

    monkeypatch.setattr(Trainer, "step", step)
    found = bench.bench(tiny_config(**SMALL), 10, 2)
    assert set(found["parts_ms"]) == set(bench.PARTS)
    assert all(ms >= 0 for ms in found["parts_ms"].values())
    assert found["update_ms"] == pytest.approx(
        sum(found["parts_ms"][name] for name in ("sample", "forward", "backward", "optimiser"))
    )
    assert found["update_ms"] > 0
    assert found["iteration_ms"] > 1e3 * slow
    assert found["iteration_ms"] == np.median(found["rounds_ms"])
    assert len(found["rounds_ms"]) == 2
    assert updates[-1] - updates[-11] == 10, "an update for each iteration"
    assert found["agent_steps_per_second"] == pytest.approx(2e3 / found["iteration_ms"])
    assert found["whole_run_hours"] == pytest.approx(
        tiny_config(**SMALL).learning.total_agent_steps / 2 * found["iteration_ms"] / 3.6e6
    )
    assert json.dumps(found)


def test_operations_are_counted(monkeypatch):
    """Catches: a count that misses the backward pass or does not know the batch."""
    monkeypatch.setattr(bench, "BESIDE", 2)
    one, two = (bench.bench(tiny_config(**SMALL | {"batch_size": size}), 2, 1)["update_tflop"] for size in (4, 8))
    assert one > 0
    assert two == pytest.approx(2 * one)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "BESIDE", 2)
    sizes = ["--embedding-dim", "8", "--core-dim", "8", "--core-blocks", "2", "--value-hidden", "8", "--prediction-hidden", "8"]
    words = [
        "bench",
        "--preset",
        "laptop",
        "--env",
        "dae/TMaze-v0",
        "--iterations",
        "2",
        "--rounds",
        "1",
        "--eval-episodes",
        "2",
        *sizes,
    ]
    assert cli.run([*words, "--to", str(tmp_path / "new" / "bench.json")]) == 0
    found = json.loads((tmp_path / "new" / "bench.json").read_text())
    printed = capsys.readouterr().out
    assert f"{found['iteration_ms']:.3f}" in printed
    assert "evaluation" in printed
    assert found["options"]["embedding_dim"] == 8


def test_a_replay_that_is_too_small():
    with pytest.raises(ConfigError, match="too small for a benchmark"):
        bench.bench(tiny_config(**SMALL | {"replay_agent_steps": 10, "min_replay_agent_steps": 1}), 1, 1)
