"""Find the images that a config names: files, sizes, captions, buckets. No image is decoded, no torch is needed."""

import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from library.config.dataset import DatasetConfig, SubsetConfig, drafted
from library.config.problems import ConfigError, Message, Problem, Report, counted
from library.config.run_config import ControlUse, RunConfig
from library.data import captions, folders, held_out, metadata
from library.data.buckets import Buckets, Size
from library.data.caption_files import about_missing, caption_file, read_caption
from library.data.controls import NUMBERED, controls_of, mask_of, without_images, without_pictures
from library.data.folders import MAX_MESSAGES_PER_KIND, Listing, about_images, capped, some
from library.data.images import Image, ImageSet, balance, bucket_rules
from library.data.pixels import AS_STORED, Decoding, decoding, header_size
from library.data.threads import spread

PLACEHOLDER = (1024, 1024)  # for a resolution that is not set


@dataclass(slots=True)
class Survey:
    """The result of scanning the data: images, problems that stop the training, and warnings."""

    images: ImageSet
    report: Report | None = None
    keep: bool = True  # whether a folder's metadata_cache.json may be written
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    other_captions: list[Problem] = field(default_factory=list)  # folders whose captions have another extension
    unused: list[str] = field(default_factory=list)
    copies: list[Image] = field(default_factory=list)  # of images that are held out for validation
    unread: dict[str, int] = field(default_factory=dict)  # caption file, or image -> unused lines of its caption
    listings: dict[str, Listing] = field(default_factory=dict)
    control_use: ControlUse = ControlUse()
    how: Decoding = AS_STORED
    # folder of reference images -> by the name of their image (with _ where they are numbered): number, file
    control_names: dict[str, dict[str, list[tuple[int, str]]]] = field(default_factory=dict)
    # (conditioning_data_dir, expected place of the mask or control image in it) -> images without one
    unpaired: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    # folder of reference images, or metadata file that should name them -> images without one
    unreferenced: dict[str, list[str]] = field(default_factory=dict)
    takes_masks: bool = False  # whether masks of the loss, or of what is to be painted, have a use
    beside: dict[str, set[str]] = field(default_factory=dict)  # folder of masks or control images -> names in use
    unmasked: list[str] = field(default_factory=list)  # images without a mask of the region to inpaint
    # by id of a subset: its images, with their sizes and captions
    facts: "dict[int, list[tuple[FoundImage, Size, str]]]" = field(default_factory=dict)

    def files(self, folder: str | Path) -> Listing:
        """The files of a folder, listed once; an empty listing when there is no such folder."""
        key = os.fspath(folder)
        if key not in self.listings:
            exists = os.path.isdir(folder)
            self.listings[key] = folders.looked_into(key) if exists else Listing(key)
        return self.listings[key]


class FoundImage(NamedTuple):
    """An image before its size, caption and bucket are determined."""

    path: str
    size: Size | None
    caption: str | None  # None: of the caption file, or else the class tokens
    caption_file: str
    controls: tuple[str, ...] = ()


def scan(config: RunConfig, report: Report | None = None) -> ImageSet:
    """Find the images that a config names, with captions, sizes and buckets. The order is deterministic.

    Raises ConfigError with every problem, one per line.
    """
    survey = survey_data(config, report)
    if survey.problems:
        raise ConfigError(*survey.problems)
    return survey.images


def survey_data(config: RunConfig, report: Report | None = None, keep: bool = True) -> Survey:
    """Scan all data that a config names, and collect problems instead of stopping at the first.

    With `keep` false nothing is written, whatever cache_info says.
    """
    use = config.control_images
    masks = use.inpaints or (config.data.masked_loss and not use.guided)
    result = Survey(ImageSet([], ()), report, keep, control_use=use, takes_masks=masks, how=decoding(config))
    made, result.problems = drafted(config)
    every = _with_subsets(result, [one for one in made if one.subsets or not config.data.dataset_config])
    learned: list[list[Image]] = []
    regular: list[list[Image]] = []
    for position, dataset in enumerate(every):
        if dataset.resolution is None and all(problem.option != "resolution" for problem in result.problems):
            result.problems.append(Problem("resolution", "is not set: 1024 is usual"))
        images = _images_of(result, position, _with_valid_sizes(dataset))
        learned.append([image for image in images if not image.is_reg])
        regular.append([image for image in images if image.is_reg])
    began = held_out.resumed_split(config)
    split = held_out.hold_out(every, learned, regular, config.steps.seed or 0, began)
    result.copies, result.warnings = split.copies, [*result.warnings, *held_out.split_warnings(split, began)]
    train, validation = ImageSet([], every, held_out=split.marks), ImageSet([], every, is_validation=True)
    for dataset, own, held, beside in zip(every, split.learned, split.held_out, split.regular, strict=True):
        train.items += own + _balanced(result, beside, own)
        as_it_is = {id(subset): held_out.plain_options(subset) for subset in dataset.subsets}
        validation.items += (replace(image, repeats=1, subset=as_it_is[id(image.subset)]) for image in held)
    result.problems += [*without_pictures(result), *_learned_as_regular(config, every)]
    if not train.items and not result.problems:
        result.problems.append(_why_none(config, validation))
    result.images = train
    result.problems = [*dict.fromkeys(result.problems)]  # those of images at several sizes are said once
    result.warnings = [*dict.fromkeys([*result.warnings, *without_images(result)])]
    train.validation = validation if validation.items else None
    train.warnings, train.unused = (*result.other_captions, *result.warnings), tuple(result.unused)
    return result


