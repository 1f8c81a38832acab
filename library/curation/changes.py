"""Changes of the images of a collection. All of them can be undone (trash.py)."""

import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

from library.config.places import same_place
from library.config.problems import ConfigError, Message, Report, counted
from library.curation import similar_images, trash
from library.curation.collection import ImageCollection, Picture
from library.curation.scanning import reread
from library.curation.tags import Edit
from library.data import folders
from library.data.folders import UPRIGHT
from library.data.pixels import extensions
from library.data.threads import spread

MAX_REPEATS = 10_000
# Windows forbids these in names; images may move there later.
UNFIT = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
CAPTION_SUFFIXES = (".txt", ".caption")
# Names of caches of any model after that of the image: latents with their size or without, and text outputs.
CACHE = (
    rf"(\.npz|({UPRIGHT})?_\d{{2,}}x\d{{2,}}_\w+\.(npz|safetensors)|(_sd)?_te_outputs(_v\d+)?\.npz"
    r"|_\w+_te(_v\d+)?\.(npz|safetensors))"
)


def change_caption(collection: ImageCollection, name: str, text: str, expected: str | None) -> Picture:
    """Write the caption of one image. `expected` is the text that the caller last read (None: no file).

    Raises ConfigError when the file differs, as another program has written it meanwhile.
    """
    picture = collection.find(name)
    changeable(collection, [picture])
    with trash.lock(collection.root.resolve()):
        reread(collection, picture)
        if picture.caption != expected:
            raise ConfigError("{name}: its caption has been changed elsewhere; the new one is shown", name=name)
        if picture.foreign:
            raise ConfigError("{name}: its caption is not text in UTF-8: save it with that encoding first", name=name)
        if not (text == "" and picture.caption is None):  # do not create an empty file
            with trash.Change(collection.root, f"Caption of {name}") as change:
                change.write({Path(picture.caption_file): text})
            reread(collection, picture)
    return picture


def restore_captions(collection: ImageCollection, change: str, names: Sequence[str]) -> tuple[int, int]:
    """Restore the captions of images from before a change. Returns how many were restored, and how many skipped.

    Captions that were altered since are skipped. The restoration is a change of its own.
    """
    changeable(collection)
    with trash.lock(collection.root.resolve()):
        files = (Path(collection.find(name).caption_file) for name in names)
        caption_files = {file.parent.resolve() / file.name for file in files}
        altered = [
            text_change
            for text_change in trash.changed_texts(collection.root, change)
            if text_change.path in caption_files and text_change.now != text_change.before
        ]
        restorable = [text_change for text_change in altered if text_change.now == text_change.after]
        with trash.Change(collection.root, f"Put back {counted(len(restorable), 'caption')}") as restoration:
            restoration.write(
                {text_change.path: text_change.before for text_change in restorable if text_change.before is not None}
            )
            restoration.remove([text_change.path for text_change in restorable if text_change.before is None])
        for name in names:
            reread(collection, collection.find(name))
    return len(restorable), len(altered) - len(restorable)


def changeable(collection: ImageCollection, pictures: Sequence[Picture] = ()) -> None:
    """Raise ConfigError with the fix when a collection, or one of these images, is read-only."""
    why = collection.fixed or next((p.fixed for p in pictures if p.fixed), "")
    if why:
        raise ConfigError(why)


def preview(pictures: Sequence[Picture], edit: Edit) -> list[tuple[Picture, str]]:
    """Return the captions that an edit would change, with the new text. Only adding creates missing captions."""
    edits, caption_files = [], set()
    for picture in pictures:
        if (
            picture.fixed
            or picture.foreign
            or (picture.caption is None and edit.action != "add")
            or picture.caption_file in caption_files
        ):
            continue
        caption_files.add(picture.caption_file)
        after = edit.apply(picture.caption or "")
        if after != (picture.caption or ""):
            edits.append((picture, after))
    return edits


