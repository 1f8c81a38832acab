"""What is wrong with a folder of images, or likely a mistake in it, and how to fix it."""

from collections.abc import Callable, Iterator
from pathlib import Path

from library.config.problems import SURROGATES, Problem, counted
from library.data.folders import (
    MANY_REPEATS,
    MASK_LABEL,
    Concept,
    Listing,
    about_images,
    concept,
    concepts,
    has_flat_images,
    looked_into,
    some,
)

USUAL_REPEATS = 10  # of a folder whose name has none, as in guides for sd-scripts
MAX_REPEATS = 100_000  # as in a data set file
MAX_SEARCH_DEPTH = 6  # how many levels down misplaced images are looked for
MAX_FOLDERS_SEARCHED = 2000  # in how many folders they are looked for


def about_labels(listing: Listing, is_masked: bool) -> Iterator[Problem]:
    """Report OneTrainer's masks and conditioning images, which are not trained on."""
    masks = sorted(name for name in listing.labels if MASK_LABEL in name)
    if masks and not is_masked:
        yield about_images(
            "{folder}: masks of OneTrainer, which are not trained on: {names}; set masked_loss to use them as masks",
            folder=listing.folder,
            names=some(masks),
            fix={"masked_loss": True},
        )
    if condition_images := sorted(name for name in listing.labels if MASK_LABEL not in name):
        yield about_images(
            "{folder}: conditioning images of OneTrainer, which are not used: {names}",
            folder=listing.folder,
            names=some(condition_images),
        )


def _too_often(option: str, entry: Concept) -> Problem:
    facts = {"folder": entry.folder, "repeats": f"{entry.repeats:,}", "words": entry.words}
    template = ": {folder} asks for {repeats} repeats, which is too many for a training; rename it to 1_{words}"
    return Problem(option, template, **facts)


def _unusable(option: str, parent: Path) -> Problem | None:
    if SURROGATES.search(str(parent)):
        return Problem(
            option, ": {parent} is not a name in UTF-8, which a config needs; rename the folder", parent=parent
        )
    if not parent.exists():
        return Problem(option, ": {parent} does not exist; choose the folder of your images", parent=parent)
    if not parent.is_dir():
        return Problem(option, ": {parent} is a file; give the folder that holds your images", parent=parent)
    if why := looked_into(parent).unreadable:
        return Problem(option, ": {path} cannot be read: {why}", path=parent, why=why)
    return None


def problems_of_parent(option: str, parent: str | Path) -> Iterator[Problem]:
    """Yield why a folder cannot be used as the images of a training, and the fix."""
    parent = Path(parent)
    if why_not := _unusable(option, parent):
        yield why_not
        return
    entries = concepts(parent)
    yield from (_too_often(option, entry) for entry in entries if entry.repeats > MAX_REPEATS)
    if entries or has_flat_images(parent):
        return
    yield _without_concepts(option, parent)


def _without_concepts(option: str, parent: Path) -> Problem:
    """Return why none of the folders in `parent` has a name with repeats and contains images."""
    listing = looked_into(parent)
    if listing.images:
        above = parent.absolute().parent
        template = ": {parent} holds the images themselves; give the folder above it: {above}"
        return Problem(option, template, parent=parent, above=above, fix={option: str(above)})
    if with_images := [name for name in listing.folders if looked_into(parent / name).images]:
        return _misnamed(option, parent, with_images)
    if listing.undecodable:
        template = ": {undecodable} in {parent} are in formats that are not read here; convert them to PNG or WebP"
        return Problem(option, template, undecodable=some(listing.undecodable), parent=parent)
    if deeper := next(_with_images(parent), None):
        return Problem(
            option,
            ": {parent} holds images only further down, and folders inside folders are not read; "
            "give the folder that holds them: {folder}",
            parent=parent,
            folder=deeper.absolute(),
            fix={option: str(deeper.absolute())},
        )
    if listing.folders:
        template = ": neither {parent} nor a folder in it holds images (png, jpg, webp, bmp)"
        return Problem(option, template, parent=parent)
    template = ": {parent} is empty; it should hold images, or folders named 10_words with images"
    if any(parent.iterdir()):
        template = ": {parent} holds no images (png, jpg, webp, bmp), but other files; choose the folder of your images"
    return Problem(option, template, parent=parent)