def _why_none(config: RunConfig, validation: ImageSet) -> Problem:
    """Why there is nothing to train on though folders hold images."""
    if not validation.items:
        return about_images("there are no images to train on")
    return Problem("validation_split",
        "holds out every image ({count}), so none is left to train on; write a share below 1, such as 0.1",
        count=counted(len(validation.items), "image"), topic="images",
        fix={} if config.data.dataset_config else {"validation_split": 0.1})  # fmt: skip


def _learned_as_regular(config: RunConfig, every: tuple[DatasetConfig, ...]) -> Iterator[Problem]:
    """Folders whose images are both learned and regularisation images."""
    subsets = [subset for dataset in every for subset in dataset.subsets if subset.image_dir and subset.num_repeats]
    learned = {folders.real_place(subset.image_dir or "") for subset in subsets if not subset.is_reg}
    regular = dict.fromkeys(
        s.image_dir for s in subsets if s.is_reg and folders.real_place(s.image_dir or "") in learned
    )
    if regular:
        yield Problem("is_reg" if config.data.dataset_config else "reg_data_dir",
            ": {folders} cannot be training images and regularisation images at once; name another folder for one of "
            "them, or leave the regularisation images out", folders=some([*regular]), topic="images")  # fmt: skip


def _with_valid_sizes(dataset: DatasetConfig) -> DatasetConfig:
    """A data set with valid bucket sizes, to find other mistakes where its own are invalid."""
    dataset = dataset if dataset.resolution else replace(dataset, resolution=PLACEHOLDER, enable_bucket=False)
    return replace(dataset, enable_bucket=False) if any(bucket_rules(dataset).problems()) else dataset


# ---- one data set


def _with_subsets(result: Survey, datasets: list[DatasetConfig]) -> tuple[DatasetConfig, ...]:
    """Data sets with their folders. Without a dataset file they are of the same folders, at one size each."""
    first = [with_folders(result, dataset) for dataset in datasets[:1]]
    return (*first, *(replace(one, subsets=one.subsets or first[0].subsets) for one in datasets[1:]))


