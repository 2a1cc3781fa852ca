"""What runs recorded on a GPU is what runs everywhere else; and the network's products in 16 bits."""

import warnings
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import random_window, signals, tiny_agent, tiny_config
from dae import graphs
from dae.agent import Agent
from dae.encoders import ObsPart
from dae.envs.gymnasium import EnvList
from dae.graphs import WARM_UP, Captured, Parcel
from dae.train import Seeds, Trainer, build_agent, pick_precision, prepare
from test_train import SHORT, fingerprint, trainer

gpu = pytest.mark.gpu
CPU = torch.device("cpu")


def test_without_cuda_it_is_the_function():
    calls = []

    def function(x):
        calls.append(x)
        return (x + 1,)

    captured, x = Captured(function, torch.device("cpu"), True), torch.zeros(2)
    assert captured(x)[0].tolist() == [1, 1]
    assert calls == [x], "nothing was warmed up or called twice"


class Tape:
    """Recordings on the CPU, as far as they go: what is replayed calls the function again, with the arguments and results where they
    were when it was recorded.
    """

    def __init__(self, monkeypatch, broken=False):
        self.recordings, self.broken, plain = 0, broken, Captured.__init__

        def begin(captured, function, device, record):
            plain(captured, function, device, record)
            captured.stream = self if record else None

        monkeypatch.setattr(Captured, "__init__", begin)
        monkeypatch.setattr(Captured, "_aside", Captured._plain)
        monkeypatch.setattr(Captured, "_capture", lambda captured, places: self.capture(captured.function, places))
        monkeypatch.setattr(graphs, "_on_host", lambda x: not x.is_floating_point())  # so that both ways of arguments are gone

    def capture(self, function, places):
        self.recordings += 1
        if self.broken:
            try:
                raise ValueError("looks at a number")
            finally:
                raise RuntimeError("the capture is invalid")
        result = []

        def replay():
            made = function(*places)
            result[:] = result or [torch.empty_like(x) for x in made]
            for to, x in zip(result, made, strict=True):
                to.copy_(x)

        return SimpleNamespace(replay=replay), result


def test_warm_up_then_one_recording_for_each_set_of_shapes(monkeypatch):
    """Catches: a graph recorded anew at each call, arguments of the call before, and no end of graphs."""
    tape = Tape(monkeypatch)
    captured = Captured(lambda x: (x + 1,), CPU, True)
    for call in range(WARM_UP + 3):
        assert captured(torch.full((2,), call))[0].tolist() == [call + 1] * 2
        assert tape.recordings == (call >= WARM_UP)
    for size in range(3, 20):
        for call in range(WARM_UP + 1):
            assert captured(torch.full((size,), call))[0].tolist() == [call + 1] * size
    assert tape.recordings == len(captured.recorded) == graphs.MOST_SHAPES


def test_where_recording_fails_the_plain_function_goes_on(monkeypatch):
    """Catches: an update lost or made twice on the way, a warning at every call, and one that hides the reason."""
    calls = []

    def function(x):
        calls.append(int(x))
        return (x + 1,)

    tape, captured = Tape(monkeypatch, broken=True), Captured(function, CPU, True)
    monkeypatch.setattr(Captured, "strict", False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in range(WARM_UP + 4):
            assert captured(torch.tensor(call))[0] == call + 1
    assert calls == list(range(WARM_UP + 4))
    assert tape.recordings == len(said) == 1
    assert "ValueError: looks at a number" in str(said[0].message)
    assert not captured.records


def test_tests_hear_of_a_recording_that_fails(monkeypatch):
    """Catches: a comparison of graphs with plain calls in which both are plain."""
    Tape(monkeypatch, broken=True)
    captured = Captured(lambda x: (x + 1,), CPU, True)
    for call in range(WARM_UP):
        captured(torch.tensor(call))
    with pytest.raises(RuntimeError, match="the capture is invalid"):
        captured(torch.tensor(0))


def test_what_is_sent_arrives():
    """Catches: tensors that overlap, that lose their type or shape, or that come out where a graph does not look."""
    kinds = (
        ((3, 5), torch.uint8),
        ((), torch.float32),
        ((0, 7), torch.int64),
        ((4,), torch.bool),
        ((2, 2), torch.int64),
        ((3,), torch.float16),
    )
    made = [[torch.randint(0, 2, shape).to(dtype) for shape, dtype in kinds] for _ in range(2)]
    parcel = Parcel(made[0], CPU)
    where = [x.data_ptr() for x in parcel.places]
    for tensors in made:
        parcel.send(tensors)
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(parcel.places, tensors, strict=True))
        for x in tensors:
            x.zero_()
    assert where == [x.data_ptr() for x in parcel.places]
    assert sum(x.float().sum() for x in parcel.places) > 0, "it is a copy"


