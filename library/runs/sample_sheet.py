"""The samples of a run as one image: a row for each prompt; columns show the start, halfway and the end."""

import contextlib
import math
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from PIL import Image, ImageDraw, ImageFont

from library.config.json_types import JsonMapping, JsonValue
from library.config.problems import counted

MAX_ROWS = 8
CELL, MARGIN, HEAD = 192, 10, 38  # pixels: a sample, between samples, titles above them
TEXT_SIZE = 20  # readable at half size, as the page shows the image
LINE_HEIGHT, LETTER_WIDTH = 26, 10  # font size in pixels of a prompt above its row
MAX_LINES = 2
NO_LETTER = "\U0010ffff"  # drawn as the mark that a font has for missing letters
TRAINED_ON = "some of the training images"
# Fonts of Windows, macOS and Linux for what Pillow's own font lacks: accents, Cyrillic, Chinese, Japanese, Korean.
SYSTEM_FONTS = (
    "arial.ttf",
    "Arial.ttf",
    "DejaVuSans.ttf",
    "msyh.ttc",
    "YuGothM.ttc",
    "malgun.ttf",
    "Hiragino Sans GB.ttc",
    "STHeiti Medium.ttc",
    "AppleSDGothicNeo.ttc",
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallbackFull.ttf",
)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
INK, FAINT, PAPER = (24, 24, 32, 255), (112, 112, 124, 255), (255, 255, 255, 255)
CLEAR, MIDDLE = (0, 0, 0, 0), (122, 125, 140, 255)  # a transparent background, and an ink for light and dark pages


@dataclass(frozen=True)
class SampleSheet:
    """The arrangement of a run's samples."""

    steps: tuple[int, ...]  # steps of the columns
    prompts: Mapping[int, str]  # prompts of the rows, by number
    places: Mapping[tuple[int, int], int]  # (number, step) -> index among the run's sample events

    @property
    def size(self) -> tuple[int, int]:
        return self.width, HEAD + len(self.prompts) * (self.label_height + CELL + MARGIN)

    @property
    def width(self) -> int:
        return MARGIN + len(self.steps) * (CELL + MARGIN)

    @property
    def labels(self) -> dict[int, list[str]]:
        """Return the lines of the prompt above each row."""
        room = self.width - 2 * MARGIN
        return {number: _wrapped(_drawable(number, prompt), room) for number, prompt in self.prompts.items()}

    @property
    def label_height(self) -> int:
        return LINE_HEIGHT * max(map(len, self.labels.values()))


def arrange_samples(events: Sequence[JsonMapping]) -> SampleSheet | None:
    """Return the sheet of a run's sample events; None if all are of one step, which shows no progress.

    If a resume has changed a prompt, only samples of its last version are compared.
    """
    prompts = {_whole(event.get("number")): event.get("prompt") or "" for event in events}
    places = {
        (number, _whole(event.get("step"))): place
        for place, event in enumerate(events)
        if (event.get("prompt") or "") == prompts[number := _whole(event.get("number"))]
    }
    steps = sorted({step for _, step in places})
    if len(steps) < 2:
        return None
    middle = min(steps, key=lambda step: abs(step - (steps[0] + steps[-1]) / 2))
    rows = {number: str(prompts[number]) for number in sorted(prompts)[:MAX_ROWS]}
    return SampleSheet(tuple(sorted({steps[0], middle, steps[-1]})), rows, places)


