"""Draw the demo's regularization images: emoji of the pretraining, so that a LoRA forgets none."""

import argparse
import io
from pathlib import Path
from random import Random

from PIL import Image

from benchmarks.small_model import data
from library.demo import small_model

# None of them is a prompt of the demo or of the test that measures forgetting.
NAMES = [
    *("pizza", "frog", "octopus", "snowman", "guitar", "umbrella", "bicycle", "cactus", "airplane", "hot beverage"),
    *("red heart", "elephant", "dog face", "banana", "grapes", "sun", "crescent moon", "house", "key", "bell"),
    *("balloon", "soccer ball", "mushroom", "fish"),
]


def draw_known(archive: Path, folder: Path) -> int:
    """Draw a captioned image of each name; return their number."""
    stored = dict(data.read_archive(archive))
    for number, (name, ground) in enumerate(zip(NAMES, [*data.GROUNDS] * 3, strict=False)):
        emoji = Image.open(io.BytesIO(stored[name])).convert("RGBA")
        image = data.compose(emoji, data.GROUNDS[ground], Random(f"known/{name}"))
        image.save(folder / f"{number + 1:02d}.png", optimize=True)
        caption = data.WORDINGS[number % 4].format(name=name, ground=ground)
        (folder / f"{number + 1:02d}.txt").write_text(caption + "\n", encoding="utf-8", newline="\n")
    return len(NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the demo's regularization images.")
    parser.add_argument("archive", type=Path, help="emoji.zip")
    place = small_model.SMALL_MODELS_FOLDER / small_model.KNOWN_PICTURES
    place.mkdir(exist_ok=True)
    print(f"{draw_known(parser.parse_args().archive, place)} images in {place}")
    small_model.write_checksums((small_model.KNOWN_PICTURES,))


if __name__ == "__main__":
    main()