@pytest.mark.parametrize("options", [{}, {"behaviour": "aligned", "stored_states": False}, {"agent_steps_per_update": 2}])
def test_a_run_of_recordings_is_the_plain_run_to_the_last_bit(options, monkeypatch):
    """Catches: a result that is written over before it was read, arguments of another step, updates sent off in another order, and
    random numbers drawn in another one.
    """
    plain = trainer(**options)
    reports = [(r.kind, r.agent_steps, r.updates, r.episodes, sorted(r.metrics.items())) for r in plain.run()]
    tape, run = Tape(monkeypatch), trainer(**options)
    assert run.ahead, "updates come before the actions"
    for captured in (run.agent._choose, run.replay._write):  # the trainer's own is recorded already
        captured.stream = tape
    assert [(r.kind, r.agent_steps, r.updates, r.episodes, sorted(r.metrics.items())) for r in run.run()] == reports
    assert fingerprint(run) == fingerprint(plain)
    assert tape.recordings >= 3


def places(agent):
    """Where everything lies that an update reads and writes."""
    return {name: tensor.data_ptr() for name, tensor in agent.state_dict().items()}


def test_loading_writes_into_what_is_there(rng):
    """Catches: new memory for the optimiser's state, which a recorded graph would not know of; and moments of other strides."""
    cfg = tiny_config()
    one, other, window = tiny_agent(cfg), tiny_agent(cfg, seed=1), random_window(cfg, rng)
    for agent in (one, other):
        agent.update(window, signals())
    saved, before = {name: x.clone() for name, x in one.state_dict().items()}, places(other)
    other.load_state_dict(saved)
    assert places(other) == before
    assert all(torch.equal(x, saved[name]) for name, x in other.state_dict().items())
    one.update(window, signals())
    other.update(window, signals())
    assert all(torch.equal(x, one.state_dict()[name]) for name, x in other.state_dict().items())

    young = tiny_agent(cfg, seed=2)  # its optimiser has not stepped yet
    young.load_state_dict(saved)
    assert all(torch.equal(x, saved[name]) for name, x in young.state_dict().items())
    never = {name: x for name, x in saved.items() if not name.startswith("adam.")}
    other.load_state_dict(never)
    young = tiny_agent(cfg, seed=2)
    young.load_state_dict(never)
    for agent in (other, young):
        agent.update(window, signals())
    assert all(torch.equal(x, young.state_dict()[name]) for name, x in other.state_dict().items()), (
        "as new as one that never stepped"
    )


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


