"""Filter images by kind, folder or text."""

from collections.abc import Callable
from functools import partial

from library.config.problems import require_choice
from library.curation import tags
from library.curation.collection import ImageCollection, Picture
from library.data import captions
from library.data.preflight import MUCH_CUT

MUCH_LARGER = 1.5  # enlargement above which an image is listed as upscaled
Test = Callable[[ImageCollection, Picture], bool]
PICTURE_KINDS: dict[str, tuple[str, Test]] = {
    "all": ("All images", lambda a, p: True),
    "missing": ("Without a caption", lambda a, p: p.caption is None),
    "empty": ("Empty caption", lambda a, p: p.caption is not None and not p.words and not p.foreign),
    "foreign": ("Caption that cannot be read", lambda a, p: p.foreign),
    "lines": ("Caption of several lines", lambda a, p: len(captions.caption_lines(p.caption or "").split("\n")) > 1),
    "broken": ("Broken images", lambda a, p: bool(p.broken)),
    "unused": ("Not used", lambda a, p: bool(p.unused)),
    "cut": ("Cropped by more than 20 %", lambda a, p: p.used and max(p.cut) > MUCH_CUT),
    "enlarged": ("Upscaled more than 1.5 times", lambda a, p: p.used and p.larger > MUCH_LARGER),
    "turned": ("EXIF rotation", lambda a, p: p.turned),
    "reg": ("Regularisation images", lambda a, p: p.role == "reg"),
    "held": ("Validation images", lambda a, p: p.role == "held"),
    "double": ("Duplicates and similar images", lambda a, p: p.name in a.doubles),
}


def select_pictures(
    collection: ImageCollection, kind: str, words: str = "", folder: str | None = None, trigger: str = ""
) -> list[Picture]:
    """Select the images of a kind, in a folder (None: in all), whose name or caption contains `words`. The kind
    "trigger" selects images without the trigger word."""
    require_choice("show", kind, (*PICTURE_KINDS, "trigger"))
    has_trigger = tags.trigger(trigger) if trigger.strip() else None
    test: Test = (
        PICTURE_KINDS[kind][1]
        if kind in PICTURE_KINDS
        else lambda a, p: has_trigger is not None and p.role != "reg" and not has_trigger(p.words)
    )
    search_text = words.casefold().strip()
    pictures = [
        p
        for p in collection.pictures
        if (folder is None or p.folder == folder)
        and (not search_text or search_text in p.name.casefold() or search_text in (p.caption or "").casefold())
        and test(collection, p)
    ]
    return sorted(pictures, key=lambda p: (collection.doubles[p.name], p.name)) if kind == "double" else pictures


def count_kinds(collection: ImageCollection, trigger: str = "") -> dict[str, int]:
    """Return the number of images of each kind."""
    kinds = {
        kind: sum(map(partial(test, collection), collection.pictures)) for kind, (_, test) in PICTURE_KINDS.items()
    }
    if trigger.strip():
        has_trigger = tags.trigger(trigger)
        kinds["trigger"] = sum(p.role != "reg" and not has_trigger(p.words) for p in collection.pictures)
    return kinds
