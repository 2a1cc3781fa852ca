"""What runs recorded on a GPU is what runs everywhere else; and the network's products in 16 bits."""

import numpy as np
import pytest
import torch

from conftest import random_window, signals, tiny_agent, tiny_config
from dae.envs.gymnasium import EnvList
from dae.graphs import WARM_UP, Captured
from dae.train import Seeds, Trainer, build_agent
from test_train import SHORT, trainer

gpu = pytest.mark.gpu


def test_without_cuda_it_is_the_function():
    calls = []

    def function(x):
        calls.append(x)
        return (x + 1,)

    captured, x = Captured(function, torch.device("cpu"), True), torch.zeros(2)
    assert captured(x)[0].tolist() == [1, 1]
    assert calls == [x], "nothing was warmed up or called twice"


def test_sixteen_bits_stay_inside_the_network(rng):
    """Catches: an objective, a state or a normalisation in 16 bits; and a switch that does nothing."""
    cfg = tiny_config()
    agent, w = tiny_agent(cfg), random_window(cfg, rng)
    exact = {k: v.item() for k, v in agent.losses(w, signals())[0].items()}
    agent.precision = torch.bfloat16
    with agent.autocast():
        weighted, parts = agent.losses(w, signals())
        trunk = agent.net.trunk(w.inputs, w.core_in)
        outcomes = agent.net.outcomes(trunk.features[:-1], w.action)
    tensors = {**weighted, **parts, **vars(trunk), **{k: v for k, v in vars(outcomes).items() if v is not None}}
    assert {k: v.dtype for k, v in tensors.items() if v.dtype not in (torch.float32, torch.bool)} == {}
    for name, value in weighted.items():
        assert value.item() != exact[name] or name == "temperature"
        assert value.item() == pytest.approx(exact[name], rel=0.1, abs=0.02)


def test_a_run_in_sixteen_bits():
    run = trainer(precision="bfloat16", evaluation=False)
    reports = [report for report in run.run() if report.kind == "train"]
    assert all(np.isfinite(list(report.metrics.values())).all() for report in reports)
    assert {p.dtype for p in run.agent.net.parameters()} == {torch.float32}


# ------------------------------------------------------------------------------------------------------------------ on a GPU


def on_gpu(**overrides):
    from conftest import Counter

    number = iter(range(100))
    cfg = tiny_config(**SHORT | {"device": "cuda", "fast": True, "core_dim": 32, "core_blocks": 2} | overrides)
    envs = EnvList(lambda: Counter(next(number)), cfg.environment.num_envs, Seeds.of(cfg.run.seed).envs)
    return Trainer(cfg, envs, build_agent(cfg, envs.spec, envs.num_actions, envs.reward_classes), None)


@gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recorded_updates_are_plain_updates(precision):
    """From one state: as many updates replayed as made one by one give the same weights, optimiser, temperature and metrics."""
    made = []
    for recorded in (True, False):
        run = on_gpu(precision=precision)
        run._update.stream = run._update.stream if recorded else None
        for _ in range(60):
            run.collector.step(1.0)
        metrics = []
        for _ in range(WARM_UP + 20):
            run.learn()
            metrics.append(run.metrics())
        made.append((run.agent.state_dict(), metrics))
        assert bool(run._update.recorded) == recorded
    (one, first), (other, second) = made
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
    assert [m["train/loss_dae"] for m in first] == pytest.approx([m["train/loss_dae"] for m in second], rel=1e-3)


@gpu
def test_recorded_acting_is_plain_acting():
    """Actions and stored states, over resets. Catches: a state that the graph overwrites before the replay has it."""
    rings = []
    for recorded in (True, False):
        run = on_gpu()
        run.agent._choose.stream = run.agent._choose.stream if recorded else None
        for _ in range(60):
            run.collector.step(0.1)
        rings.append((run.replay.action.cpu(), run.replay.core_in.cpu()))
    assert torch.equal(rings[0][0], rings[1][0])
    torch.testing.assert_close(rings[0][1], rings[1][1])
    assert rings[0][1].abs().sum() > 0


@gpu
def test_windows_on_the_gpu_are_those_on_the_cpu(rng):
    """The same stream written to both, the same draws: the same windows, and the same Var(G)."""
    from conftest import collected

    made = collected("next_step", 80, slots=60)
    replay = made.replay
    other = type(replay)(made.envs.spec, 3, 180, made.agent.net.state_dim, replay.frame_stack, "cuda", torch.float32)
    for name in ("action", "reward", "reset", "terminal", "valid", "core_in"):
        getattr(other, name).copy_(getattr(replay, name))
    for name, ring in replay.obs.items():
        other.obs[name].copy_(ring)
    other.count = replay.count.copy()
    one, two = (r.sample(np.random.default_rng(1), 50, 6) for r in (replay, other))
    for name in ("action", "reward", "terminal", "valid", "core_in"):
        assert torch.equal(getattr(one, name), getattr(two, name).cpu())
    for name in one.inputs.obs:
        assert torch.equal(one.inputs.obs[name], two.inputs.obs[name].cpu())
    assert other.return_variance(0.9) == pytest.approx(replay.return_variance(0.9), rel=1e-9)


@gpu
@pytest.mark.parametrize(("channels", "wide"), [(4, 16), (16, 16), (16, 32), (32, 32), (4, 64), (64, 128), (128, 128)])
def test_convolutions_have_the_gradients_of_float64(channels, wide):
    """Every shape of IMPALA at m = 1 and 4, in bfloat16 and channels_last: some libraries were wrong here before."""
    torch.manual_seed(0)
    size = {4: 84, 16: 42, 32: 21, 64: 42, 128: 21}[channels]
    conv = torch.nn.Conv2d(channels, wide, 3, padding=1)
    x = torch.randn(64, channels, size, size)
    grads = {}
    for dtype in (torch.float64, torch.bfloat16):
        layer = torch.nn.Conv2d(channels, wide, 3, padding=1).to("cuda", dtype, memory_format=torch.channels_last)
        with torch.no_grad():
            layer.weight.copy_(conv.weight.bfloat16())
            layer.bias.copy_(conv.bias.bfloat16())
        inputs = x.bfloat16().to("cuda", dtype).to(memory_format=torch.channels_last).requires_grad_()
        layer(inputs).square().mean().backward()
        grads[dtype] = [layer.weight.grad.double(), layer.bias.grad.double(), inputs.grad.double()]
    for exact, rough in zip(grads[torch.float64], grads[torch.bfloat16], strict=True):
        assert (rough - exact).norm() < 0.02 * exact.norm()
