"""All images of a training as the trainer finds them: regularisation images, metadata files, dataset files."""

import contextlib
import os
from collections import Counter
from pathlib import Path

from library.config import dataset as datasets
from library.config.dataset import SubsetConfig
from library.config.problems import ConfigError, Message, Report
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.curation import scanning
from library.curation.collection import ImageCollection, ImageFolder, May, Picture
from library.data import finding, metadata
from library.data.folders import Listing, some
from library.data.images import Image
from library.data.survey import Survey

LEFT_OVER = Message("there are more than needed")
HELD_OUT = Message("the same file or a copy of it is held out for validation")
CAPTION_ELSEWHERE = "its caption is in {file}: change it there, and open its folder to change the image"
ELSEWHERE = "it is outside the opened folder: open {folder} to change it"


# The trainer's own survey is used, so that the tab's counts cannot differ from the training's.
# Why: docs/decisions/2026-11-20-data-set-tab-counts-as-the-trainer.md
def scan_sources(
    config: RunConfig, report: Report | None = None, may: May = lambda path: True, world: int = 1
) -> ImageCollection:
    """Scan the images of a training: of its image folder, or of all sources that its config names.

    Images in the image folder itself can be changed, all others are read-only. Raises ConfigError for files that cannot
    or may not be read.
    """
    data = config.data
    held_back = isinstance(config, AdapterRun) and config.validation.validation_split
    if not (data.dataset_config or data.in_json or data.reg_data_dir or held_back):
        collection = scanning.scan_collection(Path(data.train_data_dir or ""), config, report, may)
        collection.world = world
        return collection
    guard(config, may)
    survey = finding.survey_data(config, report, keep=False)
    described = data.dataset_config or data.in_json
    if described:
        name = Path(described).name
        root = Path(data.dataset_config or data.train_data_dir or "")
        collection = ImageCollection(
            root, config, may=may, fixed=Message("{name} describes these images: open one of their folders", name=name)
        )
    else:
        collection = scanning.scan_collection(Path(data.train_data_dir or ""), config, report, may)
    collection.world, collection.found, collection.problems = world, survey.images, survey.problems
    notes = dict.fromkeys([*survey.other_captions, *survey.warnings, *scanning.sharing(collection)])
    if any(subset.random_crop for dataset in survey.images.datasets for subset in dataset.subsets):
        notes["Crops are random: the shading shows a centre crop."] = None
    collection.notes = list(notes)
    _add_images(collection, survey, report)
    return collection


def guard(config: RunConfig, may: May) -> None:
    """Raise ConfigError when a config names a path that may not be read."""
    paths: dict[str, None] = {}
    for dataset in datasets.load_datasets(config):
        for subset in dataset.subsets:
            second_folders = (subset.conditioning_data_dir, *subset.control_directories)
            paths |= dict.fromkeys(p for p in (subset.image_dir, subset.metadata_file, *second_folders) if p)
            _check_allowed(paths, may)
            if subset.metadata_file:
                entries = metadata.read_metadata_file(subset.metadata_file, subset.image_dir)
                paths |= dict.fromkeys(
                    os.path.dirname(path) for entry in entries for path in (entry.path, *entry.controls)
                )
    _check_allowed(paths, may)


def _check_allowed(paths: dict[str, None], may: May) -> None:
    if outside := [path for path in paths if not may(path)]:
        raise ConfigError("{some}: outside the folders of this page; start it with --root FOLDER", some=some(outside))


# ---- from the trainer's images


class _Places:
    """The sources of images, each with a short, unique name for the page."""

    def __init__(self, collection: ImageCollection, survey: Survey) -> None:
        self.collection, self.survey = collection, survey
        self.by_source: dict[tuple[int, str], ImageFolder] = {}
        subsets = [(i, s) for i, dataset in enumerate(survey.images.datasets) for s in dataset.subsets]
        self.shared = Counter(
            source_of_subset(subset) for subset in {id(subset): subset for _, subset in subsets}.values()
        )
        self.by_subset: dict[int, ImageFolder] = {}  # by id of the subset, which may be trained at several sizes
        self.opened = {place.path: place for place in collection.places}
        for position, subset in subsets:
            self._make(position, subset)

    def of(self, image: Image) -> ImageFolder:
        return self.by_source[image.dataset, source_of_subset(image.subset)]

    def _make(self, position: int, subset: SubsetConfig) -> None:
        path = source_of_subset(subset)
        plain_path = os.fspath(Path(path))  # "C:/cats/" is the opened folder "C:\\cats"
        if plain_path in self.opened:
            self.by_source[position, path] = self.opened[plain_path]
            return
        if id(subset) in self.by_subset:
            self.by_source[position, path] = self.by_subset[id(subset)]
            return
        name = path
        if subset.is_reg:  # <folder>/<repeats>_<words>
            name = "/".join(Path(path).parts[-2:])
        elif subset.metadata_file:
            name = Path(path).name or path  # the root of a drive has no name
        if self.shared[path] > 1:
            name += f" · {' × '.join(map(str, self.survey.images.datasets[position].resolution or ()))}"
        if any(place.folder == name for place in self.collection.places):
            name = f"{path} (data set {position + 1})"
        template = CAPTION_ELSEWHERE if subset.metadata_file else ELSEWHERE
        words = Message(template, file=Path(path).name, folder=path)
        place = ImageFolder(
            name,
            subset.num_repeats,
            subset.class_tokens or "",
            0,
            path=os.fspath(Path(subset.image_dir)) if subset.image_dir else "",
            role="reg" if subset.is_reg else "",
            fixed=words,
        )
        if not subset.num_repeats:
            place.unused = Message("it has 0 repeats")
        self.by_source[position, path] = self.by_subset[id(subset)] = place
        self.collection.places.append(place)


