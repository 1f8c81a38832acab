"""Draw every emoji of Noto Color Emoji (SIL OFL 1.1) once, with its English name, into `emoji.zip` in a folder.

Besides the trainer's own requirements it needs Debian's fonts-noto-color-emoji, the package emoji, and a Pillow with
raqm, which joins the characters of flags and families.
"""

import argparse
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
BITMAP_SIZE = 109  # the only size of the font's bitmaps
EMOJI_SIDE = 120
QUALITY = 95  # of the stored WebP; transparency is exact
MIN_OPAQUE_PIXELS = 1000  # fewer: the font lacks the character
REGIONAL = range(0x1F1E6, 0x1F200)  # letters whose pairs are flags


def emoji_names() -> Iterator[tuple[str, str]]:
    """Return the characters of each emoji and its plain name."""
    import emoji

    for characters, facts in emoji.EMOJI_DATA.items():
        if facts["status"] <= emoji.STATUS["fully_qualified"]:
            name = facts["en"].strip(":").replace("_", " ").replace(":", "").replace("’", "'").lower()
            yield characters, f"flag of {name}" if ord(characters[0]) in REGIONAL else name


def draw(characters: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Return one emoji, RGBA [SIDE, SIDE], on a transparent background."""
    image = Image.new("RGBA", (136, 136), (0, 0, 0, 0))
    ImageDraw.Draw(image).text((0, 4), characters, font=font, embedded_color=True)
    return image.resize((EMOJI_SIDE, EMOJI_SIDE), Image.Resampling.LANCZOS)


def opaque_pixels(image: Image.Image) -> int:
    return int((np.asarray(image)[..., 3] > 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw all emoji into one file.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not features.check("raqm"):
        raise SystemExit("this Pillow has no raqm, so flags and families would be drawn as several emoji")
    font = ImageFont.truetype(FONT, BITMAP_SIZE)
    pictures = {name: draw(characters, font) for characters, name in emoji_names()}
    pictures = {name: image for name, image in pictures.items() if opaque_pixels(image) > MIN_OPAQUE_PIXELS}
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "emoji.zip", "w") as archive:
        for name, picture in pictures.items():
            with archive.open(f"{name}.webp", "w") as file:
                picture.save(file, "WEBP", quality=QUALITY)
    print(f"{len(pictures)} emoji in {folder / 'emoji.zip'}")


if __name__ == "__main__":
    main()
