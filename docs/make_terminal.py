"""docs/img/terminal.png: what `dae train --preset laptop --env dae/CartPoleHidden-v0` shows on a terminal.

python docs/make_terminal.py [--stop-at 36000]

It trains for real, feeds the real progress display with the run's own reports, and draws the display as it stands at that agent
step. The picture is drawn character by character, so that it looks the same wherever it is shown.
"""

import argparse
import io
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from rich.color import ColorParseError
from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.terminal_theme import MONOKAI
from rich.text import Text

from dae import DAE
from dae.run.progress import Progress
from dae.run.record import run_folder
from dae.run.session import describe

ENV = "dae/CartPoleHidden-v0"
PATH = Path(__file__).with_name("img") / "terminal.png"
COLUMNS, SIZE, MARGIN = 102, 22, 24
PAPER, INK = (24, 26, 31), (214, 218, 224)


def screen(stop_at: int) -> RenderableType:
    """The command, the line that it begins with, and the live display."""
    agent = DAE(ENV, preset="laptop")
    cfg = agent.config
    progress = Progress(f"{ENV} · seed {cfg.run.seed}", cfg.learning.total_agent_steps, cfg.objective, quiet=True)
    for report in agent.reports():
        progress.show(report)
        if report.agent_steps >= stop_at and report.kind == "train":
            break
    agent.close()
    command = Text.assemble(("$ ", "bold green"), (f"dae train --preset laptop --env {ENV}", "bold"))
    return Group(command, Text(f"{run_folder(cfg, ENV)}: {describe(agent)}"), progress.panel())


def colour(segment: Segment) -> tuple[int, int, int]:
    """Of its letters; dim ones lie nearer to the background."""
    style, found = segment.style, INK
    if style is None:
        return found
    if style.color is not None and not style.color.is_default:
        try:
            found = tuple(style.color.get_truecolor(MONOKAI))
        except ColorParseError:
            found = INK
    if style.dim:
        found = tuple((3 * a + 2 * b) // 5 for a, b in zip(found, PAPER, strict=True))
    return found


def draw(what: RenderableType, path: Path) -> None:
    """One cell for each character."""
    console = Console(width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False)
    lines = console.render_lines(what, pad=False)
    regular, bold = (
        ImageFont.truetype(font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans Mono", weight=weight)), SIZE)
        for weight in ("normal", "bold")
    )
    wide, high = regular.getlength("M"), sum(regular.getmetrics())
    picture = Image.new("RGB", (round(COLUMNS * wide) + 2 * MARGIN, len(lines) * high + 2 * MARGIN), PAPER)
    pen = ImageDraw.Draw(picture)
    for y, line in enumerate(lines):
        x = 0
        for segment in line:
            font = bold if segment.style is not None and segment.style.bold else regular
            for letter in segment.text:
                pen.text((MARGIN + round(x * wide), MARGIN + y * high), letter, colour(segment), font)
                x += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(64).save(path, optimize=True)


def main() -> None:
    """Train, draw."""
    parser = argparse.ArgumentParser(description="Draw the terminal of a real run.")
    parser.add_argument("--stop-at", type=int, default=36_000, help="agent step at which the picture is taken (default: 36000)")
    draw(screen(parser.parse_args().stop_at), PATH)


if __name__ == "__main__":
    main()
