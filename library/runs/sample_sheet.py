"""The samples of a run as one picture: a row for each prompt; columns show the start, halfway and the end."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from library.config.json_types import JsonMapping, JsonValue
from library.config.problems import counted

MOST_ROWS = 8
CELL, MARGIN, HEAD, SIDE = 192, 10, 30, 176  # pixels: a sample, between samples, titles above, prompts beside them
LETTERS = 24  # of a prompt in a line beside its samples
LINES = 6
TEXT_SIZE = 14
INK, FAINT, PAPER = (24, 24, 32), (112, 112, 124), (255, 255, 255)


@dataclass(frozen=True)
class SampleSheet:
    """Which samples of a run stand where."""

    steps: tuple[int, ...]  # of the columns
    prompts: Mapping[int, str]  # of the rows, by number
    places: Mapping[tuple[int, int], int]  # (number, step) -> place among the run's events of samples

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the picture."""
        return SIDE + MARGIN + len(self.steps) * (CELL + MARGIN), HEAD + len(self.prompts) * (CELL + MARGIN)


def arrange_samples(events: Sequence[JsonMapping]) -> SampleSheet | None:
    """The sheet of a run's events of samples; None where they show no progress, as all are of one step."""
    places, prompts = {}, {}
    for place, event in enumerate(events):
        number, step = (_whole(event.get(name)) for name in ("number", "step"))
        places[number, step], prompts[number] = place, str(event.get("prompt") or "")
    steps = sorted({step for _, step in places})
    if len(steps) < 2:
        return None
    middle = min(steps, key=lambda step: abs(step - (steps[0] + steps[-1]) / 2))
    rows = {number: prompts[number] for number in sorted(prompts)[:MOST_ROWS]}
    return SampleSheet(tuple(sorted({steps[0], middle, steps[-1]})), rows, places)


def draw_sheet(sheet: SampleSheet, opened: Callable[[int], Image.Image | None]) -> Image.Image:
    """The picture, RGB. `opened` returns the sample at a place among the run's events; None leaves its cell empty."""
    image = Image.new("RGB", sheet.size, PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(TEXT_SIZE)
    for column, step in enumerate(sheet.steps):
        middle = SIDE + MARGIN + column * (CELL + MARGIN) + CELL / 2
        pen.text((middle, HEAD / 2), _title(step), fill=INK, font=font, anchor="mm")
    for row, (number, prompt) in enumerate(sheet.prompts.items()):
        top = HEAD + row * (CELL + MARGIN)
        pen.multiline_text((MARGIN, top + CELL / 2), _wrapped(prompt), fill=INK, font=font, anchor="lm", spacing=5)
        for column, step in enumerate(sheet.steps):
            place = sheet.places.get((number, step))
            sample = None if place is None else opened(place)
            left = SIDE + MARGIN + column * (CELL + MARGIN)
            if sample is None:
                pen.text((left + CELL / 2, top + CELL / 2), "no image", fill=FAINT, font=font, anchor="mm")
            else:
                _put(image, sample, left, top)
    return image


def _whole(value: JsonValue) -> int:
    """A number of an event, 0 where a damaged record holds none."""
    return int(value) if isinstance(value, int | float) and abs(value) < math.inf else 0


def _put(image: Image.Image, sample: Image.Image, left: int, top: int) -> None:
    """Paste a sample into its cell, as large as it fits."""
    factor = CELL / max(sample.size)
    width, height = max(1, round(sample.width * factor)), max(1, round(sample.height * factor))
    fitted = sample.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    image.paste(fitted, (left + (CELL - width) // 2, top + (CELL - height) // 2))


def _title(step: int) -> str:
    return f"after {counted(step, 'step')!s}" if step else "base model"


def _wrapped(prompt: str) -> str:
    """A prompt in short lines; the font has Latin letters alone."""
    plain = prompt.encode("latin-1", "replace").decode("latin-1")
    return "\n".join(textwrap.wrap(plain, LETTERS, max_lines=LINES, placeholder=" ..."))
