"""Copy finished small models into the program, where the demo finds them, and write their checksums."""

import argparse
import shutil
from pathlib import Path

from library.demo import small_model


def ship(folder: Path, family: str) -> list[Path]:
    """Copy the files of a family from `folder`/<family>; those that were there before go."""
    facts = small_model.small_model_of(family)
    assert facts is not None
    place = small_model.SMALL_MODELS_FOLDER / family
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in facts.files.values():
        shutil.copyfile(folder / family / name, place / name)
    for tokenizer in ("tokenizer", "tokenizer_2"):
        shutil.copytree(folder / family / tokenizer, place / tokenizer)
    small_model.write_checksums((family,))
    return small_model.whole_files(family)


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy finished small models into the program.")
    parser.add_argument("folder", type=Path, help="with a folder for each family")
    parser.add_argument("--family", nargs="+", default=["flux", "sdxl"])
    asked = parser.parse_args()
    for family in asked.family:
        files = ship(asked.folder, family)
        print(f"{family}: {sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {len(files)} files")


if __name__ == "__main__":
    main()
