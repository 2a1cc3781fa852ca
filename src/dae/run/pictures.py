"""A learning curve and a video of the trained agent, at the end of a run. Both need extras; neither is needed to learn."""

import importlib.util
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dae.envs.gymnasium import AnyEnv, EnvSource
from dae.errors import ConfigError, EnvironmentFault, FileError, MissingExtra
from dae.run.record import read_jsonl


def have(*packages: str) -> bool:
    """Whether all of them are installed."""
    return all(importlib.util.find_spec(p) is not None for p in packages)


def make_rendering(source: EnvSource) -> AnyEnv:
    """The environment, rendering arrays: without a window, and without pygame's greetings. Its frame rate is sound."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    env = source.make(render_mode="rgb_array")
    metadata = env.metadata or {}
    fps: Any = metadata.get("render_fps")
    known = isinstance(fps, int | float) and 1 <= fps <= 1000
    env.metadata = {**metadata, "render_fps": round(fps) if known else 30}
    return env


def video_target(name: str) -> Path:
    """Where a video shall lie, if it can; asked before anything is played."""
    path = Path(name)
    if path.suffix != ".mp4":
        raise ConfigError(f"video={name}: must be the name of an .mp4 file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = not path.is_dir() and os.access(path.parent, os.W_OK)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    if not writable:
        raise FileError(f"{path}: can't be written")
    return path


def learning_curve(folder: Path, title: str) -> Path:
    """`curve.png`: training episodes and their running mean, evaluations with a 95% interval, and what the model says of itself."""
    if not have("matplotlib"):
        raise MissingExtra("the learning curve", "plots")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    episodes, metrics, points = (read_jsonl(folder / f"{n}.jsonl") for n in ("episodes", "metrics", "eval"))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), height_ratios=(2, 1), sharex=True, constrained_layout=True)
    ended, paid = [e["agent_steps"] for e in episodes], [e["score"] for e in episodes]
    top.plot(ended, paid, ".", ms=2, alpha=0.35, color="tab:grey", label="training episodes")
    window = min(100, max(1, len(episodes) // 10))
    if window > 1:  # where scores are 0 or 1, points alone are two lines
        mean = np.convolve(paid, np.ones(window) / window, "valid")
        top.plot(ended[window - 1 :], mean, color="0.3", lw=1.2, label=f"mean of the last {window}")
    steps = sorted({e["agent_steps"] for e in points})
    scores = [np.array([e["score"] for e in points if e["agent_steps"] == s]) for s in steps]
    if steps:
        half = [1.96 * s.std(ddof=1) / np.sqrt(len(s)) if len(s) > 1 else 0.0 for s in scores]
        top.errorbar(
            steps,
            [s.mean() for s in scores],
            half,
            fmt="o-",
            ms=4,
            capsize=2,
            color="tab:blue",
            label=f"evaluation, {len(scores[-1])} episodes",
        )
    top.set_ylabel("score")
    figure.suptitle(title)
    learned = [m for m in metrics if "dae/adv_size" in m]
    for name, label, colour in (("dae/adv_size", "skill |A|", "tab:green"), ("dae/luck_size", "luck |B|", "tab:orange")):
        bottom.plot([m["agent_steps"] for m in learned], [m[name] for m in learned], color=colour, label=label)
    bottom.set_xlabel("agent steps")
    bottom.set_ylabel("size (rms)")
    for axes in (top, bottom):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.2)  # above, over no points
        axes.spines[["top", "right"]].set_visible(False)
    path = folder / "curve.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def write_video(path: Path, frames: Iterable[NDArray[np.uint8]], fps: int) -> Path:
    """H.264, playable anywhere. The file appears when it is whole."""
    if not have("av"):
        raise MissingExtra("video", "video")
    import av

    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise EnvironmentFault("render() returned no picture to write")
    height, width = _picture(first).shape[0] // 2 * 2, _picture(first).shape[1] // 2 * 2
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            stream: Any = container.add_stream("h264", rate=fps)
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            for frame in itertools.chain([first], frames):
                picture = np.ascontiguousarray(_picture(frame, height, width)[:height, :width])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _picture(frame: Any, height: int = 2, width: int = 2) -> NDArray[np.uint8]:
    """What was rendered, if it is a picture of at least this size."""
    found = np.asarray(frame)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3:
        raise EnvironmentFault(f"render() returned {found.dtype} {found.shape}: a picture is uint8 (height, width, 3)")
    if found.shape[0] < height or found.shape[1] < width:
        raise EnvironmentFault(f"render() returned a picture of {found.shape[:2]}: a video needs at least {(height, width)}")
    return found