def _misnamed(option: str, parent: Path, with_images: list[str]) -> Problem:
    """Return how to rename folders of images, so that their names begin with a number of repeats."""
    if idle := [name for name in with_images if concept(parent / name)]:
        template = ": {parent} has 0 repeats, and there is no other folder; rename it to begin with 1_"
        return Problem(option, template, parent=parent / idle[0])
    name = with_images[0]
    if len(with_images) > 1:
        return Problem(
            option,
            ": no folder in {parent} is named <repeats>_<words>; rename '{name}' to '1_{name}' "
            "and so on, or give one of them",
            parent=parent,
            name=name,
        )
    folder = (parent / name).absolute()
    return Problem(
        option,
        ": no folder in {parent} is named <repeats>_<words>; rename '{name}' to '1_{name}', "
        "or give that folder: {folder}",
        parent=parent,
        name=name,
        folder=folder,
        fix={option: str(folder)},
    )


def _with_images(parent: Path) -> Iterator[Path]:
    """Yield folders below `parent` that contain images, the nearest first; links are not followed."""
    level, num_searched = [parent], 0
    for _ in range(MAX_SEARCH_DEPTH):
        below = [folder / name for folder in level for name in looked_into(folder).folders]
        level = [folder for folder in below if not folder.is_symlink()][: MAX_FOLDERS_SEARCHED - num_searched]
        num_searched += len(level)
        yield from (folder for folder in level if looked_into(folder).images)


def warnings_of_parent(option: str, parent: Path, repeats: int = 1) -> Iterator[Problem]:
    """Yield what in a folder of images is not used, or likely a mistake; `repeats` are those of a flat folder."""
    listing, flat = looked_into(parent), has_flat_images(parent)
    skipped = [name for name in listing.folders if concept(parent / name) is None and looked_into(parent / name).images]
    if skipped and not flat:
        yield Problem(
            option,
            ": images in {skipped} are not used, since the names do not start with a number of "
            "repeats; rename them like '1_{first}' to use them",
            skipped=some(skipped),
            first=skipped[0],
        )
    count = counted(len(listing.images), "image")
    if flat and option == "train_data_dir" and repeats > 1:
        yield Problem(
            option,
            ": {count} directly in {parent}, each seen {repeats} times per epoch",
            count=count,
            parent=parent,
            repeats=repeats,
        )
    elif flat and option == "train_data_dir":
        yield Problem(
            option,
            ": {count} directly in {parent}, each seen once per epoch; set dataset_repeats to see them more often",
            count=count,
            parent=parent,
            fix={"dataset_repeats": USUAL_REPEATS},
        )
    elif listing.images and not flat:
        yield Problem(
            option,
            ": images directly in {parent} are not used ({count}); move them one folder deeper",
            parent=parent,
            count=len(listing.images),
        )
    for entry in map(concept, (parent / name for name in listing.folders)):
        if entry and entry.repeats == 0:
            yield about_images("{folder} has 0 repeats and is not used", folder=entry.folder)
        elif entry and entry.repeats >= MANY_REPEATS:
            yield about_images(
                "{folder} is read as {repeats} repeats of '{words}'; rename it if not meant so",
                folder=entry.folder,
                repeats=entry.repeats,
                words=entry.words,
            )


def why_empty(folder: Path, listing: Listing, list_folder: Callable[[Path], Listing]) -> Problem:
    """Return why a folder of images contains none."""
    if listing.unreadable:
        return about_images("{path} cannot be read: {why}", path=folder, why=listing.unreadable)
    if listing.undecodable:
        template = "image folder {folder}: {files} are in formats that are not read here; convert them to PNG or WebP"
        return about_images(template, folder=folder, files=some(listing.undecodable))
    deeper = [name for name in listing.folders if list_folder(folder / name).images]
    if deeper:
        template = "image folder {folder} holds no images, but its folder {inner} does; name that one"
        return about_images(template, folder=folder, inner=folder / deeper[0])
    return about_images("image folder {folder} holds no images (png, jpg, webp, bmp)", folder=folder)
