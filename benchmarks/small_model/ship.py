"""Copy finished small models to the demo's folder, and write their checksums."""

import argparse
import shutil
from pathlib import Path

from library.demo import small_model

SHIPPED_FAMILIES = ("flux", "sdxl")


def ship(folder: Path) -> None:
    """Copy the files of all families from `folder`/<family>, replacing earlier ones. Equal files, such as tokenizers,
    are listed for each family but stored once.
    """
    for family in SHIPPED_FAMILIES:
        facts = small_model.small_model_of(family)
        assert facts is not None
        place = small_model.SMALL_MODELS_FOLDER / family
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for name in facts.files.values():
            shutil.copyfile(folder / family / name, place / name)
        for tokenizer in ("tokenizer", "tokenizer_2"):
            shutil.copytree(folder / family / tokenizer, place / tokenizer)
    small_model.write_checksums(SHIPPED_FAMILIES)
    kept = {path for family in SHIPPED_FAMILIES for path in small_model.whole_files(family)}
    copied = (path for family in SHIPPED_FAMILIES for path in (small_model.SMALL_MODELS_FOLDER / family).rglob("*"))
    for path in [path for path in copied if path.is_file() and path not in kept]:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy finished small models into the program.")
    parser.add_argument("folder", type=Path, help="folder with a folder per family")
    ship(parser.parse_args().folder)
    for family in SHIPPED_FAMILIES:
        files = small_model.whole_files(family)
        print(f"{family}: {sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {len(files)} files")


if __name__ == "__main__":
    main()
