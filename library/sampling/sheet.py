"""The images of a comparison, their grid, and the texts in their files. Importing this loads no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw, PngImagePlugin

from library.config.json_types import JsonObject
from library.files import write_atomic

MARGIN, TITLE = 8, 22  # pixels in the grid
SMALLEST = 160


@dataclass
class Sheet:
    """The image files of a comparison by row and column; "" if not generated yet."""

    columns: list[str]
    rows: list[str]
    folder: Path
    files: list[list[str]] = field(default_factory=list)
    grid: str = ""
    seeds: list[int | None] = field(default_factory=list)  # of the rows

    def as_json(self) -> JsonObject:
        """Return the sheet for the page."""
        return {
            "columns": self.columns,
            "rows": self.rows,
            "seeds": self.seeds,
            "folder": str(self.folder),
            "files": self.files,
            "grid": self.grid,
        }


def side_by_side(sheet: Sheet) -> Image.Image:
    """Return all images in a grid, under the titles of their columns."""
    samples = [[Image.open(name) for name in row] for row in sheet.files]
    width = max(SMALLEST, max(sample.width for row in samples for sample in row)) + MARGIN
    heights = [max(sample.height for sample in row) + MARGIN for row in samples]
    image = Image.new("RGB", (width * len(sheet.columns) + MARGIN, sum(heights) + TITLE + MARGIN), "white")
    pen = ImageDraw.Draw(image)
    top = TITLE
    for at, title in enumerate(sheet.columns):
        # The default font has only Latin letters; others are dropped.
        plain = title.replace("×", "x").encode("latin-1", "replace").decode("latin-1")
        pen.text((MARGIN + at * width, 6), plain[: width // 7], fill="black")
    for row, height in zip(samples, heights, strict=True):
        for at, sample in enumerate(row):
            image.paste(sample, (MARGIN + at * width, top))
            sample.close()
        top += height
    return image


def save_image(image: Image.Image, path: Path, facts: dict[str, str]) -> None:
    """Write a PNG with these text chunks."""
    info = PngImagePlugin.PngInfo()
    for name, text in facts.items():
        info.add_itxt(name, text)
    write_atomic(path, lambda temporary: image.save(temporary, pnginfo=info))
