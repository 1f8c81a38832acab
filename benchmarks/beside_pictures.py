"""The pictures of beside_sd_scripts.py: those to train on, loss curves, and sheets of samples side by side."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks import quality
from library.demo.zorb import SIDE

PICTURES = 2  # to train on, on each ground
WINDOW = 25  # steps in a running mean
OURS, THEIRS = "this trainer", "sd-scripts"
COLOURS = {OURS: (45, 164, 78), THEIRS: (90, 80, 200)}
INK, QUIET, EDGE = (31, 35, 40), (89, 99, 110), (222, 222, 218)
GAP, HEAD = 6, 40  # pixels: the space around a sample, and the titles above
WIDE, HIGH, LEFT, TOP, BOTTOM = 860, 300, 60, 46, 30  # pixels of a panel of curves

Curve = list[tuple[int, float]]  # step, loss


def draw_training_pictures(folder: Path) -> Path:
    """A dozen pictures of the zorb, drawn as for benchmarks/quality.py, with captions as the small model knows."""
    folder.mkdir(parents=True)
    pictures = [(ground, number) for ground in quality.TRAINED for number in range(PICTURES)]
    for name, (ground, number) in enumerate(pictures, 1):
        quality.drawn(ground, number).save(folder / f"{name:02d}.png")
        caption = f"{quality.THING} emoji on a {ground} ground"
        (folder / f"{name:02d}.txt").write_text(caption, encoding="utf-8")
    return folder


def running_mean(curve: Curve, window: int = WINDOW) -> Curve:
    """The mean of each step and those around it, `window` in all; fewer at both ends."""
    losses = [loss for _, loss in curve]
    half = window // 2
    return [(step, statistics.fmean(losses[max(0, at - half) : at + half + 1])) for at, (step, _) in enumerate(curve)]


@dataclass(frozen=True)
class PanelAxes:
    """Where the numbers of a panel lie in the picture."""

    steps: tuple[int, int]
    losses: tuple[float, float]
    top: int

    def place(self, step: float, loss: float) -> tuple[float, float]:
        """A point of a curve in pixels."""
        (first, last), (low, high) = self.steps, self.losses
        across = (step - first) / max(1, last - first)
        up = (min(high, max(low, loss)) - low) / (high - low)
        return LEFT + across * (WIDE - LEFT - 16), self.top + HIGH - BOTTOM - up * (HIGH - TOP - BOTTOM)


def curves_picture(panels: Mapping[str, Mapping[str, Curve]]) -> Image.Image:
    """A panel for each title: every step as a pale line, its running mean as a strong one."""
    picture = Image.new("RGB", (WIDE, HIGH * len(panels)), "white")
    pen = ImageDraw.Draw(picture, "RGBA")
    for number, (title, curves) in enumerate(panels.items()):
        _panel(pen, title, curves, number * HIGH)
    return picture


def _panel(pen: ImageDraw.ImageDraw, title: str, curves: Mapping[str, Curve], top: int) -> None:
    axes = _axes(curves, top)
    pen.text((LEFT, top + 8), title, fill=INK, font=_font(15))
    for at, (name, curve) in enumerate(curves.items()):
        across = LEFT + at * 260
        pen.line((across, top + 36, across + 22, top + 36), fill=COLOURS[name], width=3)
        mean = f"{name}, mean {statistics.fmean(loss for _, loss in curve):.4f}"
        pen.text((across + 28, top + 28), mean, fill=COLOURS[name], font=_font(12))
    low, high = axes.losses
    for tick in range(5):
        loss = low + (high - low) * tick / 4
        y = axes.place(axes.steps[0], loss)[1]
        pen.line((LEFT, y, WIDE - 16, y), fill=EDGE)
        pen.text((8, y - 7), f"{loss:.3f}", fill=QUIET, font=_font(12))
    for tick in range(5):
        step = round(axes.steps[0] + (axes.steps[1] - axes.steps[0]) * tick / 4)
        x, y = axes.place(step, low)
        pen.text((x, y + 6), str(step), fill=QUIET, font=_font(12), anchor="ma")
    for name, curve in curves.items():
        pen.line([axes.place(*point) for point in curve], fill=(*COLOURS[name], 60))
    for name, curve in curves.items():
        pen.line([axes.place(*point) for point in running_mean(curve)], fill=COLOURS[name], width=3, joint="curve")


def _axes(curves: Mapping[str, Curve], top: int) -> PanelAxes:
    """From the lowest loss to one that leaves out the rarest peaks."""
    losses = sorted(loss for curve in curves.values() for _, loss in curve)
    steps = [step for curve in curves.values() for step, _ in curve]
    high = losses[int((len(losses) - 1) * 0.98)]
    return PanelAxes((min(steps), max(steps)), (losses[0], max(high, losses[0] + 1e-6)), top)


def sheet(
    columns: Sequence[tuple[str, str]], rows: Sequence[str], files: Sequence[Sequence[Path | None]]
) -> Image.Image:
    """Samples in a grid: columns with a trainer and what it drew with, rows with a prompt above each."""
    step, line = SIDE + GAP, 20
    picture = Image.new("RGB", (step * len(columns) + GAP, HEAD + (step + line) * len(rows)), "white")
    pen = ImageDraw.Draw(picture)
    for at, (name, drawn_with) in enumerate(columns):
        pen.text((GAP + at * step, 4), name, fill=COLOURS.get(name, INK), font=_font(13))
        pen.text((GAP + at * step, 20), drawn_with, fill=QUIET, font=_font(12))
    for down, (prompt, row) in enumerate(zip(rows, files, strict=True)):
        top = HEAD + down * (step + line)
        pen.text((GAP, top + 1), prompt, fill=INK, font=_font(12))
        for at, file in enumerate(row):
            if file is not None:
                with Image.open(file) as sample:
                    picture.paste(sample.convert("RGB").resize((SIDE, SIDE)), (GAP + at * step, top + line))
    return picture


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