def source_of_subset(subset: SubsetConfig) -> str:
    return subset.metadata_file or subset.image_dir or ""


def _add_images(collection: ImageCollection, survey: Survey, report: Report | None) -> None:
    """Add the trainer's images to a collection, except those that it already has."""
    places = _Places(collection, survey)
    added = _new_pictures(collection, survey, places)
    existing = [picture for picture in added if picture.modified]  # of the others only cached latents may exist
    survey_sizes = [picture.size for picture in existing]
    scanning.examine_pictures(collection, existing, report)
    for picture, size in zip(existing, survey_sizes, strict=True):
        # A size in a metadata file takes precedence over the file's own.
        picture.size = picture.size if picture.broken or not min(size) else size
        if picture.fit is None and not picture.broken and not picture.unused:
            picture.unused = Message("the training leaves it out")
    image_counts = Counter(picture.folder for picture in added)
    for place in collection.places:
        place.images += image_counts[place.folder]
    collection.places = [place for place in collection.places if place.images]
    collection.hold([*collection.pictures, *added])


def _new_pictures(collection: ImageCollection, survey: Survey, places: _Places) -> list[Picture]:
    """Return the survey's images that the collection does not have, and mark those of it that are held out."""
    opened_pictures = {picture.path: picture for picture in collection.pictures}
    added: list[Picture] = []
    marks: set[tuple[str, int]] = set()  # an image is in the survey once for each size
    for image in survey.images.items:
        mark = image.path, survey.images.datasets[image.dataset].table
        if image.path not in opened_pictures and mark not in marks:
            added.append(_picture_of_image(survey, places.of(image), image, "reg" if image.is_reg else ""))
        marks.add(mark)
    for image in survey.images.validation.items if survey.images.validation else ():
        mark = image.path, survey.images.datasets[image.dataset].table
        if mark in marks:
            continue  # in both parts, as in a state of an earlier version: it counts as one for training
        if image.path in opened_pictures:
            opened_pictures[image.path].role, opened_pictures[image.path].repeats = "held", 1
        else:
            added.append(_picture_of_image(survey, places.of(image), image, "held"))
        marks.add(mark)
    for image in survey.copies:
        added.append(_picture_of_image(survey, places.of(image), image, "reg" if image.is_reg else ""))
        added[-1].unused = HELD_OUT
    return added + _unused_pictures(survey, places, {*opened_pictures, *(picture.path for picture in added)})


def _picture_of_image(survey: Survey, place: ImageFolder, image: Image, role: str) -> Picture:
    has_metadata = bool(image.subset.metadata_file)
    picture = _unscanned_picture(survey, place, image.path, image.subset)
    picture.repeats, picture.size, picture.fit, picture.role = image.repeats, image.size, image.fit, role
    if has_metadata:
        picture.caption = image.caption
    elif image.caption_file:
        picture.caption_file = image.caption_file
    return picture


def _unscanned_picture(survey: Survey, place: ImageFolder, path: str, subset: SubsetConfig) -> Picture:
    """Return an image with what its file and its source say, not yet scanned."""
    folder, name = os.path.split(path)
    file = survey.files(folder).images.get(name)
    inner = name
    if subset.metadata_file and subset.image_dir:
        with contextlib.suppress(ValueError):  # on Windows it may be on another drive
            inner = os.path.relpath(path, subset.image_dir)
    start = f"{place.folder}/" if place.folder else ""
    shown = start + inner.replace(os.sep, "/")
    words = "" if subset.metadata_file else os.path.splitext(path)[0] + subset.caption_extension
    picture = Picture(path, shown, place.folder, file.num_bytes if file else 0, file.modified if file else 0, words)
    picture.fixed, picture.repeats, picture.role = place.fixed, place.repeats, place.role
    picture.unused = place.unused
    return picture


def _unused_pictures(survey: Survey, places: _Places, listed_paths: set[str]) -> list[Picture]:
    """Return images in the trainer's sources that are not used: surplus, damaged, or not in the metadata file."""
    surplus, pictures = set(survey.unused), []
    for position, dataset in enumerate(survey.images.datasets):
        for subset in dataset.subsets:
            place = places.by_source[position, source_of_subset(subset)]
            if not subset.image_dir or place.path in places.opened:
                continue
            listing: Listing = survey.files(subset.image_dir)
            for path in (listing.path(name) for name in listing.images if listing.path(name) not in listed_paths):
                picture = _unscanned_picture(survey, place, path, subset)
                if path in surplus:
                    picture.unused = LEFT_OVER
                elif subset.metadata_file:
                    picture.unused = Message("{file} does not list it", file=Path(subset.metadata_file).name)
                pictures.append(picture)
            listed_paths |= {picture.path for picture in pictures}
    return pictures
