"""A folder of images as its owner wants to see it: each picture with its words, its bucket, and what is wrong."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from library.config import dataset as datasets
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Problem, Report, Text, counted
from library.config.run_config import RunConfig
from library.config.text_files import decoded
from library.curation import tags
from library.data import augment, captions, folders
from library.data.buckets import BucketFit, Buckets, Size
from library.data.folders import Listing
from library.data.images import Image, ImageSet, bucket_rules, summary
from library.data.length import length
from library.data.pixels import check_file, header_size, is_turned
from library.data.threads import spread

May = Callable[[str], bool]  # whether a path may be followed to where it leads

OTHER_ENDINGS = (".txt", ".caption")
LARGEST = 16384  # pixels of a side; no model generates that many
MUCH_CUT, MUCH_LARGER = 0.2, 1.5
MOST_SEEN = 10_000_000  # pictures of an epoch; more is a slip in a folder's name


@dataclass(slots=True)
class Picture:
    """An image of the folder."""

    path: str
    name: str  # inside the opened folder, with /
    folder: str  # the same of its folder; "" is the opened one
    num_bytes: int
    modified: int
    caption_file: str  # where its words are, or would be; "" when another file tells them
    repeats: int = 1
    size: Size = (0, 0)
    caption: str | None = None  # the whole file; None when there is none
    fit: BucketFit | None = None
    unused: str = ""  # why a training would leave it out
    broken: str = ""  # why it cannot be decoded
    foreign: bool = False  # its caption file is no UTF-8
    turned: bool = False  # it says that it should be shown turned, which trainers do not follow
    role: str = ""  # "reg": a regularisation image; "held": used for validation
    fixed: str = ""  # why neither it nor its words can be changed here

    @property
    def words(self) -> str:
        """What a training reads of its caption file."""
        return captions.first_line(self.caption or "")

    @property
    def cut(self) -> tuple[float, float]:
        """The shares of its width and of its height that the bucket cuts away."""
        if self.fit is None:
            return 0.0, 0.0
        (width, height), (bucket_width, bucket_height) = self.fit.resized, self.fit.bucket
        return 1 - bucket_width / width, 1 - bucket_height / height

    @property
    def seen(self) -> tuple[float, float, float, float]:
        """What is seen of it, as shares: left, top, width, height."""
        if self.fit is None:
            return 0.0, 0.0, 1.0, 1.0
        view = augment.middle(self.fit)
        (width, height), (wide, high) = view.resized, view.size
        return view.left / width, view.top / height, wide / width, high / height

    @property
    def larger(self) -> float:
        """How many times it is enlarged."""
        if self.fit is None or not min(self.size):
            return 1.0
        return max(self.fit.resized[0] / self.size[0], self.fit.resized[1] / self.size[1])

    @property
    def used(self) -> bool:
        """Whether a training would see it."""
        return not (self.unused or self.broken)


@dataclass(slots=True)
class ImageFolder:
    """A folder of images: the opened one, or one inside it."""

    folder: str
    repeats: int
    words: str
    images: int
    unused: str = ""
    path: str = ""  # the folder itself
    role: str = ""  # as that of its pictures
    fixed: str = ""


@dataclass(slots=True)
class Album:
    """All of it."""

    root: Path
    config: RunConfig
    pictures: list[Picture] = field(default_factory=list)
    known: dict[str, Picture] = field(default_factory=dict)  # by name
    places: list[ImageFolder] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubles: dict[str, int] = field(default_factory=dict)  # name -> number of its group
    double_groups: list[JsonObject] = field(default_factory=list)
    compared: bool = False
    may: May = lambda path: True
    world: int = 1  # processes that share the batches
    found: ImageSet | None = None  # the trainer's own, where more than one folder of folders is trained on
    problems: list[Problem] = field(default_factory=list)  # what keeps a training from starting
    fixed: str = ""  # why nothing at all can be changed here

    @property
    def rules(self) -> Buckets:
        """How its images are sorted into buckets."""
        return bucket_rules(datasets.load(self.config)[0])

    def find(self, name: str) -> Picture:
        """A picture by its name. Raises ConfigError for one that is not known, whoever asks."""
        try:
            return self.known[name]
        except KeyError:
            raise ConfigError("{name} is not in {root}: open the folder again", name=name, root=self.root) from None

    def hold(self, pictures: list[Picture]) -> None:
        """Have these pictures from now on."""
        self.pictures, self.known = pictures, {picture.name: picture for picture in pictures}

    def count(self) -> JsonObject:
        """What a training would make of it: images, repeats, buckets, steps. The trainer's own count."""
        images = self._images()
        if (seen := sum(image.repeats for image in images.items)) > MOST_SEEN:
            raise ConfigError("an epoch would have {seen} pictures: lower the repeats", seen=f"{seen:,}")
        counts = summary(images, self.world)
        long = length(self.config.steps, counts["batches_per_epoch"])
        sizes = sorted({dataset.batch_size for dataset in images.datasets})
        return {
            **counts, "steps_per_epoch": long.per_epoch, "steps": long.total, "epochs": long.epochs,
            "batch": " or ".join(map(str, sizes)), "world": self.world,
        }  # fmt: skip

    def _images(self) -> ImageSet:
        """What a training has once what is broken is gone."""
        if self.found is None:
            base = datasets.load(self.config)[0]
            items = [
                Image(p.path, p.size, p.words, p.repeats, base.template, 0, p.fit)
                for p in self.pictures
                if p.used and p.fit is not None
            ]
            return ImageSet(items, (replace(base, subsets=()),))
        broken = {p.path for p in self.pictures if p.broken}
        return replace(self.found, items=[image for image in self.found.items if image.path not in broken])


