"""Scan a folder of images: its files, whether they can be read, and which ones a training would not use."""

import os
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path

from library.config.problems import ConfigError, Message, MessageLike, Report, counted
from library.config.run_config import RunConfig
from library.curation.collection import ImageCollection, ImageFolder, May, Picture
from library.data import folder_problems, folders
from library.data.buckets import Buckets, Size
from library.data.caption_files import about_odd_files, odd_files, read_caption
from library.data.folders import Listing
from library.data.orientation import orientation, turned_size
from library.data.pixels import check_file, header_size
from library.data.preflight import MAX_WHOLE_IMAGES
from library.data.threads import spread

OTHER_ENDINGS = (".txt", ".caption")


def scan_collection(
    root: Path, config: RunConfig, report: Report | None = None, may: May = lambda path: True
) -> ImageCollection:
    """Scan a folder: one that holds folders named <repeats>_<words>, or one with images.

    Links are followed where `may` allows it. Raises ConfigError when the folder cannot be listed. Results for unchanged
    files are cached.
    """
    collection = ImageCollection(root, config, may=may)
    try:
        _scan_folders(collection)
    except OSError as error:
        raise ConfigError("{folder} cannot be listed: {why}", folder=root, why=error.strerror or error) from None
    collection.notes += sharing(collection)
    examine_pictures(collection, collection.pictures, report)
    rules = collection.rules
    for picture in collection.pictures:
        fitted(picture, rules)
    collection.hold(collection.pictures)
    return collection


def examine_pictures(collection: ImageCollection, pictures: list[Picture], report: Report | None = None) -> None:
    """Read the files of images: size, whether they can be decoded, and their captions."""
    # Checking whole files finds wrong bits in PNG and WebP, but takes too long for very many images.
    reads_whole = len(pictures) <= MAX_WHOLE_IMAGES
    facts = spread(partial(_picture_facts, collection, reads_whole), pictures, report, Message("scanning images"))
    for picture, (size, broken, turn) in zip(pictures, facts, strict=True):
        picture.size = turned_size(size, turn) if collection.config.data.exif_rotation else size
        picture.broken, picture.turned = broken, turn != 1
    spread(partial(reread, collection), pictures, report, Message("reading captions"))


def fitted(picture: Picture, rules: Buckets) -> None:
    """Set an image's bucket."""
    picture.fit = rules.fit(picture.size) if min(picture.size) > 0 else None
    if picture.fit is None and not picture.broken and not picture.unused:
        picture.unused = Message("too thin for any bucket")


def reread(collection: ImageCollection, picture: Picture) -> None:
    """Read an image's caption file again."""
    if not picture.caption_file:
        return
    picture.caption, picture.foreign = None, False
    if not _may_read(collection, picture.caption_file):
        picture.foreign, picture.caption = True, ""
        return
    try:
        picture.caption = read_caption(picture.caption_file)
    except FileNotFoundError:
        return
    except (OSError, ConfigError):
        picture.foreign, picture.caption = True, ""
    except UnicodeDecodeError as error:
        picture.foreign, picture.caption = True, bytes(error.object).decode("utf-8", "replace")


def _scan_folders(collection: ImageCollection) -> None:
    root_listing = folders.list_folder(collection.root)
    inner = [(name, listing) for name in root_listing.folders if (listing := _list_inner(collection, name)) is not None]
    has_concepts = any(folders.concept(collection.root / name) for name, _ in inner)
    flat, root_concept = folders.has_flat_images(collection.root), folders.concept(collection.root)
    why = "" if flat or not has_concepts else "images directly in the folder are not used beside <repeats>_<words>"
    repeats_setting = collection.config.data.dataset_repeats
    repeats, words = (root_concept.repeats, root_concept.words) if root_concept and not flat else (repeats_setting, "")
    _add_folder(collection, root_listing, ImageFolder("", repeats, words, 0, why))
    for name, listing in inner:
        concept = folders.concept(collection.root / name)
        reason = "" if concept else "its name does not begin with a number of repeats"
        if concept and not concept.repeats:
            reason = "it has 0 repeats"
        place = ImageFolder(name, concept.repeats if concept else 1, concept.words if concept else "", 0, reason)
        _add_folder(collection, listing, place)
        deeper = [folder for folder in listing.folders if folders.list_folder(collection.root / name / folder).images]
        if deeper:
            collection.notes.append(
                Message(
                    "Images in {folders} inside {name} are not used: only one level of folders is read.",
                    folders=folders.some(deeper),
                    name=name,
                )
            )
    if flat and repeats_setting != 1:
        collection.notes.append(
            Message(
                "Times each image is seen per epoch: {given}. Repeats in the settings says how often.",
                given=repeats_setting,
            )
        )
    elif not flat and root_concept and not has_concepts and root_listing.images:
        collection.notes.append(
            Message("As the image folder of a training, name the folder above: {parent}", parent=collection.root.parent)
        )


