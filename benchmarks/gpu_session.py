"""What one wants to know of a machine with a GPU, in eight minutes. Every number is written down as it comes, to the folder $OUT.

    OUT=out python benchmarks/gpu_session.py                             all of it
    OUT=out python benchmarks/gpu_session.py --only bench --widths 1 4   some of it
    OUT=out python benchmarks/gpu_session.py --tiny                      on a CPU, in a minute: does it run through?

`session.log` has everything that was printed; `bench_m4.json` is what `dae bench` writes; `profile_m4.txt` has the kernels of an
update by time, and the gaps between the kernels of whole iterations; `encoder_m4_plans0.json` and `stem_m4.json` have variants, in
milliseconds, `inductor_m1.json` an update as it is and with its losses compiled. A step (machine, tests, bench, stem, inductor,
encoder) that fails or takes too long leaves a line in the log, and the next one begins.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(os.environ.get("OUT", "out"))
ENV = "ALE/Breakout-v5"
TESTS = ("test_stem_triton.py", "test_graphs.py", "test_lstm_triton.py")
TINY = {
    "device": "cpu", "num_envs": 2, "embedding_dim": 16, "core_dim": 32, "core_blocks": 2, "value_hidden": 16, "prediction_hidden": 16,
    "prior_hidden": 16, "num_outcomes": 4, "batch_size": 2, "burn_in_steps": 2, "backup_steps": 3, "agent_steps_per_update": 2,
    "replay_agent_steps": 400, "min_replay_agent_steps": 40, "eval_episodes": 2,
}  # fmt: skip
"""Of the configuration, for a CPU."""


def main() -> int:
    """All steps, each in a process of its own; or, with `--step`, one of them."""
    args = arguments()
    OUT.mkdir(parents=True, exist_ok=True)
    if args.step:
        STEPS[args.step](args.widths[0], args)
        return 0
    began = time.monotonic()
    some = [width for width in args.widths if width in (args.widths[0], 4)]
    steps = [("machine", 0.0, 30, args.plans), ("tests", 0.0, 120, args.plans)]
    steps += [("bench", width, 100, args.plans) for width in args.widths]
    steps += [("stem", width, 60, args.plans) for width in some]
    steps += [("inductor", width, 150, 10) for width in some[:1]]
    steps += [("encoder", width, 90, plans) for width in some for plans in dict.fromkeys((args.plans, 10))]
    for step, width, seconds, plans in steps:
        if not args.only or step in args.only:
            done = begin(step, width, min(args.patience * seconds, 60 * args.minutes - (time.monotonic() - began)), plans, args)
            if step == "bench" and not done:  # too many of cuDNN's ways to try, perhaps
                begin(step, width, min(args.patience * seconds, 60 * args.minutes - (time.monotonic() - began)), 10, args)
    say(f"{time.monotonic() - began:.0f} s in all")
    return 0


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS), default=())
    parser.add_argument("--widths", nargs="+", type=float, default=None)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--autotune", action="store_true", help="encoder: also max-autotune, which takes minutes")
    parser.add_argument("--plans", type=int, default=0, help="of cuDNN's, tried for each convolution; 0: all")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--step", choices=tuple(STEPS), help="one step, in this process")
    args = parser.parse_args()
    if args.widths is None:
        args.widths = [0.0625] if args.tiny else [1.0, 4.0, 2.0, 8.0]
    if args.tiny:
        args.iterations = 5
    args.patience = 4 if args.tiny else 1  # of a step; a machine without a GPU has other things to do
    return args


def say(text: str) -> None:
    """To the terminal and to the log."""
    print(text, flush=True)
    with (OUT / "session.log").open("a") as log:
        log.write(text + "\n")


def begin(step: str, width: float, seconds: float, plans: int, args: argparse.Namespace) -> bool:
    """One step as a process, ended when its time is over: did it end well? What it prints goes to the log as it comes."""
    name = f"{step} m={width:g}" if width else step
    if seconds < 5:
        say(f"=== {name}: no time left")
        return False
    say(f"=== {name}, {plans or 'all'} plans, at most {seconds:.0f} s")
    words = [sys.executable, __file__, "--step", step, "--widths", str(width), "--iterations", str(args.iterations)]
    words += ["--plans", str(plans)]
    words += [f"--{flag}" for flag in ("tiny", "autotune") if getattr(args, flag)]
    began, found = time.monotonic(), "ended"
    with (OUT / "session.log").open("ab") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | {"OUT": str(OUT.resolve())}
        )
        try:
            code = process.wait(seconds)
            found = "ended" if code == 0 else f"FAILED ({code})"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            found = "STOPPED: too slow"
    say(f"=== {name}: {found} after {time.monotonic() - began:.0f} s")
    return found == "ended"


# ---------------------------------------------------------------------------------------------------------------- the steps


def machine(width: float, args: argparse.Namespace) -> None:
    """What it is."""
    import torch

    print(sys.version)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {os.cpu_count()} cores")
    try:
        import triton

        print(f"triton {triton.__version__}")
    except ImportError:
        print("no Triton")
    if torch.cuda.is_available():
        subprocess.run(["nvidia-smi"], check=False)


def tests(width: float, args: argparse.Namespace) -> None:
    """Those that need a GPU."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    which = ["-m", "gpu"] if not args.tiny else ["-k", "parcel or sent or refused"]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rs", "--durations=5", *which]
    code = subprocess.run(
        [*words, *(f"tests/{name}" for name in TESTS)], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    sys.exit(code.returncode)


def configuration(width: float, tiny: bool, plans: int) -> Any:
    """The paper's, or a small one."""
    from dae import train
    from dae.presets import with_presets

    train.CUDNN_PLANS = plans
    return with_presets(["atari"]).override(env=ENV, width=width, **(TINY if tiny else {}))


def bench(width: float, args: argparse.Namespace) -> None:
    """`dae bench`, and behind it, where everything is warm, the profile."""
    from rich.console import Console

    from dae import bench as benchmark

    cfg, began = configuration(width, args.tiny, args.plans), time.monotonic()
    if args.tiny:
        benchmark.BESIDE = 2
    found = benchmark.bench(cfg, args.iterations, 2)
    benchmark.write(OUT / f"bench_m{width:g}.json", found | {"seconds": time.monotonic() - began, "cudnn_plans": args.plans})
    Console(width=110).print(benchmark.table(found))
    sys.stdout.flush()
    if width in (args.widths[0], 4):
        profile(width, args)


def profile(width: float, args: argparse.Namespace) -> None:
    """The kernels of 20 updates, and what the device does in 20 iterations."""
    agent, run = running(width, args)
    times, device = 2 if args.tiny else 20, run.agent.device
    watched(run.step, 2, device)  # the profiler itself has to set itself up
    whole = gaps(watched(run.step, times, device), times)
    made = [f"m={width:g}, recorded: {run.recorded}", "", *whole, "", *kernels(watched(run.learn, times, device), times)]
    (OUT / f"profile_m{width:g}.txt").write_text("\n".join(made) + "\n")
    print(made[2], "\n".join(made[24:36]), sep="\n")
    agent.close()


def running(width: float, args: argparse.Namespace) -> tuple[Any, Any]:
    """An agent, and its run after the first few updates."""
    from dae import bench as benchmark
    from dae.api import DAE
    from dae.graphs import WARM_UP
    from dae.train import Trainer

    cfg = configuration(width, args.tiny, args.plans)
    agent = DAE(config=cfg.override(**benchmark._soon(cfg)))
    run = Trainer(agent.config, agent.envs, agent.agent, agent.source)
    while run.updates < WARM_UP + 2:
        run.step()
    return agent, run


def inductor(width: float, args: argparse.Namespace) -> None:
    """Milliseconds of an update as it is, and with losses and metrics compiled: is it worth the seconds at the start?"""
    import torch

    import dae.agent
    from dae.graphs import WARM_UP, Captured

    agent, run = running(width, args)
    device, found = run.agent.device, dict[str, Any]()

    def timed(name: str) -> None:
        began = time.monotonic()
        try:
            run._update = Captured(run._learn_from, device, run.recorded)
            for _ in range(WARM_UP + 2):
                run.learn()
            seconds, times = time.monotonic() - began, []
            for _ in range(3 if args.tiny else 50):
                torch.cuda.synchronize() if device.type == "cuda" else None
                since = time.perf_counter()
                run.learn()
                torch.cuda.synchronize() if device.type == "cuda" else None
                times.append(1e3 * (time.perf_counter() - since))
            found[name] = {"ms": statistics.median(times), "seconds to begin": seconds, "recorded": run.recorded}
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:500]}"
        print(name, found[name], flush=True)
        (OUT / f"inductor_m{width:g}.json").write_text(json.dumps(found, indent=1) + "\n")

    timed("plain")
    backend = "aot_eager" if args.tiny else "inductor"
    dae.agent.update_metrics = torch.compile(dae.agent.update_metrics, dynamic=False, backend=backend)
    timed("metrics compiled")
    if not args.tiny:  # it takes half a minute at least
        run.agent.losses = torch.compile(run.agent.losses, dynamic=False)
        timed("losses and metrics compiled")
    agent.close()


