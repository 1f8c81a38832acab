"""Batches for the training loop, loaded ahead of time on threads: decoding, cropping, flipping, captions.

The content of a batch is a pure function of (seed, epoch, index), independent of workers, processes and resumes.
"""

import functools
import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, together
from library.config.run_config import RunConfig
from library.data import augment, captions, control_pixels, pixels
from library.data.batch import Batch, BatchSample, PreservedPrompt, batch_of
from library.data.buckets import BucketFit, Size, crop_ltrb
from library.data.cache_files import as_mask
from library.data.caches import LATENT
from library.data.captions import Moment
from library.data.length import training_length
from library.data.ordering import Draw, draws
from library.data.threads import ahead, num_workers

if TYPE_CHECKING:
    from library.data.images import ControlImage, Image, ImageSet


Longer = Callable[[Sequence[Size]], int]  # (width, height) of reference images -> tokens
# Of a batch: number of images, height and width of their latents, then height and width of each reference image's.
Kind = tuple[int, ...]


class Batches:
    """The batches of one process, epoch after epoch. Epochs count from 1, as file names and captions do.

    Iterating yields the rest of the current epoch and then moves on to the next. `state_dict` holds the position after
    the last yielded batch, so that a state saved within the loop resumes with the next batch.
    """

    def __init__(self, images: "ImageSet", config: RunConfig, seed: int, rank: int = 0, world: int = 1):
        if not images.items:
            raise ConfigError("there are no images to train on")
        self.images, self.config, self.seed, self.place = images, config, seed, (rank, world)
        self.epoch, self.index = 1, 0
        self._buckets = images.buckets()
        self._sizes = {key: images.datasets[key[0]].batch_size for key in self._buckets}
        # Rounded up: `draws` repeats batches to fill the last round.
        self._length = -(-sum(self.shapes.values()) // world)
        self.text_lengths: dict[int, int] = {}  # tokens that steps read, by area of the latents; empty: all
        self._workers = num_workers(config.data.max_data_loader_n_workers)
        self._pool: ThreadPoolExecutor | None = None
        self._pin = torch.cuda.is_available()
        num_variants = 1 if images.is_validation else config.cache.cached_caption_variants
        # Of each caption that are encoded; 0: captions are encoded as each step draws them.
        self._variants = num_variants if config.cache.text else 0
        self._is_guided = config.control_images.guided
        self._preservation = None if images.is_validation else config.preservation

    def __len__(self) -> int:
        return self._length

    @property
    def shapes(self) -> Counter[tuple[int, ...]]:
        """Batches per epoch over all processes, by (height, width) of the latents, then of reference latents."""
        return self._count_batches(_latent_sides)

    def kinds(self) -> Counter[Kind]:
        """Batches per epoch over all processes, by kind.

        Short batches count as full ones, to which they can be padded.
        """
        return self._count_batches(self._kind)

    def _count_batches(self, shape_of: Callable[[tuple[Any, ...]], tuple[int, ...]]) -> Counter[tuple[int, ...]]:
        counts: Counter[tuple[int, ...]] = Counter()
        for key, members in self._buckets.items():
            counts[shape_of(key)] += -(-len(members) // self._sizes[key])
        return counts

    def _kind(self, key: tuple[Any, ...]) -> Kind:
        return (self._sizes[key], *_latent_sides(key))

    def kind_at(self, index: int) -> Kind:
        """Return the kind of the batch at an index of this epoch; past its end, of the next epoch's first."""
        draws = self.draws(self.epoch) if index < len(self) else self.draws(self.epoch + 1)
        return self._kind(self.images.items[draws[index % len(draws)].images[0]].bucket_key)

    def example(self, kind: Kind) -> Batch:
        """Return a batch of this kind, with images of its bucket. Does not affect the batches of the training."""
        for key, members in self._buckets.items():
            if self._kind(key) == tuple(kind):
                return self.make(Draw(self.epoch, 0, tuple(members[: kind[0]])))
        raise ValueError(f"there are no batches of {kind[0]} images with latents of {kind[1]} x {kind[2]}")

    # Why: docs/decisions/2026-11-22-one-text-length-for-a-size.md
    def cut_text(self, length: Callable[[Collection[str]], int | None], longer: Longer = lambda sizes: 0) -> None:
        """Set `Batch.text_length`: `length` in tokens of the captions of all images up to the batch's size, plus the
        tokens that their reference images add, `longer` of their (width, height)."""
        areas: dict[int, set[str]] = {}
        references: dict[int, set[tuple[Size, ...]]] = {}
        for image in self.images.items:
            width, height = image.fit.bucket
            area = height // LATENT * (width // LATENT)
            plain_caption = [captions.with_affixes(image.caption, image.subset)]
            read = image.encoded_captions(self._variants) if self._variants else plain_caption
            preserved = image.preserved_captions(read, self._preservation) if self._preservation else []
            areas.setdefault(area, set()).update((*read, *preserved))
            references.setdefault(area, set()).add(tuple(control.fit.bucket for control in image.controls))
        tokens_by_area = {area: tokens for area in sorted(areas) if (tokens := length(areas[area])) is not None}
        tokens_by_area = {area: tokens + max(map(longer, references[area])) for area, tokens in tokens_by_area.items()}
        self.text_lengths = dict(zip(tokens_by_area, itertools.accumulate(tokens_by_area.values(), max), strict=True))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:  # else a resumed training would leave the middle of its epoch
            self.epoch, self.index = epoch, 0

    def go_to(self, epoch: int, index: int) -> None:
        self.epoch, self.index = epoch, min(index, len(self))  # the epoch counts from 1, the index from 0

    def state_dict(self) -> JsonObject:
        return {"epoch": self.epoch, "index": self.index, "seed": self.seed, **self._made_of}

    def load_state_dict(self, state: JsonObject) -> MessageLike:
        """Continue after the last yielded batch of a state. Returns what prevents an exact resume, or ""."""
        self.epoch, self.index, self.seed = state["epoch"], min(state["index"], len(self)), state["seed"]
        changed = [
            Message("the {part}", part=name) for name, current in self._made_of.items() if state.get(name) != current
        ]
        return Message("{what} changed since the state was saved", what=together(changed)) if changed else ""

    def __iter__(self) -> Iterator[Batch]:
        todo = self.draws(self.epoch)[self.index :]
        if self.config.data.persistent_data_loader_workers and self._workers and self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers)
        for batch in ahead(self.make, todo, self._workers, pool=self._pool):
            self.index += 1
            yield batch
        self.epoch, self.index = self.epoch + 1, 0

    def make(self, draw: Draw) -> Batch:
        """Load one batch; the same draw always gives the same batch."""
        parts = list(self.choices(draw))
        batch = batch_of([self._sample(part) for part in parts], [part.image for part in parts])
        batch.full = self.images.datasets[self.images.items[draw.images[0]].dataset].batch_size
        batch.is_guided = self._is_guided
        batch.text_length = self.text_lengths.get(math.prod(batch.shape))
        return batch.pinned() if self._pin else batch

    # Why: docs/decisions/2026-11-20-debug-dataset-makes-the-same-draws.md
    def choices(self, draw: Draw) -> "Iterator[ImageChoices]":
        """Yield the random choices for each image of a batch; no file is opened."""
        moment = self._moment(draw)
        for i, position in enumerate(draw.images):
            image = self.images.items[position]
            # One generator for captions and one for views, so that an option of captions changes no crop.
            key = f"{self.seed} {draw.epoch} {draw.index} {draw.slot + i}"
            words, encoded = self._words(image, seeded_when_used(f"{key} caption"), moment)
            random = seeded_when_used(f"{key} view")
            flip = image.subset.flip_aug and random.random() < 0.5
            weight = self.config.data.regularisation_weight if image.is_reg else 1.0
            drawn = random.randrange(len(image.controls)) if image.has_random_masks else None
            preserved = None
            if self._preservation:
                preserved = image.preserved_caption(encoded if self._variants else words, self._preservation)
            yield ImageChoices(image, words, flip, weight, random, drawn, encoded, preserved)

    def _words(self, image: "Image", random: Random, moment: Moment) -> tuple[str, str]:
        """Return the caption of an image in a step, and the one whose encoding is used if captions are encoded once."""
        if self._variants > 1:
            number = captions.drawn_number(image.subset, random, moment, self._variants)
            words = "" if number is None else image.variant(number)
            return words, words
        if self._variants and self.config.cache.cached_caption_variants > 1:  # validation uses one of them
            return image.encoded_caption, image.encoded_caption
        words = captions.process(image.caption, image.subset, random, moment, self.config.caption_change)
        return words, image.encoded_caption if words and self._variants else ""

    def draws(self, epoch: int) -> list[Draw]:
        return draws(self._buckets, self._sizes, self.seed, epoch, self.place)

    def _moment(self, draw: Draw) -> Moment:
        length, window = training_length(self.config.steps, len(self)), self.config.steps.gradient_accumulation_steps
        return Moment((draw.epoch - 1) * length.per_epoch + draw.index // window, draw.epoch, length.total)

    @functools.cached_property
    def _made_of(self) -> JsonObject:
        """Return digests of what the batches depend on besides the seed, by names for a message."""
        images, sizes = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        for image in self.images.items:
            name = image.path.replace("\\", "/").rsplit("/", 1)[-1]
            # Fields and not the repr of the dataclass, which changes with the class name: states store this digest.
            fit = f"Fit(bucket={image.fit.bucket}, resized={image.fit.resized})" if image.fit else "None"
            images.update(
                f"{name} {image.repeats} {image.dataset} {fit} {image.caption}\n".encode("utf-8", "surrogatepass")
            )
            if image.controls:
                controls = [(os.path.basename(control.path), control.fit.resized) for control in image.controls]
                images.update(f"{controls}\n".encode("utf-8", "surrogatepass"))
        for key, size in self._sizes.items():
            sizes.update(f"{key} {size}\n".encode())
        digests = {"images or captions": images.hexdigest(), "batch sizes or buckets": sizes.hexdigest()}
        return {**digests, "number of processes": self.place[1]}

    def _sample(self, chosen: "ImageChoices") -> "BatchSample":
        """Return the tensors of one image: its cached latents, or else its pixels, and its masks and controls."""
        image, flip = chosen.image, chosen.flip
        texts, preserved = self.images.text, None
        text = texts.load(image, chosen.encoded) if texts else None
        if chosen.preserved is not None:
            kept_text = texts.preserved(image, chosen.preserved) if texts else None
            preserved = PreservedPrompt(chosen.preserved, kept_text)
        latents: Tensor | None = None
        pixel: Tensor | None = None
        cached: Mapping[str, np.ndarray] = {}
        if self.images.latents:
            view, cached = augment.middle(image.fit, flip), self.images.latents.load(image)
            latents, alpha = _from_cache(image, cached, flip)
        else:
            view = view_of(image, self.images.datasets[image.dataset].enable_bucket, chosen.random, flip)
            pixel, alpha = _load_from_file(image, view, chosen.random)
        paint = _region_to_paint(chosen, view)
        if self._is_guided:
            control_image = pixels.apply_view(pixels.read_pixels(image.mask_file, image.how), view, image.interpolation)
            controls = [pixels.to_tensor(control_image)]
        elif pixel is None:
            names = (f"control_{number}{'_flipped' * flip}" for number in chosen.controls)
            controls = [torch.from_numpy(cached[name]).float() for name in names]
        elif paint is not None:
            controls = [pixel * (1 - paint)]
        else:
            controls = [control_pixels.control_input(c, image.interpolation, flip) for c in chosen.controls.values()]
        mask = self._loss_mask(image, view, alpha, is_painted=paint is not None)
        size = size_conditioning(image, flip)
        return BatchSample(chosen.caption, size, chosen.weight, latents, pixel, text, mask, controls, paint, preserved)

    def _loss_mask(self, image: "Image", view: augment.View, alpha: Tensor | None, is_painted: bool) -> Tensor | None:
        """Return what of an image counts in the loss: its mask file, or else its transparency (`alpha`). In an image to
        inpaint, transparency is the region to paint unless masked_loss is on."""
        if not self.config.data.masked_loss:
            return None if is_painted else alpha
        if not image.mask_file:
            return alpha
        mask = pixels.apply_view(pixels.read_mask(image.mask_file, image.how), view, image.interpolation)
        return torch.from_numpy(mask.astype(np.float32) / 255)


class _LazyRandom:
    """A `Random` that is seeded when it first draws, as two seeds take half as long as the rest of a cached image."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    @functools.cached_property
    def _seeded(self) -> Random:
        return Random(self._seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seeded, name)


def seeded_when_used(seed: str) -> Random:
    return cast(Random, _LazyRandom(seed))


class ImageChoices(NamedTuple):
    """One image of a batch with its random choices: caption, flip, weight, and a random generator for the rest."""

    image: "Image"
    caption: str
    flip: bool
    weight: float
    random: Random
    mask: int | None = None  # the index of its mask, if it is drawn from several
    encoded: str = ""  # the caption whose encoding is used, where captions are encoded once; "": none at all
    preserved: str | None = None  # the prompt for which the base model's prediction is kept

    @property
    def controls(self) -> "Mapping[int, ControlImage]":
        controls = self.image.controls
        return dict(enumerate(controls)) if self.mask is None else {self.mask: controls[self.mask]}


def _region_to_paint(chosen: ImageChoices, view: augment.View) -> Tensor | None:
    """[H,W], 1 in the region that an inpainting model is to paint; None for an image without such a mask."""
    control = next(iter(chosen.controls.values()), None)
    if control is None or not control.is_masked:
        return None
    return control_pixels.inpainting_region(control, view, chosen.image.interpolation)


def latent_area(kind: Kind) -> int:
    # Number of images, height and width of their latents, then height and width of each reference image's.
    return kind[0] * sum(height * width for height, width in zip(kind[1::2], kind[2::2], strict=True))


def kinds_of(images: "ImageSet") -> set[Kind]:
    """Return the kinds of all batches of these images."""
    return {(images.datasets[key[0]].batch_size, *_latent_sides(key)) for key in images.buckets()}


def _latent_sides(key: tuple[Any, ...]) -> tuple[int, ...]:
    sizes = (key[1], *(key[2] if len(key) > 2 else ()))
    return tuple(side // LATENT for width, height in sizes for side in (height, width))


def view_of(image: "Image", bucketed: bool, random: Random, flip: bool) -> augment.View:
    """Return the crop of an image that is not cached."""
    fit, subset = image.fit, image.subset
    sizes = subset.face_crop_aug_range
    face = augment.face_of(image.path) if sizes and not bucketed else None
    if face and sizes:
        view = augment.around_face(image.size, fit.bucket, face, sizes, random, subset.random_crop)
        return replace(view, flip=flip)
    if not subset.random_crop:
        return augment.middle(fit, flip)
    if not bucketed and image.size[0] >= fit.bucket[0] and image.size[1] >= fit.bucket[1]:
        fit = BucketFit(fit.bucket, image.size)  # without buckets, random crops are not resized
    return augment.anywhere(fit, random, flip)


def size_conditioning(image: "Image", flip: bool) -> list[int]:
    """SDXL's size conditioning: original height and width, crop top and left, target height and width."""
    width, height = image.fit.bucket
    left, top, right, _ = crop_ltrb(image.fit.bucket, image.size)
    return [image.size[1], image.size[0], int(top), int(width - right if flip else left), height, width]


def _from_cache(image: "Image", arrays: dict[str, np.ndarray], flip: bool) -> tuple[Tensor, Tensor | None]:
    latents = torch.from_numpy(arrays["latents_flipped" if flip else "latents"]).float()
    if not image.subset.alpha_mask:
        return latents, None
    mask = torch.from_numpy(as_mask(arrays["alpha_mask"]))
    return latents, mask.flip(-1) if flip else mask


def _load_from_file(image: "Image", view: augment.View, random: Random) -> tuple[Tensor, Tensor | None]:
    picture = pixels.read_pixels(image.path, image.how, alpha=image.subset.alpha_mask)
    pixels.expect_size(image.path, picture, image.size)
    picture = pixels.apply_view(picture, view, image.interpolation)
    colours = np.ascontiguousarray(picture[:, :, :3])
    if image.subset.color_aug:
        colours = augment.color(colours, random)
    mask = torch.from_numpy(picture[:, :, 3].astype(np.float32) / 255) if image.subset.alpha_mask else None
    return pixels.to_tensor(colours), mask