def edit_tags(
    collection: ImageCollection, pictures: Sequence[Picture], edit: Edit, report: Report | None = None
) -> int:
    """Edit the tags of many captions at once. Returns how many captions changed."""
    changeable(collection)
    with trash.lock(collection.root.resolve()):
        # Other programs may have written captions since the scan.
        spread(partial(reread, collection), list(pictures), report, Message("reading captions"))
        changed = preview(pictures, edit)
        with trash.Change(collection.root, _change_title(edit, len(changed))) as change:
            change.write({Path(p.caption_file): after for p, after in changed}, report)
        for picture in pictures:
            reread(collection, picture)
    return len(changed)


def remove_images(collection: ImageCollection, names: Sequence[str]) -> int:
    """Move images, with their captions and caches, into the trash. Returns how many images."""
    pictures = [collection.find(name) for name in dict.fromkeys(names)]
    changeable(collection, pictures)
    remaining = [p for p in collection.pictures if p.name not in {picture.name for picture in pictures}]
    remaining_stems = {os.path.splitext(p.path)[0] for p in remaining}
    unshared = [p for p in pictures if os.path.splitext(p.path)[0] not in remaining_stems]
    names_in = {folder: sorted(os.listdir(folder)) for folder in {Path(p.path).parent for p in unshared}}
    # Images of one stem share their caption and caches, which stay as long as one of the images does.
    files = [Path(p.path) for p in pictures]
    # Compared by file, not by stem: a caption's name may be in decomposed Unicode, unlike its image's.
    shared_captions = {p.caption_file for p in remaining}
    files += [
        Path(p.caption_file)
        for p in unshared
        if p.caption_file not in shared_captions and os.path.isfile(p.caption_file)
    ]
    files += [f for p in unshared for f in companions(Path(p.path), names_in[Path(p.path).parent])]
    subject = pictures[0].name if len(pictures) == 1 else counted(len(pictures), "image")
    with trash.lock(collection.root.resolve()), trash.Change(collection.root, f"Removed {subject}") as change:
        change.remove(dict.fromkeys(files))
    collection.hold(remaining)
    return len(pictures)


def companions(image: Path, names: Sequence[str]) -> list[Path]:
    """Return the captions and caches beside an image. `names`: all names in its folder, sorted."""
    stem, image_endings = image.stem, extensions()
    cache = re.compile(re.escape(stem) + CACHE)
    # Names are sorted, so those that begin with the stem are neighbours; a folder may have 100,000 files.
    near = list(takewhile(lambda name: name.startswith(stem), names[bisect_left(names, stem) :]))
    pairs = [os.path.splitext(name) for name in near]
    longer_stems = tuple(
        f"{other}_" for other, ending in pairs if ending.lower() in image_endings and other.startswith(f"{stem}_")
    )
    # cat_2_flux_te.npz looks like a cache of cat.png, but belongs to cat_2.png if that exists.
    caches = [name for name in near if cache.fullmatch(name) and not name.startswith(longer_stems)]
    captions = [name for name in near if name in (stem + ending for ending in CAPTION_SUFFIXES)]
    return [image.with_name(name) for name in sorted({*caches, *captions})]


def find_similar_groups(collection: ImageCollection, report: Report | None = None) -> None:
    """Find identical and similar images, and store their groups in the collection."""
    # A training may use the same file in several sources; here it counts once.
    pictures = list({p.path: p for p in collection.pictures if not p.broken}.values())
    position_by_path = {p.path: i for i, p in enumerate(pictures)}
    identical = [
        [position_by_path[path] for path in group]
        for group in similar_images.same_bytes([(p.path, p.num_bytes) for p in pictures], report)
    ]
    content = {i: number for number, group in enumerate(identical) for i in group}
    groups = similar_images.near(
        spread(similar_images.looks, [p.path for p in pictures], report, Message("comparing images"))
    )
    # Images too plain for a perceptual hash are in no such group, but may be identical.
    groups += [group for group in identical if not any(i in members for members in groups for i in group)]
    collection.doubles, collection.double_groups, collection.compared = {}, [], True
    for group in groups:
        collection.doubles |= {pictures[i].name: len(collection.double_groups) for i in group}
        # Images without a copy get a negative number of their own.
        is_same = len({content.get(i, -1 - i) for i in group}) == 1
        collection.double_groups.append({"how": "the same" if is_same else "alike", "count": len(group)})