def watched(function: Callable[[], Any], times: int, device: Any) -> list[tuple[str, float, float]]:
    """What ran on the device: name, begin and end in microseconds."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    cuda = device.type == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as watch:
        for _ in range(times):
            function()
        if cuda:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [(e.name, e.time_range.start, e.time_range.end) for e in watch.events() if e.device_type == kind]
    return sorted(events, key=lambda event: event[1])


def kernels(events: list[tuple[str, float, float]], times: int) -> list[str]:
    """The forty that take longest."""
    sums: dict[str, list[float]] = {}
    for name, begin, end in events:
        sums.setdefault(name, []).append(end - begin)
    total = sum(map(sum, sums.values()))
    lines = [
        f"one update: {total / times / 1e3:.3f} ms in {len(events) / times:.0f} kernels",
        "us each update | calls | share | kernel",
    ]
    for name, each in sorted(sums.items(), key=lambda item: -sum(item[1]))[:40]:
        lines.append(f"{sum(each) / times:9.1f} {len(each) / times:7.1f} {sum(each) / total:6.1%}  {name[:160]}")
    return lines


def gaps(events: list[tuple[str, float, float]], times: int) -> list[str]:
    """How busy the device is over whole iterations, and where it waits longest."""
    idle, busy_until, before = [], events[0][1], ""
    for name, begin, end in events:
        if begin > busy_until:
            idle.append((begin - busy_until, before, name))
        if end > busy_until:
            busy_until, before = end, name
    whole = busy_until - events[0][1]
    lines = [f"one iteration: {whole / times / 1e3:.3f} ms, idle {sum(gap for gap, *_ in idle) / times / 1e3:.3f} ms of it"]
    return lines + [f"{gap:9.1f} us  {one[:70]}  ->  {other[:70]}" for gap, one, other in sorted(idle, reverse=True)[:20]]


def encoder(width: float, args: argparse.Namespace) -> None:
    """Variants of IMPALA: the frames of the slow network forward, and those that are trained there and back."""
    import torch

    from dae.encoders import Encoder, ObsPart

    device = torch.device("cpu" if args.tiny else "cuda")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, args.plans
    sizes = (4, 2) if args.tiny else (528, 256)
    found: dict[str, Any] = {"frames": sizes}

    def made(stem: str, last: bool = True) -> Any:
        net = Encoder({"obs": ObsPart((1, 84, 84), torch.uint8, 1 / 255)}, 4, 512, width).to(device)
        net.parts[0].stem = stem
        return net.to(memory_format=torch.channels_last) if last else net

    def bytes_of(frames: int, last: bool) -> dict[str, Any]:
        x = torch.randint(0, 256, (frames, 84, 84, 4), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
        return {"obs": (x if last else x.contiguous()).unflatten(1, (4, 1))}

    def behind_the_stem(mode: str | None) -> Any:
        net = made("triton")
        part = net.parts[0]
        part.layers = torch.nn.Sequential(part.layers[0], part.layers[1], torch.compile(part.layers[2:], mode=mode, dynamic=False))
        return net

    variants: dict[str, Callable[[], Any]] = {
        "channels first": lambda: made("reference", last=False),
        "channels last": lambda: made("reference"),
        "padded": lambda: made("padded"),
    }
    if device.type == "cuda":
        variants["triton stem"] = lambda: made("triton")
    if device.type == "cuda" and args.plans == 0:  # compiling takes long; once is enough
        variants |= {
            "compiled": lambda: torch.compile(made("reference"), dynamic=False),
            "triton stem, the rest compiled": lambda: behind_the_stem(None),
        }
        if args.autotune:
            variants["triton stem, the rest tuned"] = lambda: behind_the_stem("max-autotune-no-cudagraphs")
    for name, make in variants.items():
        try:
            net, last, began = make(), name != "channels first", time.monotonic()
            slow, trained = (bytes_of(frames, last) for frames in sizes)
            found[name] = {"forward": graphed(net, slow, False), "forward and backward": graphed(net, trained, True)}
            found[name]["seconds to begin"] = time.monotonic() - began
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
        print(name, found[name], flush=True)
        (OUT / f"encoder_m{width:g}_plans{args.plans}.json").write_text(json.dumps(found, indent=1) + "\n")


def graphed(net: Any, x: Any, gradient: bool) -> float:
    """Milliseconds of one pass, as a CUDA graph where there is CUDA."""
    import torch

    device = next(iter(x.values())).device

    def run() -> None:
        with torch.set_grad_enabled(gradient), torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            out = net(x)
        if gradient:
            for p in net.parameters():
                p.grad = None
            out.square().mean().backward()

    return milliseconds(run, device)


def milliseconds(run: Callable[[], None], device: Any, replays: int = 20) -> float:
    """Median over a few replays of a graph of `run`; on a CPU, of `run`."""
    import torch

    if device.type != "cuda":
        times = []
        for _ in range(3):
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) for one, other in itertools.pairwise(marks))


def stem(width: float, args: argparse.Namespace) -> None:
    """The stem's kernels with other numbers of pixels and warps, and plain PyTorch beside them."""
    import torch

    if args.tiny:
        print("kernels need a GPU")
        return
    from dae import stem_triton as kernels
    from dae.encoders import Impala

    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
    device, found = torch.device("cuda"), dict[str, Any]()
    part = Impala(4, 84, 84, width, 8).to(device, memory_format=torch.channels_last)
    part.layers, plain = torch.nn.Sequential(part.layers[0], part.layers[1]), kernels.block(round(16 * width))

    def timed(name: str) -> None:
        try:
            ms = []
            for frames, gradient in ((528, False), (256, True)):
                x = torch.randint(0, 256, (frames, 84, 84, 4), dtype=torch.uint8, device=device).permute(0, 3, 1, 2).unsqueeze(2)

                def run(x: Any = x, gradient: bool = gradient) -> None:
                    with torch.set_grad_enabled(gradient), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                        out = part.of_bytes(x, 1 / 255)
                    if gradient:
                        torch.autograd.grad(out, list(part.parameters()), torch.ones_like(out))

                ms.append(milliseconds(run, device))
            found[name] = {"forward": ms[0], "forward and backward": ms[1]}
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
        print(name, found[name], flush=True)
        (OUT / f"stem_m{width:g}.json").write_text(json.dumps(found, indent=1) + "\n")

    part.stem = "padded"
    timed("padded")
    part.stem = "triton"
    timed("triton, as it is")
    for pixels, warps, channels in ((64, 4, plain), (64, 8, plain), (128, 8, plain), (128, 4, plain), (64, 4, 32), (64, 4, 16)):
        if (16 * width) % channels == 0:
            kernels.PIXELS, kernels.block = pixels, lambda wide, channels=channels: channels
            kernels.warps = lambda block, warps=warps: warps
            timed(f"triton, {pixels} pixels, {warps} warps, {channels} channels")


STEPS: dict[str, Callable[[float, argparse.Namespace], None]] = {
    "machine": machine, "tests": tests, "bench": bench, "inductor": inductor, "encoder": encoder, "stem": stem,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
