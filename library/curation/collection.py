"""The images of a data set as the page shows them: each with its caption, its bucket, and its problems."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from library.config import dataset as datasets
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.config.run_config import RunConfig
from library.data import augment, captions
from library.data.buckets import BucketFit, Buckets, Size
from library.data.images import Image, ImageSet, bucket_rules, summarise_images
from library.data.length import training_length

May = Callable[[str], bool]  # whether the target of a path may be read

MAX_BUCKET_SIDE = 16384  # pixels of a side; no model generates that many
MAX_IMAGES_PER_EPOCH = 10_000_000  # images of an epoch; more is a mistake in a folder's name


@dataclass(slots=True)
class Picture:
    """An image of the folder."""

    path: str
    name: str  # path relative to the opened folder, with /
    folder: str  # path of its folder, relative to the opened one; "" is that itself
    num_bytes: int
    modified: int
    caption_file: str  # where its caption is, or would be; "" when another file holds it
    repeats: int = 1
    size: Size = (0, 0)
    caption: str | None = None  # the content of the file; None when there is none
    fit: BucketFit | None = None
    unused: MessageLike = ""  # why a training would not use it
    broken: str = ""  # why it cannot be decoded
    foreign: bool = False  # its caption file is not UTF-8
    turned: bool = False  # it is turned or mirrored by its EXIF orientation
    role: str = ""  # "reg": a regularisation image; "held": used for validation
    fixed: MessageLike = ""  # why it and its caption are read-only

    @property
    def words(self) -> str:
        return captions.first_line(self.caption or "")

    @property
    def cut(self) -> tuple[float, float]:
        return self.fit.cut if self.fit else (0.0, 0.0)

    @property
    def seen(self) -> tuple[float, float, float, float]:
        """The crop, as shares of its size: left, top, width, height."""
        if self.fit is None:
            return 0.0, 0.0, 1.0, 1.0
        view = augment.middle(self.fit)
        (width, height), (wide, high) = view.resized, view.size
        return view.left / width, view.top / height, wide / width, high / height

    @property
    def larger(self) -> float:
        """The factor by which the trainer enlarges it; below 1, by which it shrinks it."""
        if self.fit is None or not min(self.size):
            return 1.0
        return max(self.fit.resized[0] / self.size[0], self.fit.resized[1] / self.size[1])

    @property
    def used(self) -> bool:
        return not (self.unused or self.broken)


@dataclass(slots=True)
class ImageFolder:
    """A folder of images: the opened one, or one inside it."""

    folder: str
    repeats: int
    words: str
    images: int
    unused: MessageLike = ""
    path: str = ""  # the folder itself
    role: str = ""  # as that of its pictures
    fixed: MessageLike = ""


@dataclass(slots=True)
class ImageCollection:
    """The images of a data set and its folders, with the results of the scan."""

    root: Path
    config: RunConfig
    pictures: list[Picture] = field(default_factory=list)
    known: dict[str, Picture] = field(default_factory=dict)  # by name
    places: list[ImageFolder] = field(default_factory=list)
    notes: list[MessageLike] = field(default_factory=list)
    unread_ending: str = ""  # another extension of caption files, which all captions of a folder have
    doubles: dict[str, int] = field(default_factory=dict)  # name -> number of its group of duplicates
    double_groups: list[JsonObject] = field(default_factory=list)
    compared: bool = False
    may: May = lambda path: True
    world: int = 1  # processes that share the batches
    found: ImageSet | None = None  # the trainer's own result, where a training has other sources than the opened folder
    problems: list[Problem] = field(default_factory=list)  # that keep a training from starting
    fixed: MessageLike = ""  # why the whole collection is read-only

    @property
    def rules(self) -> Buckets:
        return bucket_rules(datasets.load_datasets(self.config)[0])

    def find(self, name: str) -> Picture:
        """Return an image by its name. Raises ConfigError for an unknown name."""
        try:
            return self.known[name]
        except KeyError:
            raise ConfigError("{name} is not in {root}: open the folder again", name=name, root=self.root) from None

    def hold(self, pictures: list[Picture]) -> None:
        self.pictures, self.known = pictures, {picture.name: picture for picture in pictures}

    def count(self) -> JsonObject:
        """Count images, repeats, buckets and steps of a training, as the trainer does."""
        images = self._images()
        if (images_per_epoch := sum(image.repeats for image in images.items)) > MAX_IMAGES_PER_EPOCH:
            raise ConfigError("an epoch would have {seen} images: lower the repeats", seen=f"{images_per_epoch:,}")
        counts = summarise_images(images, self.world)
        length = training_length(self.config.steps, counts["batches_per_epoch"])
        sizes = sorted({dataset.batch_size for dataset in images.datasets})
        return {
            **counts,
            "steps_per_epoch": length.per_epoch,
            "steps": length.total,
            "epochs": length.epochs,
            "batch": " or ".join(map(str, sizes)),
            "world": self.world,
        }

    def _images(self) -> ImageSet:
        """Return the images of a training, without the damaged ones."""
        if self.found is None:
            datasets_by_size = datasets.load_datasets(self.config)  # one for each resolution
            used = [picture for picture in self.pictures if picture.used and picture.fit is not None]
            items = [
                Image(p.path, p.size, p.words, p.repeats, base.template, position, fit)
                for position, base in enumerate(datasets_by_size)
                for p in used
                # The scan has already fitted the first resolution.
                if (fit := bucket_rules(base).fit(p.size) if position else p.fit)
            ]
            return ImageSet(items, tuple(replace(base, subsets=()) for base in datasets_by_size))
        broken = {p.path for p in self.pictures if p.broken}
        return replace(self.found, items=[image for image in self.found.items if image.path not in broken])


def check_buckets(config: RunConfig) -> None:
    """Raise ConfigError when the bucket options of a config are impossible."""
    problems = []
    for dataset in datasets.load_datasets(config):
        if not dataset.resolution:
            problems.append("resolution: write the size of the images, such as 1024")
            continue
        rules = bucket_rules(dataset)
        problems += list(rules.problems())
        if max(*rules.resolution, rules.largest) > MAX_BUCKET_SIDE:
            template = "resolution and max_bucket_reso: no side may have more than {most} pixels"
            problems.append(Message(template, most=MAX_BUCKET_SIDE))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