def folder_name(repeats: int, words: str) -> str:
    """Return the name of a folder of images: <repeats>_<words>. Raises ConfigError for an invalid name."""
    words = words.strip()
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError("repeats is {repeats}: use 1 to {most}", repeats=repeats, most=MAX_REPEATS)
    if not words or UNFIT.search(words) or words.endswith((".", " ")) or not words.isprintable() or len(words) > 120:
        raise ConfigError("Words: write what the folder shows, such as 'zorb cat'; not / \\ : * ? \" < > |")
    return f"{repeats}_{words}"


def rename(collection: ImageCollection, folder: str, repeats: int, words: str) -> str:
    """Rename a folder of the collection to other repeats and words. Returns its new name."""
    changeable(collection)
    if folder not in {place.folder for place in collection.places if not place.fixed} or not folder:
        raise ConfigError(
            "{folder} is not a folder inside {root}", folder=folder or "the opened folder", root=collection.root
        )
    name = folder_name(repeats, words)
    if name == folder:
        return name
    with trash.lock(collection.root.resolve()), trash.Change(collection.root, f"Renamed {folder} to {name}") as change:
        change.move([(collection.root / folder, collection.root / name)])
    return name


def gather(collection: ImageCollection, repeats: int, words: str) -> str:
    """Move the images directly in the opened folder, with their captions, into <repeats>_<words>. Returns that name."""
    changeable(collection)
    name = folder_name(repeats, words)
    listing = folders.list_folder(collection.root)
    images = [collection.root / image for image in listing.images]
    if not images:
        raise ConfigError("there are no images directly in {root}, so there is nothing to move", root=collection.root)
    names = sorted(os.listdir(collection.root))
    files = dict.fromkeys([*images, *(f for image in images for f in companions(image, names))])
    moved = counted(len(images), "image")
    with trash.lock(collection.root.resolve()), trash.Change(collection.root, f"Moved {moved} into {name}") as change:
        change.move([(file, collection.root / name / file.name) for file in files])
    return name


def bring(collection: ImageCollection, source: Path, repeats: int, words: str, report: Report | None = None) -> str:
    """Copy the images of another folder, with their captions, into <repeats>_<words> of this one. Returns that name.

    The source is only read. Raises ConfigError when it is the target, or has no images.
    """
    changeable(collection)
    name = folder_name(repeats, words)
    target = collection.root / name
    if same_place(source, target):
        raise ConfigError("{source} is that folder already", source=source)
    images = [source / image for image in folders.list_folder(source).images]
    if not images:
        raise ConfigError("there are no images directly in {source}, so there is nothing to copy", source=source)
    names = sorted(os.listdir(source))
    files = dict.fromkeys(
        [*images, *(f for i in images for f in companions(i, names) if f.suffix.lower() in CAPTION_SUFFIXES)]
    )
    copied = counted(len(images), "image")
    with trash.lock(collection.root.resolve()), trash.Change(collection.root, f"Copied {copied} into {name}") as change:
        change.copy([(file, target / file.name) for file in files], report)
    return name


def _change_title(edit: Edit, count: int) -> str:
    action_text = {
        "add": f"Added {edit.put!r} to",
        "remove": f"Removed {edit.find!r} from",
        "replace_tag": f"Replaced {edit.find!r} by {edit.put!r} in",
        "replace_text": f"Replaced {edit.find!r} by {edit.put!r} in",
    }[edit.action]
    return f"{action_text} {counted(count, 'caption')}"