def _list_inner(collection: ImageCollection, name: str) -> Listing | None:
    """List a folder in the opened one. None when it may not or cannot be read."""
    if not _may_read(collection, os.path.join(collection.root, name)):
        return None
    try:
        return folders.list_folder(collection.root / name)
    except OSError as error:
        collection.notes.append(Message("{folder} cannot be listed: {why}", folder=name, why=error.strerror or error))
        return None


def _add_folder(collection: ImageCollection, listing: Listing, place: ImageFolder) -> None:
    ending = collection.config.captions.caption_extension
    start = f"{place.folder}/" if place.folder else ""
    uncaptioned: list[str] = []
    for name, file in listing.images.items():
        caption_name = os.path.splitext(name)[0] + ending
        existing_name = listing.find(caption_name)
        uncaptioned += [] if existing_name else [name]
        caption_file = listing.path(existing_name or caption_name)
        picture = Picture(listing.path(name), start + name, place.folder, file.num_bytes, file.modified, caption_file)
        picture.repeats, picture.unused = place.repeats, place.unused
        collection.pictures.append(picture)
    for name in listing.undecodable:
        collection.pictures.append(
            Picture(
                listing.path(name),
                start + name,
                place.folder,
                0,
                0,
                listing.path(os.path.splitext(name)[0] + ending),
                broken="its format is not read here: convert it to PNG or WebP",
            )
        )
    place.path = listing.folder
    place.images = len(listing.images) + len(listing.undecodable)
    if place.images:
        collection.places.append(place)
    stems = {os.path.splitext(name)[0] for name in listing.images}
    parts = (os.path.splitext(name) for name in listing.names)
    endings = Counter(end for stem, end in parts if stem in stems)
    odd_names, is_masked = odd_files(listing, uncaptioned), collection.config.data.masked_loss
    # Captions with another extension than the training reads: one message, instead of one for each kind of odd file.
    for other in OTHER_ENDINGS:
        if other != ending and endings[other] and not endings[ending]:
            odd_names = [name for name in odd_names if not name.endswith(other)]
            count_text = counted(endings[other], f"{other} file")
            where = place.folder or "The folder"
            template = "{where} has {many}, which are not read: set the caption files' extension to {other}."
            collection.notes.append(Message(template, where=where, many=count_text, other=other))
            collection.unread_ending = collection.unread_ending or other
    collection.notes += [
        *about_odd_files(listing, odd_names, ending),
        *folder_problems.about_labels(listing, is_masked),
    ]


def sharing(collection: ImageCollection) -> list[MessageLike]:
    """Return a message that names the images which share a caption file, such as a.png and a.jpg; none without any."""
    shared = Counter(picture.caption_file for picture in collection.pictures)
    shared_names = [os.path.basename(path) for path, count in shared.items() if count > 1]
    if not shared_names:
        return []
    return [Message("Images of one name share a caption file: {names}.", names=folders.some(shared_names))]


def _may_read(collection: ImageCollection, path: str) -> bool:
    return not os.path.islink(path) or collection.may(path)


def _picture_facts(collection: ImageCollection, reads_whole: bool, picture: Picture) -> tuple[Size, str, int]:
    if not _may_read(collection, picture.path):
        return (0, 0), "it is a link that leads out of the folders of this page", 1
    if picture.broken:
        return (0, 0), picture.broken, 1
    return _remembered_facts(picture.path, picture.modified, picture.num_bytes, reads_whole)


@lru_cache(maxsize=1 << 17)
def _remembered_facts(path: str, modified: int, num_bytes: int, reads_whole: bool) -> tuple[Size, str, int]:
    """Return the size as stored, why the image cannot be decoded, and its EXIF orientation. Time and length are cache
    keys."""
    size = header_size(path, modified, num_bytes)
    if min(size) < 1:
        return size, "this cannot be read as an image", 1
    return size, check_file(path, reads_whole), orientation(path)
