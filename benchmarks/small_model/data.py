"""Make captioned images from `emoji.zip`: each emoji on several backgrounds, shifted and scaled, with captions in
several wordings. An image depends only on its name and number, so two machines make the same data set."""

import argparse
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

from PIL import Image

from library.demo.zorb import GROUNDS, NAME, SIDE, WORDINGS

SMALLEST = 0.7  # of the emoji's full size
HELD_OUT = 20  # one in so many names is for validation
WITHOUT_CAPTION = 10  # one in so many images has none, for unconditional guidance
NEW_WORDS = (NAME,)  # in the tokenizers, but in no image


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0


def captions_of(names: Sequence[str]) -> Iterator[str]:
    """Return every wording of every name, for the vocabulary of tokenizers."""
    for name in names:
        for wording in WORDINGS:
            yield wording.format(name=name, ground="white")
    yield " ".join(GROUNDS)
    yield " ".join(NEW_WORDS)


def compose(emoji: Image.Image, ground: tuple[int, int, int], random: Random) -> Image.Image:
    """Return the emoji on a background, RGB [SIDE, SIDE], at a random size and place."""
    side = round(emoji.width * random.uniform(SMALLEST, 1.0))
    place = (random.randint(0, SIDE - side), random.randint(0, SIDE - side))
    image = Image.new("RGB", (SIDE, SIDE), ground)
    small = emoji.resize((side, side), Image.Resampling.LANCZOS)
    image.paste(small.convert("RGB"), place, small.getchannel("A"))
    return image


def write_pictures(folder: Path, variants: int, stored: tuple[str, bytes]) -> int:
    """Write the captioned images of one emoji; return their number."""
    name, data = stored
    emoji = Image.open(io.BytesIO(data)).convert("RGBA")
    place = folder / ("held_out" if is_held_out(name) else "train")
    count = 2 if is_held_out(name) else max(2, variants // 5) if "skin tone" in name else variants
    for number in range(count):
        random = Random(f"{name}/{number}")
        ground = "white" if random.random() < 0.3 else random.choice([*GROUNDS])
        image = compose(emoji, GROUNDS[ground], random)
        caption = random.choice(WORDINGS).format(name=name, ground=ground)
        if not is_held_out(name) and random.randrange(WITHOUT_CAPTION) == 0:
            caption = ""
        stem = f"{name.replace(' ', '_')}-{number:02d}"
        image.save(place / f"{stem}.png", compress_level=1)
        (place / f"{stem}.txt").write_text(caption, encoding="utf-8")
    return count


def read_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Return name and WebP file of each emoji."""
    with zipfile.ZipFile(archive) as stored:
        for name in stored.namelist():
            yield name.removesuffix(".webp"), stored.read(name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the small models' images from emoji.zip.")
    parser.add_argument("folder", type=Path, help="folder of emoji.zip; images go into its folder pictures")
    parser.add_argument("--variants", type=int, default=16, help="images per emoji (default: 16)")
    parser.add_argument("--to", type=Path, help="another folder for the images")
    parser.add_argument("--first", type=int, help="number of emoji (default: all)")
    args = parser.parse_args()
    folder = args.to or args.folder / "pictures"
    for part in ("train", "held_out"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    stored = list(read_archive(args.folder / "emoji.zip"))[: args.first]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        counts = pool.map(partial(write_pictures, folder, args.variants), stored, chunksize=16)
        print(f"{sum(counts)} images in {folder}")


if __name__ == "__main__":
    main()
