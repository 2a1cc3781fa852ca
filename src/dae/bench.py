"""`dae bench`: where the time of one iteration goes, on this machine, with this configuration.

An iteration is one step of every environment and the updates that fall due: `Trainer.step`, as a run makes it. It is timed as a
whole, over many iterations. Its parts are timed apart, one after another with the device waited for in between, so that they add up
to more than the whole where the whole overlaps them. What a recorded graph does inside can't be timed: for the parts of an update
graphs of growing length are recorded (windows; and losses; and gradients; all), and the differences are the parts.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dae.api import DAE
from dae.config import Config
from dae.encoders import Impala
from dae.envs.gymnasium import Stepped
from dae.errors import ConfigError
from dae.evaluate import Evaluation
from dae.graphs import WARM_UP, Captured
from dae.network import RecurrentCore
from dae.run.record import provenance
from dae.train import Trainer

PARTS = ("act", "environment", "store", "sample", "forward", "backward", "optimiser")
BESIDE = 50
"""Iterations with an evaluation going on, for its stall."""


def bench(cfg: Config, iterations: int, number_of_rounds: int) -> dict[str, Any]:
    """All numbers, ready for JSON; times are medians in milliseconds."""
    agent = DAE(config=cfg.override(**_soon(cfg)))
    agent.refuse_too_large()
    run = Trainer(agent.config, agent.envs, agent.agent, agent.source)
    try:
        while run.updates < WARM_UP + 2:  # fills the replay until windows can be drawn; then libraries and graphs set themselves up
            run.step()
        rounds = [_times(run.step, iterations, run) for _ in range(number_of_rounds)]
        parts = _parts(run, max(10, iterations // 20))
        beside = _beside(run)
        flops = _flops(run)
    finally:
        agent.close()
    iteration = statistics.median(statistics.median(times) for times in rounds)
    agent_steps, frames = run.envs.num_envs, agent.source.frames_per_agent_step if agent.source else 1
    updates = agent_steps / cfg.learning.agent_steps_per_update
    total = cfg.learning.total_agent_steps / agent_steps
    peak = _peak(run.agent.device, run.agent.precision)
    update_ms = sum(parts[name] for name in ("sample", "forward", "backward", "optimiser"))
    return {
        **provenance(), "env": cfg.environment.env, "width": cfg.network.width, "device": run.agent.device.type,
        "precision": str(run.agent.precision).removeprefix("torch."), "recorded": run.recorded,
        "iterations": iterations, "iteration_ms": iteration,
        "rounds_ms": [statistics.median(times) for times in rounds],
        "p99_ms": sorted(x for times in rounds for x in times)[int(0.99 * iterations * number_of_rounds)],
        "parts_ms": parts, "update_ms": update_ms, "updates_per_iteration": updates,
        "agent_steps_per_second": 1e3 * agent_steps / iteration, "frames_per_second": 1e3 * agent_steps * frames / iteration,
        "whole_run_hours": total * iteration / 3.6e6, "evaluation_step_ms": beside,
        "update_tflop": flops / 1e12, "tflops": flops / 1e9 / update_ms, "peak_tflops": peak / 1e12,
        "floor_ms": 1e3 * flops / peak, "share_of_floor": 1e3 * flops / peak / update_ms,
        "options": cfg.flat(),
    }  # fmt: skip


def _soon(cfg: Config) -> dict[str, Any]:
    """What a run has to wait long for, at once: updates begin as soon as windows can be drawn."""
    slots = 2 * (cfg.window_steps + cfg.environment.frame_stack + 1) * cfg.environment.num_envs
    if cfg.learning.replay_agent_steps < slots:
        raise ConfigError(f"replay_agent_steps={cfg.learning.replay_agent_steps}: too small for a benchmark, which needs {slots}")
    return {"min_replay_agent_steps": min(slots, cfg.learning.min_replay_agent_steps), "epsilon": 0.1, "learning_rate": 1e-5}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _times(function: Callable[[], Any], number: int, run: Trainer) -> list[float]:
    """Milliseconds from one call's end to the next one's, as they come: nothing is waited for in between but at the end."""
    _wait(run.agent.device)
    times, before = [], time.perf_counter()
    for _ in range(number):
        function()
        now = time.perf_counter()
        times.append(1e3 * (now - before))
        before = now
    _wait(run.agent.device)
    times[-1] += 1e3 * (time.perf_counter() - before)
    return times


def _median(function: Callable[[], Any], number: int, device: torch.device) -> float:
    """Milliseconds of one call, the device's work included."""
    times = []
    for _ in range(number):
        _wait(device)
        before = time.perf_counter()
        function()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times)


