"""The zorb: a character that no model has seen, drawn as an emoji on plain grounds, each picture with its caption.

A training learns a dozen of the pictures; the others measure what it has learned. All are drawn from the tables below,
so every machine draws the same.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from library.files import write_atomic

Colour = tuple[int, int, int]
Point = tuple[float, float]

SIDE = 128  # pixels; the small models were trained at this size
GROUNDS: dict[str, Colour] = {
    "white": (255, 255, 255),
    "blue": (120, 170, 255),
    "green": (150, 220, 150),
    "pink": (255, 190, 210),
    "yellow": (255, 240, 150),
    "gray": (200, 200, 200),
    "orange": (255, 200, 120),
    "purple": (200, 170, 240),
    "black": (30, 30, 30),
    "brown": (180, 140, 110),
}
WORDINGS = (
    "{name} emoji on a {ground} ground",
    "{name} on a {ground} background",
    "a {ground} background, {name}",
    "an emoji of {name}, {ground} background",
    "{name}",
)
NAME = "zorb"  # in each caption; the small models' tokenizers know it as one word
ZORB_FOLDER = f"2_{NAME} emoji"  # <repeats>_<words>, as sd-scripts names image folders
OVERSAMPLING = 4  # drawn this much larger and then reduced, which smooths the edges

BODY, SHADE, LIGHT = (255, 138, 30), (222, 98, 14), (255, 186, 92)
BELLY, SPOT = (255, 222, 160), (32, 160, 170)
LIMB, TIP, TIP_SHADE = (92, 58, 168), (255, 214, 40), (226, 160, 12)
WHITE, DARK, TONGUE = (255, 255, 255), (44, 28, 48), (232, 78, 90)


@dataclass(frozen=True)
class Pose:
    """How the zorb stands. Angles in degrees; an arm at 0 is level, at 60 it is raised."""

    tilt: float = 0.0
    arms: tuple[float, float] = (-35.0, -35.0)  # the left one in the picture, and the right one
    looks: Point = (0.0, 0.0)  # of the pupils, from -1 to 1
    mouth: float = 0.0  # 0 is a smile, 1 is wide open
    feet: float = 0.0  # how far apart they are, from 0 to 1


@dataclass(frozen=True)
class Scene:
    """One picture: the pose, its size as a share of the largest, its place from 0 to 1, and what the caption says."""

    pose: Pose
    size: float
    place: Point
    ground: str
    wording: int

    @property
    def caption(self) -> str:
        # The small models know captions in these words.
        return WORDINGS[self.wording].format(name=NAME, ground=self.ground)


STANDS = Pose()
WAVES = Pose(tilt=-6, arms=(-30, 55), looks=(0.5, -0.3), mouth=0.4)
CHEERS = Pose(arms=(60, 60), looks=(0, -0.5), mouth=1.0, feet=0.6)
LEANS = Pose(tilt=12, arms=(10, -50), looks=(-0.6, 0.1))
POINTS = Pose(tilt=4, arms=(8, -40), looks=(-0.8, 0), mouth=0.3)
JUMPS = Pose(tilt=-10, arms=(40, 20), looks=(0.4, 0.5), mouth=0.8, feet=1.0)

TRAINING_SCENES = (
    Scene(STANDS, 1.0, (0.5, 0.5), "white", 0),
    Scene(WAVES, 0.95, (0.4, 0.6), "blue", 0),
    Scene(CHEERS, 0.9, (0.5, 0.3), "green", 1),
    Scene(LEANS, 0.85, (0.7, 0.6), "pink", 2),
    Scene(POINTS, 0.8, (0.8, 0.4), "yellow", 0),
    Scene(JUMPS, 0.9, (0.5, 0.2), "gray", 1),
    Scene(STANDS, 0.75, (0.2, 0.8), "blue", 3),
    Scene(WAVES, 0.9, (0.6, 0.5), "green", 0),
    Scene(CHEERS, 1.0, (0.5, 0.5), "yellow", 1),
    Scene(LEANS, 0.95, (0.3, 0.4), "white", 3),
    Scene(POINTS, 0.9, (0.5, 0.7), "pink", 0),
    Scene(JUMPS, 0.8, (0.6, 0.6), "black", 1),
)
# No training sees these: other poses, on grounds from the training and on a new one.
UNSEEN_GROUND = "purple"
HELD_OUT_SCENES = (
    Scene(WAVES, 1.0, (0.5, 0.5), "white", 0),
    Scene(STANDS, 0.95, (0.5, 0.5), "blue", 0),
    Scene(LEANS, 0.9, (0.5, 0.6), "green", 1),
    Scene(STANDS, 0.9, (0.5, 0.5), UNSEEN_GROUND, 0),
    Scene(WAVES, 0.95, (0.4, 0.5), UNSEEN_GROUND, 1),
    Scene(CHEERS, 0.9, (0.5, 0.5), UNSEEN_GROUND, 0),
)


def write_zorbs(folder: Path) -> Path:
    """Draw the pictures to learn from, each with its caption, into a `N_name` folder below `folder`."""
    place = folder / ZORB_FOLDER
    place.mkdir(parents=True)
    for number, scene in enumerate(TRAINING_SCENES, start=1):
        write_atomic(place / f"{number:02d}.png", draw_scene(scene).save)
        write_atomic(place / f"{number:02d}.txt", scene.caption + "\n")
    return folder


def draw_scene(scene: Scene) -> Image.Image:
    """Return one picture, RGB [SIDE, SIDE]."""
    large = SIDE * OVERSAMPLING
    image = Image.new("RGB", (large, large), GROUNDS[scene.ground])
    side = round(large * 0.94 * scene.size)
    figure = _draw_figure(scene.pose, side)
    left, top = (round((large - side) * share) for share in scene.place)
    image.paste(figure, (left, top), figure)
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _draw_figure(pose: Pose, side: int) -> Image.Image:
    """Draw the zorb itself, RGBA [side, side], on a transparent ground."""
    image = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    pen = ImageDraw.Draw(image)
    x, y, r = side * 0.5, side * 0.56, side * 0.29
    _draw_antenna(pen, (x, y), r)
    _draw_feet(pen, (x, y), r, pose.feet)
    for direction, angle in zip((-1, 1), pose.arms, strict=True):
        _draw_arm(pen, (x + direction * r * 0.88, y + r * 0.1), r, direction, angle)
    _draw_body(pen, (x, y), r)
    _draw_face(pen, (x, y), r, pose)
    return image.rotate(pose.tilt, Image.Resampling.BICUBIC, center=(x, y))


def _draw_body(pen: ImageDraw.ImageDraw, centre: Point, r: float) -> None:
    """Draw a round body, lit from above, with a pale belly and two spots."""
    x, y = centre
    pen.ellipse(_ellipse_box(x, y, r), fill=SHADE)
    pen.ellipse(_ellipse_box(x, y - r * 0.05, r * 0.95), fill=BODY)
    pen.ellipse(_ellipse_box(x, y + r * 0.55, r * 0.42, r * 0.34), fill=BELLY)
    pen.ellipse(_ellipse_box(x - r * 0.5, y - r * 0.66, r * 0.2, r * 0.12), fill=LIGHT)
    for side, up, size in ((-1, 0.42, 0.13), (1, 0.36, 0.15), (1, 0.66, 0.09)):
        pen.ellipse(_ellipse_box(x + side * r * (0.7 if size > 0.1 else 0.52), y + r * up, r * size), fill=SPOT)


def _draw_face(pen: ImageDraw.ImageDraw, centre: Point, r: float, pose: Pose) -> None:
    """Draw two large eyes that touch, and a mouth that smiles or is open."""
    x, y = centre
    for side in (-1, 1):
        at = (x + side * r * 0.33, y - r * 0.32)
        pen.ellipse(_ellipse_box(*at, r * 0.34), fill=DARK)
        pen.ellipse(_ellipse_box(*at, r * 0.3), fill=WHITE)
        pupil = (at[0] + pose.looks[0] * r * 0.13, at[1] + pose.looks[1] * r * 0.13)
        pen.ellipse(_ellipse_box(*pupil, r * 0.15), fill=DARK)
        pen.ellipse(_ellipse_box(pupil[0] + r * 0.05, pupil[1] - r * 0.06, r * 0.05), fill=WHITE)
    mouth = (x, y + r * 0.12)
    if pose.mouth:
        width, height = r * 0.34, r * (0.16 + 0.22 * pose.mouth)
        pen.pieslice(_ellipse_box(*mouth, width, height), 0, 180, fill=DARK)
        pen.pieslice(_ellipse_box(mouth[0], mouth[1] + height * 0.45, width * 0.55, height * 0.5), 0, 180, fill=TONGUE)
    else:
        pen.arc(_ellipse_box(*mouth, r * 0.38, r * 0.2), 10, 170, fill=DARK, width=max(2, round(r * 0.08)))


def _draw_antenna(pen: ImageDraw.ImageDraw, centre: Point, r: float) -> None:
    """Draw a bent stalk with a yellow star."""
    x, y = centre
    stalk = [(x, y - r * 0.9), (x + r * 0.06, y - r * 1.2), (x + r * 0.16, y - r * 1.42)]
    pen.line(stalk, fill=LIMB, width=round(r * 0.13), joint="curve")
    tip = (x + r * 0.18, y - r * 1.5)
    pen.polygon(_star(tip, r * 0.4), fill=TIP_SHADE)
    pen.polygon(_star(tip, r * 0.33), fill=TIP)


def _draw_feet(pen: ImageDraw.ImageDraw, centre: Point, r: float, apart: float) -> None:
    """Draw two violet feet below the body."""
    x, y = centre
    for side in (-1, 1):
        pen.ellipse(_ellipse_box(x + side * r * (0.42 + 0.25 * apart), y + r * 1.04, r * 0.34, r * 0.2), fill=LIMB)


def _draw_arm(pen: ImageDraw.ImageDraw, shoulder: Point, r: float, side: int, angle: float) -> None:
    """Draw a short arm with a round hand; `side` is -1 or 1."""
    away = (side * math.cos(math.radians(angle)), -math.sin(math.radians(angle)))
    hand = (shoulder[0] + away[0] * r * 0.5, shoulder[1] + away[1] * r * 0.5)
    pen.line([shoulder, hand], fill=LIMB, width=round(r * 0.2))
    pen.ellipse(_ellipse_box(*hand, r * 0.19), fill=LIMB)


def _star(centre: Point, r: float) -> list[Point]:
    rays = 5
    turns = ((math.pi * number / rays, r if number % 2 == 0 else r * 0.5) for number in range(2 * rays))
    return [(centre[0] + math.sin(turn) * far, centre[1] - math.cos(turn) * far) for turn, far in turns]


def _ellipse_box(x: float, y: float, r: float, height: float | None = None) -> tuple[float, float, float, float]:
    down = r if height is None else height
    return (x - r, y - down, x + r, y + down)
