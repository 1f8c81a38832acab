"""Find the images that a config names: files, sizes, words, buckets. Nothing is decoded, and no torch is needed."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from library.config import dataset as datasets
from library.config.schema import ConfigError
from library.data import captions, folders, metadata
from library.data.buckets import Buckets, Size
from library.data.folders import Listing, number, some
from library.data.images import Image, ImageSet, balance, bucket_rules, split
from library.data.pixels import ALWAYS, header_size
from library.data.threads import Report, spread

STANDS_IN = (1024, 1024)  # for a resolution that is not set
MOST = 20  # of one kind are listed; the rest is counted


@dataclass(slots=True)
class Survey:
    """What a look at the data found: images, what stops the training, and what the user should know."""

    images: ImageSet
    report: Report | None = None
    keep: bool = True  # whether a folder's metadata_cache.json may be written
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    other_captions: list[str] = field(default_factory=list)  # folders whose captions have another ending
    unused: list[str] = field(default_factory=list)
    unread: dict[str, int] = field(
        default_factory=dict
    )  # caption file, or image -> lines of its caption that nothing reads
    listings: dict[str, Listing] = field(default_factory=dict)

    def files(self, folder: str | Path) -> Listing:
        """The files of a folder, looked up once; an empty list when there is no such folder."""
        key = os.fspath(folder)
        if key not in self.listings:
            exists = os.path.isdir(folder)
            self.listings[key] = folders.listing(key) if exists else Listing(key)
        return self.listings[key]


class FoundImage(NamedTuple):
    """An image before its size, caption and bucket are known for good."""

    path: str
    size: Size | None
    caption: str | None  # None: read it from the caption file, or fall back on the class tokens
    caption_file: str


def scan(config: Any, report: Report | None = None) -> ImageSet:
    """Find the images that a config names, with captions, sizes and buckets. The same folders give the same Images.

    Raises ConfigError with every problem, one per line.
    """
    found = survey(config, report)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return found.images


def survey(config: Any, report: Report | None = None, keep: bool = True) -> Survey:
    """Look at all data that a config names, and collect problems instead of stopping at the first.

    With `keep` false nothing is written, whatever cache_info says.
    """
    result = Survey(ImageSet([], ()), report, keep)
    made, result.problems = datasets.drafted(config)
    every = tuple(
        _with_folders(result, dataset) for dataset in made if dataset.subsets or not config.data.dataset_config
    )
    train, validation = ImageSet([], every), ImageSet([], every)
    for position, dataset in enumerate(every):
        if dataset.resolution is None and not any("resolution" in problem for problem in result.problems):
            result.problems.append("resolution is not set: 1024 is usual")
        learned, held_back = _images_of(result, position, _sized(dataset), config.steps.seed or 0)
        train.items += learned
        validation.items += held_back
    if not train.items and not result.problems:
        result.problems.append("there are no images to train on")
    train.validation = validation if validation.items else None
    train.warnings, train.unused = (*result.other_captions, *result.warnings), tuple(result.unused)
    result.images = train
    return result


def _sized(dataset: Any) -> Any:
    """A data set whose images can be sorted, to look for other mistakes where its sizes are wrong."""
    dataset = dataset if dataset.resolution else replace(dataset, resolution=STANDS_IN, enable_bucket=False)
    return replace(dataset, enable_bucket=False) if any(bucket_rules(dataset).problems()) else dataset


# ---- one data set


def _with_folders(result: Survey, dataset: Any) -> Any:
    """Without a dataset file, each folder named <repeats>_<words> is a subset, or else the folder that is given."""
    if dataset.subsets:
        return dataset
    if not dataset.train_data_dir:
        result.problems.append("train_data_dir is not set: choose the folder of your images")
    subsets = []
    # Regularisation images are repeated until they are as many as the others, so each counts once to begin with.
    for option, repeats in (("train_data_dir", dataset.template.num_repeats), ("reg_data_dir", 1)):
        if not (parent := getattr(dataset, option)):
            continue
        if problems := list(folders.problems_of_parent(option, parent)):
            result.problems += problems
            continue
        result.warnings += folders.warnings_of_parent(option, Path(parent), repeats)
        if option == "train_data_dir" and repeats > 1 and not folders.is_flat(Path(parent)):
            result.warnings.append(
                "dataset_repeats has no effect: the folders of images say their repeats in their names"
            )
        subsets += [
            replace(
                dataset.template,
                image_dir=os.fspath(one.folder),
                num_repeats=one.repeats,
                class_tokens=one.words or None,
                is_reg=option == "reg_data_dir",
            )
            for one in folders.trained(Path(parent), repeats)
        ]
    return replace(dataset, subsets=tuple(subsets))


def _images_of(result: Survey, position: int, dataset: Any, seed: int) -> tuple[list[Image], list[Image]]:
    """The images of one data set: those to learn from, and those used for validation."""
    rules = bucket_rules(dataset)
    learned: list[Image] = []
    regular: list[Image] = []
    validation: list[Image] = []
    for subset in dataset.subsets:
        if subset.num_repeats < 1:
            result.warnings.append(f"{subset.metadata_file or subset.image_dir} has 0 repeats and is not used")
            continue
        made = [
            image
            for one, size, words in _sized_and_read(result, subset, _find(result, subset))
            if (image := _image(result, rules, (position, subset), one._replace(size=size, caption=words)))
        ]
        if subset.is_reg:
            regular += made
            continue
        kept, held_back = split(made, dataset.validation_split, dataset.validation_seed, seed)
        learned += kept
        validation += held_back
    as_it_is = {id(subset): _plain(subset) for subset in dataset.subsets}
    # Where shares do not come out even, an image is on both sides, as in sd-scripts; what is learned stays as it is.
    validation = [replace(image, repeats=1, subset=as_it_is[id(image.subset)]) for image in validation]
    used = balance(regular, sum(image.repeats for image in learned))
    if unused := [image.path for image in regular[len(used) :]]:
        result.unused += unused
        result.warnings.append(f"{number(len(unused), 'regularisation image')} not used: there are more than needed")
    return learned + used, validation


def _plain(subset: Any) -> Any:
    """How images are shown that are held back: always the same, neither varied nor without their captions."""
    return replace(
        subset,
        flip_aug=False,
        color_aug=False,
        random_crop=False,
        face_crop_aug_range=None,
        caption_dropout_rate=0.0,
        caption_dropout_every_n_epochs=0,
        caption_tag_dropout_rate=0.0,
        token_warmup_step=0.0,
    )


# ---- one subset: files, then sizes and words, then buckets


def _find(result: Survey, subset: Any) -> list[FoundImage]:
    if subset.metadata_file:
        return _from_metadata(result, subset)
    folder = Path(subset.image_dir)
    here = result.files(folder)
    if not folder.is_dir():
        result.problems.append(f"image folder {folder} does not exist")
    elif not here.images:
        result.problems.append(_why_empty(result, folder, here))
    deeper = [name for name in here.folders if result.files(folder / name).images]
    if deeper and here.images:
        result.warnings.append(f"images in {some(deeper)} inside {folder} are not used: sub-folders are not read")
    if here.undecodable:
        result.warnings.append(f"{folder}: {some(here.undecodable)} cannot be decoded here and are not used")
    files = [_caption_file(here, name, subset.caption_extension) for name in here.images]
    _warn_of_other_captions(result, subset, here, files)
    return [
        FoundImage(here.path(name), here.known_size(name), None, file)
        for name, file in zip(here.images, files, strict=True)
    ]


def _why_empty(result: Survey, folder: Path, here: Listing) -> str:
    if here.undecodable:
        return f"image folder {folder}: {some(here.undecodable)} cannot be decoded here; convert them to PNG or WebP"
    deeper = [name for name in here.folders if result.files(folder / name).images]
    if deeper:
        return f"image folder {folder} holds no images, but its folder {folder / deeper[0]} does; name that one"
    return f"image folder {folder} holds no images (png, jpg, webp, bmp)"


def _caption_file(here: Listing, name: str, extension: str) -> str:
    """The caption file of an image, or "": of the same name, or of the name without the face that it may end in."""
    stem = os.path.splitext(name)[0]
    parts = stem.split("_")
    names = [stem + extension] + (["_".join(parts[:-4]) + extension] if len(parts) >= 5 else [])
    return next((here.path(one) for one in names if one in here.names), "")


def _warn_of_other_captions(result: Survey, subset: Any, here: Listing, files: list[str]) -> None:
    missing = files.count("")
    if not missing:
        return
    fallback = f"trained with '{subset.class_tokens}'" if subset.class_tokens else "trained without a caption"
    stems = {os.path.splitext(name)[0] for name in here.images}
    others = Counter(os.path.splitext(name)[1] for name in here.names if os.path.splitext(name)[0] in stems)
    other = next((e for e in (".txt", ".caption", ".TXT") if e != subset.caption_extension and others[e]), None)
    if other and missing == len(files):
        result.other_captions.append(
            f"{here.folder}: {number(others[other], f'{other} file')} not used, since caption_extension is "
            f"'{subset.caption_extension}'; set caption_extension = \"{other}\" to use them; "
            f"now every image is {fallback}"
        )
    elif missing < len(files) or not subset.class_tokens:
        bare = some([name for name, file in zip(here.images, files, strict=True) if not file])
        result.warnings.append(
            f"{here.folder}: {number(missing, 'image')} without a {subset.caption_extension} file, {fallback}: {bare}"
        )


def _from_metadata(result: Survey, subset: Any) -> list[FoundImage]:
    try:
        entries = metadata.read(subset.metadata_file, subset.image_dir)
    except ConfigError as e:
        result.problems += str(e).splitlines()
        return []
    found, absent = [], []
    for entry in entries:
        folder, name = os.path.split(entry.path)
        here = result.files(folder)
        size = entry.size or here.known_size(name)
        if name not in here.images and os.path.splitext(name)[0] not in here.sizes:
            absent.append(entry.path)
            continue
        words = captions.with_tags(entry.caption, entry.tags, subset)
        _count_unread(result, subset, entry.path, words)
        found.append(FoundImage(entry.path, size, words, ""))
    if absent:
        result.problems.append(f"{subset.metadata_file} lists images that are not there: {some(absent)}")
    elif not found:
        result.problems.append(f"{subset.metadata_file} lists no images")
    return sorted(found, key=lambda one: one.path)


def _sized_and_read(result: Survey, subset: Any, found: list[FoundImage]) -> list[tuple[FoundImage, Size, str]]:
    """Look into image headers and caption files where that is still needed."""
    known = _Remembered(result, subset)
    phase = "reading image sizes" if any(one.size is None for one in found) else "reading captions"
    facts = spread(partial(_facts, result, subset, known), found, result.report, phase)
    good, broken, bad_words = [], [], []
    for one, (size, words) in zip(found, facts, strict=True):
        if isinstance(words, Exception):
            bad_words.append(f"{one.caption_file} cannot be read ({words}): save it as UTF-8")
        elif min(size) < 1:
            broken.append(one.path)
        else:
            good.append((one, size, words))
    result.problems += capped(bad_words)
    if broken:
        result.problems.append(f"{number(len(broken), 'file')} cannot be read as images: {some(broken, MOST)}")
    if empty := [one.caption_file for one, _, words in good if one.caption_file and not words]:
        result.warnings.append(f"{number(len(empty), 'caption file')} without words: {some(empty)}")
    if subset.cache_info and result.keep and good and not subset.metadata_file and not broken:
        about = {one.path: (words, size, result.unread.get(one.caption_file, 0)) for one, size, words in good}
        metadata.write_cache(Path(subset.image_dir), about)
    return good


class _Remembered:
    """What metadata_cache.json says of images and captions that have not changed since it was written."""

    def __init__(self, result: Survey, subset: Any):
        self.about: dict[str, Any] = {}
        self.modified = 0
        if subset.cache_info and not subset.metadata_file:
            self.about = metadata.read_cache(Path(subset.image_dir))
        if self.about:
            self.modified = (Path(subset.image_dir) / metadata.CACHE_NAME).stat().st_mtime_ns

    def size(self, path: str, changed: int) -> Size | None:
        return metadata.cached_size(self.about.get(path)) if changed <= self.modified else None

    def unread(self, path: str) -> int:
        """Lines of the caption file that were left out when it was read."""
        lines = self.about.get(path, {}).get("unread_lines", 0)
        return lines if isinstance(lines, int) else 0

    def caption(self, path: str, file: str) -> str | None:
        if path not in self.about or (file and os.stat(file).st_mtime_ns > self.modified):
            return None
        words = self.about[path].get("caption")
        return words if file and isinstance(words, str) else None


def _facts(result: Survey, subset: Any, known: _Remembered, one: FoundImage) -> tuple[Size, str | Exception]:
    folder, name = os.path.split(one.path)
    file = result.files(folder).images.get(name)
    size = one.size or (file and (known.size(one.path, file.changed)))
    if size is None:
        size = header_size(one.path, file.modified, file.num_bytes) if file else (0, 0)
    if one.caption is not None:
        return size, one.caption
    if (words := known.caption(one.path, one.caption_file)) is not None:
        _count_unread(result, subset, one.caption_file, words, known.unread(one.path))
        return size, words
    if not one.caption_file:
        return size, subset.class_tokens or ""
    try:
        with open(one.caption_file, "rb") as f:
            text = f.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        return size, e
    if subset.enable_wildcard:
        return size, captions.lines(text)
    _count_unread(result, subset, one.caption_file, text)
    return size, captions.first_line(text)


def _count_unread(result: Survey, subset: Any, name: str, text: str, others: int = 0) -> None:
    """Remember how many lines of a caption are not used, besides others that are known of."""
    more = 0 if subset.enable_wildcard else captions.lines(text).count("\n") + others
    if more:
        result.unread[name] = more


def _image(result: Survey, rules: Buckets, where: tuple[int, Any], one: FoundImage) -> Image | None:
    position, subset = where
    size, words = one.size or (0, 0), one.caption or ""
    fit = rules.fit(size)
    if fit is None:
        result.problems.append(
            f"{one.path} is {size[0]}x{size[1]}, too thin for bucket_reso_steps = {rules.step}: remove or enlarge it"
        )
        return None
    image = Image(one.path, size, words, subset.num_repeats, subset, position, fit, one.caption_file)
    if subset.conditioning_data_dir:
        image.mask_file = _mask_file(result, subset, image)
    return image


def _mask_file(result: Survey, subset: Any, image: Image) -> str:
    """The mask of an image: the file of the same name, up to its suffix, in conditioning_data_dir."""
    here = result.files(subset.conditioning_data_dir)
    stem = os.path.splitext(os.path.basename(image.path))[0]
    name = next((stem + suffix for suffix in ALWAYS if stem + suffix in here.images), None)
    if name is None:
        result.problems.append(f"{image.path} has no mask: there is no {stem}.png in {subset.conditioning_data_dir}")
        return ""
    file = here.images[name]
    width, height = header_size(here.path(name), file.modified, file.num_bytes)
    if (width, height) != image.size:
        wanted = f"{image.size[0]}x{image.size[1]}"
        result.problems.append(f"the mask {here.path(name)} is {width}x{height}, but its image is {wanted}")
    return here.path(name)


def capped(problems: list[str]) -> Iterator[str]:
    """At most so many problems of one kind, and how many there are besides."""
    yield from problems[:MOST]
    if len(problems) > MOST:
        yield f"and {len(problems) - MOST} more like these"