def _parts(run: Trainer, number: int) -> dict[str, float]:
    agent, replay, cfg, device = run.agent, run.replay, run.cfg, run.agent.device
    collector, came = run.collector, list[Stepped]()
    laps: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("act", lambda: collector.act(0.1)),
        ("environment", lambda: came.append(collector.envs.recv())),
        ("store", lambda: collector.store(came.pop())),
    )
    ms: dict[str, list[float]] = {name: [] for name, _ in laps}
    for _ in range(number):
        for name, lap in laps:
            ms[name].append(_median(lap, 1, device))
    parts = {name: statistics.median(times) for name, times in ms.items()}

    def windows(starts: Tensor, envs: Tensor) -> tuple[Tensor, ...]:
        w = replay.window(starts, envs, cfg.window_steps)
        return w.action, w.reward, *w.inputs.obs.values()

    def loss(starts: Tensor, envs: Tensor) -> Tensor:
        with agent.autocast():
            weighted, _ = agent.losses(replay.window(starts, envs, cfg.window_steps), run.signals)
        return torch.stack(list(weighted.values())).sum()

    def losses(starts: Tensor, envs: Tensor) -> tuple[Tensor, ...]:
        return (loss(starts, envs).detach(),)  # detached: a graph of autograd that is still alive would spoil the next recording

    def gradients(starts: Tensor, envs: Tensor) -> tuple[Tensor, ...]:
        agent.optimizer.zero_grad(set_to_none=True)
        total = loss(starts, envs)
        total.backward()
        return (total.detach(),)

    def all_of_it(starts: Tensor, envs: Tensor) -> tuple[Tensor, ...]:
        return tuple(agent.update(replay.window(starts, envs, cfg.window_steps), run.signals).values())

    before = 0.0
    for name, function in (("sample", windows), ("forward", losses), ("backward", gradients), ("optimiser", all_of_it)):
        captured = Captured(function, device, run.recorded)

        def once(captured: Captured = captured) -> None:
            captured(*replay.draw(run.replay_rng, cfg.learning.batch_size, cfg.window_steps))

        for _ in range(WARM_UP + 1):
            once()
        now = _median(once, number, device)
        parts[name], before = max(0.0, now - before), now
    return parts


def _beside(run: Trainer) -> float | None:
    """What one step of an evaluation adds to an iteration, where evaluations go on beside training."""
    if run.eval_source is None:
        return None
    acting = run.cfg.acting
    evaluation = Evaluation(
        run.snapshot(),
        run.eval_source,
        acting.eval_episodes,
        acting.eval_epsilon,
        run.seeds.evaluation_at(0),
        run.cfg.network.channels,
    )
    try:
        alone = statistics.median(_times(run.step, BESIDE, run))
        both = statistics.median(_times(lambda: (evaluation.advance(), run.step()), BESIDE, run))
    finally:
        evaluation.close()
    return max(0.0, both - alone)


def _flops(run: Trainer) -> int:
    """Of one update, by PyTorch's counter (products only), with plain LSTM and stem: it can't see into kernels of ours."""
    nets = run.agent.net, run.agent.ema
    lstms = [net.core.lstm for net in nets if isinstance(net.core, RecurrentCore)]
    stems = [part for net in nets for part in net.encoder.parts if isinstance(part, Impala)]
    before, taken = [lstm.implementation for lstm in lstms], [part.stem for part in stems]
    for lstm in lstms:
        lstm.implementation = "reference"
    for part in stems:
        part.stem = "reference"
    with FlopCounterMode(display=False) as counter:
        run.agent.update(run.replay.sample(run.replay_rng, run.cfg.learning.batch_size, run.cfg.window_steps), run.signals)
    for lstm, implementation in zip(lstms, before, strict=True):
        lstm.implementation = implementation
    for part, stem in zip(stems, taken, strict=True):
        part.stem = stem
    return int(counter.get_total_flops())


def _peak(device: torch.device, precision: torch.dtype) -> float:
    """Operations a second of one large product, in the type that the network's products have."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=precision)
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, a, out=out)
    return 2 * size**3 / (1e-3 * _median(lambda: torch.mm(a, a, out=out), 10, device))


def table(found: Mapping[str, Any]) -> Table:
    """For the terminal."""
    made = Table(
        box=box.SIMPLE_HEAD, title=f"dae bench {found['env']}, m={found['width']:g}, {found['device']}", title_justify="left"
    )
    made.add_column("")
    made.add_column("ms", justify="right")
    made.add_column("", style="dim")
    for name in PARTS:
        made.add_row(name, f"{found['parts_ms'][name]:.3f}", "alone, waited for")
    made.add_row("update", f"{found['update_ms']:.3f}", "the last four")
    spread = " ".join(f"{x:.3f}" for x in found["rounds_ms"])
    made.add_row("[bold]iteration", f"[bold]{found['iteration_ms']:.3f}", f"end to end; medians of {found['iterations']}: {spread}")
    if found["evaluation_step_ms"] is not None:
        made.add_row("evaluation", f"{found['evaluation_step_ms']:.3f}", "added to an iteration while one goes on beside training")
    made.add_row("", "", "")
    made.add_row("agent steps/s", f"{found['agent_steps_per_second']:,.0f}", f"{found['frames_per_second']:,.0f} frames/s")
    made.add_row("a whole run", f"{found['whole_run_hours']:.2f} h", "without evaluations")
    made.add_row("an update", f"{1e3 * found['update_tflop']:.1f} GFLOP", f"{found['tflops']:.2f} TFLOP/s")
    made.add_row(
        "floor",
        f"{found['floor_ms']:.3f}",
        f"at {found['peak_tflops']:.1f} TFLOP/s; the update is at {found['share_of_floor']:.0%} of it",
    )
    return made


def write(path: Path, found: Mapping[str, Any]) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