def with_folders(result: Survey, dataset: DatasetConfig) -> DatasetConfig:
    """Without a dataset file, each folder named <repeats>_<words> is a subset, or else the folder itself."""
    if dataset.subsets:
        return dataset
    if not dataset.train_data_dir:
        result.problems.append(Problem("train_data_dir", "is not set: choose the folder of your images"))
    subsets = []
    # `balance` repeats regularisation images until they are as many as the others, so that each has one repeat here.
    for option, repeats in (("train_data_dir", dataset.template.num_repeats), ("reg_data_dir", 1)):
        if not (parent := getattr(dataset, option)):
            continue
        if problems := list(folders.problems_of_parent(option, parent)):
            result.problems += problems
            continue
        result.warnings += folders.warnings_of_parent(option, Path(parent), repeats)
        if option == "train_data_dir" and repeats > 1 and not folders.has_flat_images(Path(parent)):
            result.warnings.append(
                Problem("dataset_repeats", "has no effect: the folders of images say their repeats in their names")
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


def _images_of(result: Survey, position: int, dataset: DatasetConfig) -> list[Image]:
    """The images of one data set."""
    rules = bucket_rules(dataset)
    images: list[Image] = []
    for subset in dataset.subsets:
        if subset.num_repeats < 1:
            unused = subset.metadata_file or subset.image_dir
            result.warnings.append(about_images("{value} has 0 repeats and is not used", value=unused))
            continue
        if id(subset) not in result.facts:  # it is trained at several sizes otherwise
            result.facts[id(subset)] = _read_sizes(result, subset, _find_images(result, subset))
        images += (
            image
            for one, size, words in result.facts[id(subset)]
            if (image := _checked_image(result, rules, (position, subset), one._replace(size=size, caption=words)))
        )
    return images


def _balanced(result: Survey, regular: list[Image], learned: list[Image]) -> list[Image]:
    """The regularisation images that are used beside these images."""
    used = balance(regular, sum(image.repeats for image in learned))
    if unused := [image.path for image in regular[len(used) :]]:
        result.unused += unused
        result.warnings.append(about_images(
            "{count} not used: there are more than needed", count=counted(len(unused), "regularisation image")
            ))  # fmt: skip
    return used


# ---- one subset: files, then sizes and captions, then buckets


def _find_images(result: Survey, subset: SubsetConfig) -> list[FoundImage]:
    if subset.metadata_file:
        return _from_metadata(result, subset)
    folder = Path(subset.image_dir or "")
    here = result.files(folder)
    if not folder.is_dir():
        result.problems.append(about_images("image folder {folder} does not exist", folder=folder))
    elif not here.images:
        result.problems.append(folders.why_empty(folder, here, result.files))
    result.warnings += folders.about_labels(here, result.takes_masks)
    deeper = [name for name in here.folders if result.files(folder / name).images]
    if deeper and here.images:
        result.warnings.append(about_images(
            "images in {deeper} inside {folder} are not used: sub-folders are not read",
            deeper=some(deeper), folder=folder))  # fmt: skip
    if here.undecodable:
        template = "{folder}: {files} are in formats that are not read here, and not used; convert them to PNG or WebP"
        result.warnings.append(about_images(template, folder=folder, files=some(here.undecodable)))
    names = [name for name in here.images if _is_trained(subset, name)]
    if here.images and not names:
        result.problems.append(about_images(
            "image folder {folder}: none of {count} is one to train on with image_suffix = '{suffix}' and "
            "control_suffix = '{other}'; correct these, or rename the images", folder=folder,
            count=counted(len(here.images), "image"), suffix=subset.image_suffix or "",
            other=subset.control_suffix or ""))  # fmt: skip
    files = [caption_file(here, name, subset.caption_extension) for name in names]
    missing = about_missing(subset, here, names, files)
    result.other_captions += [missing.whole_folder] if missing.whole_folder else []
    result.warnings += missing.others
    return [
        FoundImage(here.path(name), here.known_size(name), None, file) for name, file in zip(names, files, strict=True)
    ]


def _is_trained(subset: SubsetConfig, name: str) -> bool:
    """Whether an image of a folder is one to train on, where suffixes tell images and reference images apart."""
    stem, inside = os.path.splitext(name)[0], subset.image_dir or ""
    if not stem.endswith(subset.image_suffix or ""):
        return False
    beside = any(folders.same_place(folder, inside) for folder in subset.control_directories)
    numbered = NUMBERED.fullmatch(stem)
    named = (stem, numbered[1]) if numbered else (stem,)
    return not (subset.control_suffix and beside and any(one.endswith(subset.control_suffix) for one in named))


def _from_metadata(result: Survey, subset: SubsetConfig) -> list[FoundImage]:
    try:
        entries = metadata.read_metadata_file(subset.metadata_file or "", subset.image_dir, subset.caption_separator)
    except ConfigError as e:
        result.problems += capped([problem.replaced(topic="images") for problem in e.problems])
        return []
    found, absent = [], []
    for entry in entries:
        folder, name = os.path.split(entry.path)
        here = result.files(folder)
        if (written := here.find(name)) and written != name:
            name, entry = written, entry._replace(path=here.path(written))
        size = entry.size or here.known_size(name)
        if name not in here.images and (os.path.splitext(name)[0], False) not in here.sizes:
            absent.append(entry.path)
            continue
        words = captions.with_tags(entry.caption, entry.tags, subset)
        _count_unread(result, subset, entry.path, words)
        found.append(FoundImage(entry.path, size, words, "", entry.controls))
    if absent:
        result.problems.append(about_images("{metadata_file} lists images that are not there: {absent}",
            metadata_file=subset.metadata_file, absent=some(absent)))  # fmt: skip
    elif twice := sorted(path for path, times in Counter(one.path for one in found).items() if times > 1):
        result.warnings.append(about_images("{metadata_file} lists {count} more than once, and each is trained as "
            "often: {names}", metadata_file=subset.metadata_file, count=counted(len(twice), "image"),
            names=some(twice)))  # fmt: skip
    elif not found:
        result.problems.append(about_images("{metadata_file} lists no images", metadata_file=subset.metadata_file))
    return sorted(found, key=lambda one: one.path)


def _read_sizes(result: Survey, subset: SubsetConfig, images: list[FoundImage]) -> list[tuple[FoundImage, Size, str]]:
    """Read image headers and caption files that are not known yet."""
    remembers = subset.cache_info and not subset.metadata_file
    known = metadata.RememberedFacts(Path(subset.image_dir or "") if remembers else None)
    phase = Message("reading image sizes" if any(one.size is None for one in images) else "reading captions")
    facts = spread(partial(_image_facts, result, subset, known), images, result.report, phase)
    good, broken, bad_words = [], [], []
    for one, (size, words) in zip(images, facts, strict=True):
        if isinstance(words, Exception):
            template = "{caption_file} cannot be read ({why})"
            if isinstance(words, UnicodeError):
                template = "{caption_file} is not text in UTF-8: save it with that encoding"
            why = words.strerror or words if isinstance(words, OSError) else words
            said = [about_images(template, caption_file=one.caption_file, why=why)]
            named = words.problems if isinstance(words, ConfigError) else said
            bad_words += [problem.replaced(topic="images") for problem in named]
        elif min(size) < 1:
            broken.append(one.path)
        else:
            good.append((one, size, words))
    result.problems += capped(bad_words)
    if broken:
        result.problems.append(about_images("{count} cannot be read as images: {broken}",
            count=counted(len(broken), "file"), broken=some(broken, MAX_MESSAGES_PER_KIND)))  # fmt: skip
    if empty := [one.caption_file for one, _, words in good if one.caption_file and not words]:
        result.warnings.append(
            about_images("{count} without words: {empty}", count=counted(len(empty), "caption file"), empty=some(empty))
        )
    if remembers and result.keep and good and not broken:
        about = {
            one.path: metadata.Remembered(
                result.how.size(one.path, size),
                words,
                os.path.basename(one.caption_file),
                result.unread.get(one.caption_file, 0),
            )
            for one, size, words in good
        }
        metadata.write_cache(Path(subset.image_dir or ""), about)
    return good


def _image_facts(
    result: Survey, subset: SubsetConfig, known: metadata.RememberedFacts, image: FoundImage
) -> tuple[Size, str | Exception]:
    folder, name = os.path.split(image.path)
    file = result.files(folder).images.get(name)
    # What names of caches and files of metadata state may be the size as it is stored, or the upright one.
    is_turned = file is not None and result.how.turns(image.path)
    size = None if is_turned else image.size or (known.size(image.path, file.changed) if file else None)
    if size is None:
        size = header_size(image.path, file.modified, file.num_bytes) if file else (0, 0)
        size = result.how.size(image.path, size)
    if image.caption is not None:
        return size, image.caption
    if (words := known.caption(image.path, image.caption_file, subset.enable_wildcard)) is not None:
        _count_unread(result, subset, image.caption_file, words, known.unread(image.path))
        return size, words
    if not image.caption_file:
        return size, subset.class_tokens or ""
    try:
        text = io.StringIO(read_caption(image.caption_file), newline=None).read()  # all line ends become "\n"
    except (OSError, UnicodeError, ConfigError) as e:
        return size, e
    if subset.enable_wildcard:
        return size, captions.caption_lines(text)
    _count_unread(result, subset, image.caption_file, text)
    return size, captions.first_line(text)


def _count_unread(result: Survey, subset: SubsetConfig, name: str, text: str, others: int = 0) -> None:
    """Count the unused lines of a caption, in addition to `others`."""
    if more := 0 if subset.enable_wildcard else captions.caption_lines(text).count("\n") + others:
        result.unread[name] = more


def _checked_image(result: Survey, rules: Buckets, where: tuple[int, Any], found_image: FoundImage) -> Image | None:
    position, subset = where
    size, words = found_image.size or (0, 0), found_image.caption or ""
    fit = rules.fit(size)
    if fit is None:
        result.problems.append(about_images(
            "{path} is {size}x{size2}, too thin for bucket_reso_steps = {step}: remove or enlarge it",
            path=found_image.path, size=size[0], size2=size[1], step=rules.step))  # fmt: skip
        return None
    # An inpainting model is shown what transparency hides: that is what it learns to paint.
    is_painted = result.control_use.inpaints and subset.alpha_mask
    how = replace(result.how, ground="") if is_painted else result.how
    image = Image(
        found_image.path, size, words, subset.num_repeats, subset, position, fit, found_image.caption_file, how=how
    )
    image.mask_file = mask_of(result, subset, image)
    image.controls = controls_of(result, subset, image, found_image.controls, result.control_use)
    return image