def test_what_fast_means(monkeypatch):
    """Catches: 16 bits on the CPU, kernels on it, graphs that are off where they could be on, a precision that can't be chosen."""
    assert pick_precision("auto", True) == pick_precision("bfloat16", False) == torch.bfloat16
    assert pick_precision("auto", False) == pick_precision("float32", True) == torch.float32
    agent = tiny_agent(tiny_config(fast=True, core_dim=32))
    assert agent.precision == torch.float32
    assert agent.net.core.lstm.implementation == "reference"
    for name in ("benchmark", "benchmark_limit"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    prepare(agent.net)
    assert agent.net.core.lstm.implementation == "auto"
    assert torch.backends.cudnn.benchmark


def test_weights_of_convolutions_lie_channels_last(rng):
    """Catches: moments or a slow network of other strides than the weights, as a checkpoint would bring them: fused Adam refuses."""
    cfg, picture = tiny_config(num_envs=2), {"obs": ObsPart((1, 40, 40), torch.uint8, 1 / 255)}
    network = build_agent(cfg, picture, 3, (-1.0, 0.0, 1.0)).net
    plain = {name: x.clone() for name, x in network.state_dict().items()}
    prepare(network)
    agent = Agent(network, cfg.objective, cfg.learning, cfg.acting, torch.bfloat16)
    assert all(torch.equal(x, plain[name]) for name, x in agent.net.state_dict().items())
    w = random_window(cfg, rng)
    shape = w.inputs.obs["obs"].shape[:2]
    w.inputs.obs["obs"] = torch.randint(0, 256, (*shape, 2, 1, 40, 40), dtype=torch.uint8)
    agent.update(w, signals())
    agent.load_state_dict({name: x.contiguous() for name, x in agent.state_dict().items()})
    agent.update(w, signals())
    weight = agent.net.encoder.parts[0].layers[2].branch[1].weight
    slots = agent.optimizer.state[weight]
    strides = {x.stride() for x in (weight, weight.grad, slots["exp_avg"], slots["exp_avg_sq"])}
    assert strides == {agent.ema.encoder.parts[0].layers[2].branch[1].weight.stride()} == {weight.stride()}
    assert weight.is_contiguous(memory_format=torch.channels_last)


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


class Pictures(gym.Env):
    """Bytes that never repeat, and rewards that they tell."""

    observation_space = gym.spaces.Box(0, 255, (1, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(3)
    metadata = {"reward_classes": (-1.0, 0.0, 1.0)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), float(self.t % 3 - 1), self.t % 11 == 0, False, {}

    def observe(self):
        return self.np_random.integers(0, 256, (1, 84, 84)).astype(np.uint8)


@gpu
@pytest.mark.parametrize("width", [1, 4])
def test_recorded_updates_of_pictures(width, unchecked):
    """Kernels, layouts and 16 bits all together, recorded and not. Catches: a path that only falls back, and numbers that drift apart."""
    losses = []
    for recorded in (True, False):
        cfg = tiny_config(**SHORT | {"device": "cuda", "core_dim": 32, "frame_stack": 4, "width": width, "learning_rate": "1e-4"})
        envs = EnvList(Pictures, cfg.environment.num_envs, Seeds.of(cfg.run.seed).envs)
        run = Trainer(cfg, envs, build_agent(cfg, envs.spec, envs.num_actions, envs.reward_classes), None)
        assert run.agent.precision == torch.bfloat16
        run._update.stream = run._update.stream if recorded else None
        for _ in range(30):
            run.collector.step(1.0)
        window = run.replay.sample(np.random.default_rng(0), 4, cfg.window_steps)
        pictures = window.inputs.obs["obs"].flatten(0, 1)
        assert pictures.flatten(1, 2).is_contiguous(memory_format=torch.channels_last)
        assert run.agent.net.encoder.parts[0].takes_kernel(pictures)
        found = []
        for _ in range(WARM_UP + 10):
            run.learn()
            found.append(run.metrics()["train/loss_rec"])
        losses.append(found)
        assert bool(run._update.recorded) == recorded
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@gpu
def test_loading_after_recording():
    """Catches: a graph that goes on with the moments, or the learning rate, of before."""
    made = []
    for recorded in (True, False):
        run = on_gpu()
        run._update.stream = run._update.stream if recorded else None
        for _ in range(60):
            run.collector.step(1.0)
        saved = {name: x.clone() for name, x in run.agent.state_dict().items()}
        for _ in range(WARM_UP + 3):
            run.learn()
        run.agent.load_state_dict(saved)
        for _ in range(3):
            run.learn()
        made.append(run.agent.state_dict())
    for name in made[0]:
        torch.testing.assert_close(made[0][name], made[1][name], rtol=1e-4, atol=1e-5)


@gpu
def test_a_function_that_can_t_be_recorded(monkeypatch):
    """Catches: a device that is of no use after a recording that failed."""
    monkeypatch.setattr(Captured, "strict", False)
    captured, x = Captured(lambda x: (x + x.item(),), torch.device("cuda"), True), torch.ones(3, device="cuda")
    with pytest.warns(UserWarning, match="could not be recorded"):
        results = [captured(x)[0].tolist() for _ in range(WARM_UP + 3)]
    assert results == [[2.0] * 3] * (WARM_UP + 3)
    again = Captured(lambda x: (2 * x,), torch.device("cuda"), True)
    assert [again(x)[0].tolist() for _ in range(WARM_UP + 3)] == [[2.0] * 3] * (WARM_UP + 3)


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
def test_a_whole_run_of_recordings(unchecked):
    """Recorded and plain, with everything on: the same actions and the same ring."""
    rings = []
    for fast in (True, False):
        run = on_gpu(fast=fast, precision="float32", learning_rate="0", epsilon="0.5")
        assert run.ahead == fast
        list(run.run())
        rings.append([x.cpu() for x in (*run.replay.obs.values(), run.replay.action, run.replay.reward, run.replay.valid)])
    assert all(torch.equal(one, other) for one, other in zip(*rings, strict=True))


@gpu
def test_nobody_waits_for_the_device(unchecked):
    """Catches: any wait in an iteration but the one for the actions."""
    run = on_gpu(total_agent_steps=100_000, replay_agent_steps=4000, variance_every_agent_steps=100_000)
    while run.updates < WARM_UP + 3:
        run.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.updates >= WARM_UP + 53


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