def check(config: RunConfig) -> None:
    """Raise ConfigError when there can be no buckets as a config wants them."""
    problems = []
    for dataset in datasets.load(config):
        if not dataset.resolution:
            problems.append("resolution: write the size of the images, such as 1024")
            continue
        rules = bucket_rules(dataset)
        problems += list(rules.problems())
        if max(*rules.resolution, rules.largest) > LARGEST:
            template = "resolution and max_bucket_reso: no side may have more than {most} pixels"
            problems.append(Text(template, most=LARGEST))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def opened(root: Path, config: RunConfig, report: Report | None = None, may: May = lambda path: True) -> Album:
    """Look at a folder: the one that holds folders named <repeats>_<words>, or one with images.

    Links are followed where `may` says so. Raises ConfigError when the folder cannot be listed. What was known of
    unchanged files is remembered.
    """
    album = Album(root, config, may=may)
    try:
        _find(album)
    except OSError as error:
        raise ConfigError("{root} cannot be listed: {why}", root=root, why=error.strerror or error) from None
    album.notes += sharing(album)
    examine(album, album.pictures, report)
    rules = album.rules
    for picture in album.pictures:
        fitted(picture, rules)
    album.hold(album.pictures)
    return album


def examine(album: Album, pictures: list[Picture], report: Report | None = None) -> None:
    """Look into the files of pictures: size, whether they can be decoded, and their captions."""
    facts = spread(partial(_facts, album), pictures, report, Text("scanning images"))
    for picture, (size, broken, turned) in zip(pictures, facts, strict=True):
        picture.size, picture.broken, picture.turned = size, broken, turned
    spread(partial(reread, album), pictures, report, Text("reading captions"))


def fitted(picture: Picture, rules: Buckets) -> None:
    """Find a picture's bucket."""
    picture.fit = rules.fit(picture.size) if min(picture.size) > 0 else None
    if picture.fit is None and not picture.broken and not picture.unused:
        picture.unused = "too thin for any bucket"