def draw_sheet(
    sheet: SampleSheet,
    opened: Callable[[int], Image.Image | None],
    is_clear: bool = False,
    training_images: Sequence[Image.Image] = (),
) -> Image.Image:
    """Draw the sheet on white, or transparent if `is_clear`. `opened` returns the sample of an event index; None leaves
    its cell empty. The last row shows as many training images as there are columns."""
    ink, faint = (MIDDLE, MIDDLE) if is_clear else (INK, FAINT)
    width, bottom = sheet.size
    height = bottom + (LINE_HEIGHT + CELL + MARGIN if training_images else 0)
    image = Image.new("RGBA", (width, height), CLEAR if is_clear else PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(TEXT_SIZE)
    labels, above = sheet.labels, sheet.label_height
    for column, step in enumerate(sheet.steps):
        middle = MARGIN + column * (CELL + MARGIN) + CELL / 2
        title = f"after {counted(step, 'step')!s}" if step else "base model"
        pen.text((middle, HEAD / 2), title, fill=faint, font=font, anchor="mm")
    for row, number in enumerate(sheet.prompts):
        top = HEAD + row * (above + CELL + MARGIN) + above
        for line, text in enumerate(reversed(labels[number])):
            pen.text((MARGIN, top - LINE_HEIGHT * (line + 0.5)), text, fill=ink, font=_font_for(text), anchor="lm")
        for column, step in enumerate(sheet.steps):
            place = sheet.places.get((number, step))
            sample = None if place is None else opened(place)
            left = MARGIN + column * (CELL + MARGIN)
            if sample is None:
                pen.text((left + CELL / 2, top + CELL / 2), "no image", fill=faint, font=font, anchor="mm")
            else:
                _put(image, sample, left, top)
    if training_images:
        pen.text((MARGIN, bottom + LINE_HEIGHT / 2), TRAINED_ON, fill=faint, font=font, anchor="lm")
        for column, shown in enumerate(training_images[: len(sheet.steps)]):
            _put(image, shown, MARGIN + column * (CELL + MARGIN), bottom + LINE_HEIGHT)
    return image if is_clear else image.convert("RGB")


def _whole(value: JsonValue) -> int:
    # 0 if a damaged record has no number.
    return int(value) if isinstance(value, int | float) and abs(value) < math.inf else 0


def _put(image: Image.Image, sample: Image.Image, left: int, top: int) -> None:
    """Paste a sample into its cell at the largest size that fits."""
    factor = CELL / max(sample.size)
    width, height = max(1, round(sample.width * factor)), max(1, round(sample.height * factor))
    fitted = sample.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    image.paste(fitted, (left + (CELL - width) // 2, top + (CELL - height) // 2))


def _drawable(number: int, prompt: str) -> str:
    """Return the part of a prompt that one font draws, or the prompt's number if that is not most of it."""
    best = max((_drawn_by(font, prompt) for font in _fonts()), key=len)
    return best if best.strip() and 2 * len(best) > len(prompt) else f"prompt {number + 1}"


@cache
def _fonts() -> tuple[Font, ...]:
    """Return Pillow's own font and those of this computer, in the order in which they are preferred."""
    fonts: list[Font] = [ImageFont.load_default(TEXT_SIZE)]
    for name in SYSTEM_FONTS:
        with contextlib.suppress(OSError):
            fonts.append(ImageFont.truetype(name, TEXT_SIZE))
    return tuple(fonts)


def _font_for(text: str) -> Font:
    return max(_fonts(), key=lambda font: len(_drawn_by(font, text)))


def _drawn_by(font: Font, text: str) -> str:
    return "".join(letter for letter in text if _has_glyph(font, letter))


@lru_cache(maxsize=4096)
def _has_glyph(font: Font, letter: str) -> bool:
    """Return whether a font draws a letter. Scripts from right to left count as missing: Pillow alone draws them in
    the wrong order."""
    if not letter.isprintable() or unicodedata.bidirectional(letter) in ("R", "AL"):
        return False
    return letter == " " or _drawing(font, letter) != _drawing(font, NO_LETTER)


def _drawing(font: Font, letter: str) -> bytes:
    image = Image.new("L", (2 * TEXT_SIZE, 2 * TEXT_SIZE))
    ImageDraw.Draw(image).text((0, 0), letter, fill=255, font=font)
    return image.tobytes()


def _wrapped(text: str, room: int) -> list[str]:
    """Return the lines of a text in `room` pixels."""
    letter_width = max(LETTER_WIDTH, _font_for(text).getlength(text) / len(text))  # twice as much in Chinese
    return textwrap.wrap(text, int(room / letter_width), max_lines=MAX_LINES, placeholder=" ...")
