"""A generated data set: two invented things on plain backgrounds, each image with its caption.

Small, and in a few shapes, so that a training on a CPU takes seconds and still has several buckets.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Box = tuple[float, float, float]  # centre x, centre y, radius, in pixels

IMAGE_SIZES = ((128, 128), (176, 96), (96, 176), (160, 128), (128, 160), (144, 144))  # width, height
GROUNDS: dict[str, Colour] = {
    "green meadow": (126, 186, 92),
    "night sky": (28, 34, 74),
    "sandy beach": (232, 208, 150),
    "white wall": (238, 238, 234),
    "red carpet": (168, 52, 60),
    "blue sea": (58, 128, 190),
}
SCALE = 4  # supersampling factor, which smooths the edges


def draw_images(folder: Path, seed: int = 0, sizes: Sequence[tuple[int, int]] = IMAGE_SIZES) -> Path:
    """Draw a dozen captioned images into `N_name` folders below `folder`, always the same for the same seed.

    Each concept gets an image of every size (width, height), six at most.
    """
    rng = random.Random(seed)
    for concept, (what, draw) in CONCEPTS.items():
        concept_folder = folder / concept
        concept_folder.mkdir(parents=True)
        grounds = rng.sample(list(GROUNDS), len(sizes))
        for number, (size, ground) in enumerate(zip(sizes, grounds, strict=True), start=1):
            picture, where = _draw_picture(size, GROUNDS[ground], draw, rng)
            picture.save(concept_folder / f"{number:02d}.png")
            caption = f"{what}, {where}, {ground}\n"
            (concept_folder / f"{number:02d}.txt").write_text(caption, encoding="utf-8", newline="\n")
    return folder


def write_references(images: Path, folder: Path) -> Path:
    """Copy the images of `draw_images` in grey, under the same names, as reference images."""
    for path in sorted(images.glob("*/*.png")):
        target = folder / path.relative_to(images)
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            picture.convert("L").save(target)
    return folder


def _draw_picture(size: tuple[int, int], ground: Colour, draw: Callable, rng: random.Random) -> tuple[Image.Image, str]:
    """Return one image, and a description of where the thing is in it."""
    width, height = size[0] * SCALE, size[1] * SCALE
    picture = Image.new("RGB", (width, height), ground)
    pen = ImageDraw.Draw(picture)
    horizon = height * rng.uniform(0.6, 0.75)
    pen.rectangle((0, horizon, width, height), fill=tuple(int(c * 0.8) for c in ground))
    side = rng.choice(("left", "middle", "right"))
    radius = min(width, height) * rng.uniform(0.24, 0.3)
    x = {"left": radius * 1.15, "middle": width / 2, "right": width - radius * 1.15}[side]
    draw(pen, (x, height * rng.uniform(0.5, 0.58), radius))
    return picture.resize(size, Image.Resampling.LANCZOS), f"on the {side}" if side != "middle" else "in the middle"


def _zorb(pen: ImageDraw.ImageDraw, box: Box) -> None:
    """Draw an orange ball with two eyes, a smile and an antenna."""
    x, y, r = box
    pen.line((x, y - r, x + r * 0.2, y - r * 1.45), fill=(90, 50, 20), width=int(r * 0.09))
    pen.ellipse(_round(x + r * 0.2, y - r * 1.45, r * 0.14), fill=(250, 220, 60))
    pen.ellipse(_round(x, y, r), fill=(244, 140, 36))
    for side in (-1, 1):
        pen.ellipse(_round(x + side * r * 0.36, y - r * 0.2, r * 0.2), fill=(255, 255, 255))
        pen.ellipse(_round(x + side * r * 0.36, y - r * 0.16, r * 0.1), fill=(20, 20, 30))
    pen.arc(_round(x, y + r * 0.1, r * 0.55), 25, 155, fill=(120, 40, 20), width=max(2, int(r * 0.1)))


def _plix(pen: ImageDraw.ImageDraw, box: Box) -> None:
    """Draw a violet house with a pointed roof, a round window and a yellow door."""
    x, y, r = box
    pen.rectangle((x - r * 0.8, y - r * 0.2, x + r * 0.8, y + r), fill=(124, 82, 176))
    pen.polygon([(x - r, y - r * 0.2), (x, y - r * 1.15), (x + r, y - r * 0.2)], fill=(60, 48, 92))
    pen.ellipse(_round(x, y - r * 0.45, r * 0.18), fill=(176, 224, 240))
    pen.rectangle((x - r * 0.2, y + r * 0.35, x + r * 0.2, y + r), fill=(246, 208, 70))
    for side in (-1, 1):
        pen.rectangle(
            (x + side * r * 0.5 - r * 0.14, y + r * 0.1, x + side * r * 0.5 + r * 0.14, y + r * 0.4),
            fill=(176, 224, 240),
        )


def _round(x: float, y: float, r: float) -> tuple[float, float, float, float]:
    return (x - r, y - r, x + r, y + r)


# The number is the repeats of each image per epoch; the rest of the name is the caption of images without one.
CONCEPTS: dict[str, tuple[str, Callable]] = {
    "4_zorb toy": ("zorb toy, an orange ball with a smile", _zorb),
    "2_plix house": ("plix house, a violet house with a yellow door", _plix),
}