def reread(album: Album, picture: Picture) -> None:
    """Read a picture's caption file anew."""
    if not picture.caption_file:
        return
    picture.caption, picture.foreign = None, False
    if not _safe(album, picture.caption_file):
        picture.foreign, picture.caption = True, ""
        return
    try:
        with open(picture.caption_file, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return
    except OSError:
        picture.foreign, picture.caption = True, ""
        return
    try:
        picture.caption = decoded(data)
    except UnicodeError:
        picture.foreign, picture.caption = True, data.decode("utf-8", "replace")


# ---- looking


def _find(album: Album) -> None:
    here = folders.listing(album.root)
    inner = [(name, found) for name in here.folders if (found := _inner(album, name)) is not None]
    has_concepts = any(folders.concept(album.root / name) for name, _ in inner)
    flat, own = folders.is_flat(album.root), folders.concept(album.root)
    why = "" if flat or not has_concepts else "images directly in the folder are not used beside <repeats>_<words>"
    given = album.config.data.dataset_repeats
    repeats, words = (own.repeats, own.words) if own and not flat else (given, "")
    _take(album, here, ImageFolder("", repeats, words, 0, why))
    for name, listing in inner:
        concept = folders.concept(album.root / name)
        reason = "" if concept else "its name does not begin with a number of repeats"
        if concept and not concept.repeats:
            reason = "it has 0 repeats"
        place = ImageFolder(name, concept.repeats if concept else 1, concept.words if concept else "", 0, reason)
        _take(album, listing, place)
        deeper = [one for one in listing.folders if folders.listing(album.root / name / one).images]
        if deeper:
            album.notes.append(
                Text(
                    "Images in {folders} inside {name} are not used: one level is read.",
                    folders=folders.some(deeper),
                    name=name,
                )
            )
    if flat:
        album.notes.append(
            Text("Times each image is seen per epoch: {given}. Repeats in the settings says how often.", given=given)
        )
    elif own and not has_concepts and here.images:
        album.notes.append(
            Text("As the image folder of a training, name the folder above: {parent}", parent=album.root.parent)
        )


def _inner(album: Album, name: str) -> Listing | None:
    """A folder in the opened one, or None when it may not be looked into."""
    if not _safe(album, os.path.join(album.root, name)):
        return None
    try:
        return folders.listing(album.root / name)
    except OSError as error:
        album.notes.append(Text("{name} cannot be listed: {why}", name=name, why=error.strerror or error))
        return None


def _take(album: Album, listing: Listing, place: ImageFolder) -> None:
    ending = album.config.captions.caption_extension
    start = f"{place.folder}/" if place.folder else ""
    for name, file in listing.images.items():
        caption_file = listing.path(os.path.splitext(name)[0] + ending)
        picture = Picture(listing.path(name), start + name, place.folder, file.num_bytes, file.modified, caption_file)
        picture.repeats, picture.unused = place.repeats, place.unused
        album.pictures.append(picture)
    for name in listing.undecodable:
        album.pictures.append(
            Picture(
                listing.path(name),
                start + name,
                place.folder,
                0,
                0,
                listing.path(os.path.splitext(name)[0] + ending),
                broken="there is no decoder for it here: convert it to PNG or WebP",
            )  # fmt: skip
        )
    place.path = listing.folder
    place.images = len(listing.images) + len(listing.undecodable)
    if place.images:
        album.places.append(place)
    stems = {os.path.splitext(name)[0] for name in listing.images}
    endings = Counter(end for stem, end in map(os.path.splitext, listing.names) if stem in stems)
    for other in OTHER_ENDINGS:
        if other != ending and endings[other] and not endings[ending]:
            many = counted(endings[other], f"{other} file")
            where = place.folder or "The folder"
            template = "{where} has {many}, which are not read: set the caption files' ending to {other}."
            album.notes.append(Text(template, where=where, many=many, other=other))


def sharing(album: Album) -> list[str]:
    """Two images that share a caption file, such as a.png and a.jpg."""
    shared = Counter(picture.caption_file for picture in album.pictures)
    twice = [os.path.basename(path) for path, count in shared.items() if count > 1]
    return [Text("Images of one name share a caption file: {names}.", names=folders.some(twice))] if twice else []


def _safe(album: Album, path: str) -> bool:
    """Whether a path is no link, or one that may be followed."""
    return not os.path.islink(path) or album.may(path)


def _facts(album: Album, picture: Picture) -> tuple[Size, str, bool]:
    if not _safe(album, picture.path):
        return (0, 0), "it is a link that leads out of the folders of this page", False
    if picture.broken:
        return (0, 0), picture.broken, False
    return _known(picture.path, picture.modified, picture.num_bytes)


@lru_cache(maxsize=1 << 17)
def _known(path: str, modified: int, num_bytes: int) -> tuple[Size, str, bool]:
    """Size, why it cannot be decoded, and whether it lies on its side; date and length make the memory safe."""
    size = header_size(path, modified, num_bytes)
    if min(size) < 1:
        return size, "this is no image that can be read", False
    return size, check_file(path), is_turned(path, size)


# ---- choosing

Test = Callable[[Album, Picture], bool]
KINDS: dict[str, tuple[str, Test]] = {
    "all": ("All images", lambda a, p: True),
    "missing": ("Without a caption", lambda a, p: p.caption is None),
    "empty": ("Empty caption", lambda a, p: p.caption is not None and not p.words and not p.foreign),
    "foreign": ("Caption that cannot be read", lambda a, p: p.foreign),
    "lines": ("Caption of several lines", lambda a, p: len(captions.lines(p.caption or "").split("\n")) > 1),
    "broken": ("Broken images", lambda a, p: bool(p.broken)),
    "unused": ("Not used", lambda a, p: bool(p.unused)),
    "cut": ("Cropped by more than 20 %", lambda a, p: p.used and max(p.cut) > MUCH_CUT),
    "enlarged": ("Upscaled more than 1.5 times", lambda a, p: p.used and p.larger > MUCH_LARGER),
    "turned": ("EXIF rotation", lambda a, p: p.turned),
    "reg": ("Regularisation images", lambda a, p: p.role == "reg"),
    "held": ("Validation images", lambda a, p: p.role == "held"),
    "double": ("Duplicates and similar images", lambda a, p: p.name in a.doubles),
}


def choose(album: Album, kind: str, words: str = "", folder: str | None = None, trigger: str = "") -> list[Picture]:
    """The pictures of a kind, of a folder, whose name or caption has these words; `trigger`: those without it."""
    if kind not in KINDS and kind != "trigger":
        raise ConfigError("show is {kind}: use one of {kinds}", kind=repr(kind), kinds=", ".join(KINDS))
    has = tags.trigger(trigger) if trigger.strip() else None
    test: Test = (
        KINDS[kind][1] if kind in KINDS else lambda a, p: has is not None and p.role != "reg" and not has(p.words)
    )
    wanted = words.casefold().strip()
    found = [
        p
        for p in album.pictures
        if (folder is None or p.folder == folder)
        and (not wanted or wanted in p.name.casefold() or wanted in (p.caption or "").casefold())
        and test(album, p)
    ]
    return sorted(found, key=lambda p: (album.doubles[p.name], p.name)) if kind == "double" else found


def counts(album: Album, trigger: str = "") -> dict[str, int]:
    """How many pictures there are of each kind."""
    found = {kind: sum(map(partial(test, album), album.pictures)) for kind, (_, test) in KINDS.items()}
    if trigger.strip():
        has = tags.trigger(trigger)
        found["trigger"] = sum(p.role != "reg" and not has(p.words) for p in album.pictures)
    return found
