"""Encode images once, before training, into caches on disk or in memory; for captions see text_encoding."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from library.config import phases
from library.config.problems import ConfigError, Message, Report, counted
from library.config.run_config import RunConfig
from library.data import augment, caches, control_pixels, identity, pixels, stamps, text_encoding
from library.data.buckets import Size
from library.data.cache_files import MASK
from library.data.caches import LATENT, LatentEntry
from library.data.encoding_job import (
    SHOWN_TWICE,
    Arrays,
    EncodingJob,
    EncodingProcess,
    clean_up_after,
    finish,
    refuse_other_references,
    share,
)
from library.data.folders import some_files
from library.data.not_finite import NotFiniteError
from library.data.threads import ahead, num_workers, spread
from library.families.base import Family, LatentCache, ModelComponents
from library.families.capabilities import TakesControls
from library.files import need_space

if TYPE_CHECKING:
    from library.data.images import Image, ImageSet

LOADERS = 8
MASK_BYTES = 2  # upper bound per pixel of a cached mask, even one of noise


@dataclass(slots=True)
class Latents:
    """The encoded images of a training, on disk or in memory."""

    entries: dict[tuple[str, tuple[int, int]], LatentEntry]
    memory: dict[LatentEntry, Arrays] = field(default_factory=dict)

    def load(self, image: "Image") -> Arrays:
        """Return the latents [C,h,w] of an image, with the other arrays of `LatentEntry.arrays`."""
        entry = self.entries[image.path, image.fit.bucket]
        if (arrays := self.memory.get(entry)) is not None:
            return arrays
        entry = existing(entry)
        try:
            latents = caches.read_latents(entry)
        except caches.BROKEN as e:
            raise caches.unreadable_cache(entry.file, e) from e
        if latents["latents"].shape[-2:] != entry.shape:
            raise caches.unreadable_cache(entry.file, ValueError(f"its latents are {latents['latents'].shape}"))
        return latents


def encode_missing_caches(
    images: "ImageSet",
    family: Family,
    components: ModelComponents,
    config: RunConfig,
    world: EncodingProcess,
    report: Report,
) -> None:
    """Encode whatever the config caches and is missing, and store the caches in `images`.

    On disk, each process encodes its share of the files and waits for the others; in memory, every process encodes all.
    Networks keep their dtype and return to the host. Interruptible: written files stay. Raises ConfigError, naming the
    image, if it is unreadable or the result is NaN.
    """
    job = EncodingJob(family, components, config, world, report)
    all_images = [*images.items, *(images.validation.items if images.validation else ())]
    if config.cache.latents:
        images.latents = _latents(all_images, job)
    if config.cache.text:
        images.text = text_encoding.encode_captions(images, job)
    if images.validation:
        images.validation.latents, images.validation.text = images.latents, images.text
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if world.ranks > 1 and torch.distributed.is_initialized():
        torch.distributed.barrier()


def existing(entry: LatentEntry) -> LatentEntry:
    """Return the same latents in the existing file."""
    # Older versions of sd-scripts name those of SDXL differently.
    if entry.tail or os.path.exists(entry.file) or entry.how.turns(entry.image):
        return entry
    old = os.path.splitext(entry.image)[0] + ".npz"
    return replace(entry, file=old) if os.path.exists(old) else entry


# ---- latents


def _latents(images: Sequence["Image"], job: EncodingJob) -> Latents:
    store = Latents(wanted_latents(images, job.family.latent_cache))
    entries = list(store.entries.values())
    if not job.config.cache.cache_latents_to_disk:
        _encode_images(entries, job, store.memory.__setitem__)
        return store
    if job.family.latent_cache.architecture:  # its keys contain only the size of a reference image
        refuse_other_references(images)
    entries = share(entries, lambda entry: entry.image, job.world)
    has_vae = job.components.vae is not None or "vae" in job.components.deferred
    vae = identity.fingerprint_components(job.components, ["vae"]) if has_vae else None
    trust, times = job.config.cache.skip_cache_check, Counter(entry.image for entry in store.entries.values())

    def is_valid(entry: LatentEntry) -> bool:
        if trust and times[entry.image] > 1:  # an existing file may lack some of the sizes
            return caches.has_size(existing(entry))
        return caches.latents_are_good(existing(entry), vae, trust)

    checked = spread(is_valid, entries, job.report, Message("checking cached latents"))
    todo = [entry for entry, is_good in zip(entries, checked, strict=True) if not is_good]
    clean_up_after([entry.file for entry in todo])
    if todo:
        # At most 16 channels of float32.
        sizes = ((4 * 16 if name != MASK else MASK_BYTES, size) for w in todo for name, size in w.arrays.items())
        need_space(todo[0].file, sum(num_bytes * height * width for num_bytes, (height, width) in sizes))

    def write(entry: LatentEntry, arrays: Arrays) -> None:
        caches.write_latents(entry, arrays, {"vae": vae, "image": stamps.image_stamp(entry.image)})

    _encode_images(todo, job, write)
    return store


def wanted_latents(images: Iterable["Image"], cache: LatentCache) -> dict[tuple[str, tuple[int, int]], LatentEntry]:
    """Return the latents to cache by path and bucket: one entry for all data sets with the image at that size."""
    entries: dict[tuple[str, tuple[int, int]], LatentEntry] = {}
    paths: set[str] = set()
    for image in images:
        key = image.path, image.fit.bucket
        entry = entries.get(key)
        if entry is None:
            # Upstream keeps one size per file: the first size uses its keys, further sizes get a suffix.
            tail = f"_{key[1][1] // LATENT}x{key[1][0] // LATENT}" if cache.keyed_by_size or image.path in paths else ""
            file = caches.latents_file(image.path, image.size, cache.suffix, image.how)
            options = {"interpolation": image.interpolation or "", "controls": image.controls, "cache": cache}
            entry = LatentEntry(image.path, image.size, image.fit, file, tail, **options, how=image.how)
            paths.add(image.path)
        if entry.controls != image.controls:
            raise ConfigError(SHOWN_TWICE, path=image.path)
        flip, mask = entry.flip or image.subset.flip_aug, entry.mask or image.subset.alpha_mask
        entries[key] = replace(entry, flip=flip, mask=mask) if (flip, mask) != (entry.flip, entry.mask) else entry
    return entries


def _encode_images(todo: list[LatentEntry], job: EncodingJob, keep: Callable[[LatentEntry, Arrays], None]) -> None:
    if not todo:
        return
    job.components.read_vae()
    vae = job.components.vae
    if vae is None:
        raise ConfigError(
            "there is no VAE to encode {images} not cached yet: name one", images=counted(len(todo), "image")
        )
    vae.to(job.world.device)
    batches = _batches_of_one_size(todo, job.config.cache.vae_batch_size)

    def encoded() -> Iterator[list[tuple[LatentEntry, Arrays]]]:
        for pictures in ahead(_open_pictures, batches, num_workers(LOADERS)):
            yield _encode_pictures(pictures, job)

    def write_batch(batch: list[tuple[LatentEntry, Arrays]]) -> int:
        for entry, arrays in batch:
            keep(entry, arrays)
        return len(batch)

    finish(write_batch, encoded(), phases.CACHING_LATENTS, len(todo), job.report)
    vae.to("cpu")


def _batches_of_one_size(todo: Iterable[LatentEntry], batch_size: int) -> Iterator[list[LatentEntry]]:
    """Yield batches of one size each, the largest first."""
    # If memory is short, the largest fails at once.
    groups: dict[tuple, list[LatentEntry]] = {}
    for entry in todo:
        controls = tuple(control.fit.bucket for control in entry.controls)
        groups.setdefault((entry.fit.bucket, entry.flip, entry.mask, controls), []).append(entry)
    for _, group in sorted(groups.items(), key=lambda item: item[0][0][0] * item[0][0][1], reverse=True):
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


class _Pictures(NamedTuple):
    """One batch from disk: colours [B,3,H,W] in -1..1, masks uint8 [H,W] if needed, and control images."""

    batch: list[LatentEntry]
    colours: torch.Tensor
    masks: list[np.ndarray]
    controls: list[torch.Tensor]  # [B,3,H,W] in -1..1: first the first one of each image, then the second, ...


def _open_pictures(batch: list[LatentEntry]) -> _Pictures:
    colours, masks = [], []
    controls: list[list[torch.Tensor]] = [[] for _ in batch[0].controls]
    for entry in batch:
        picture = pixels.read_pixels(entry.image, entry.how, alpha=entry.mask)
        pixels.expect_size(entry.image, picture, entry.size)
        picture = pixels.apply_view(picture, augment.middle(entry.fit), entry.interpolation or None)
        colours.append(pixels.to_tensor(picture[:, :, :3]))
        if entry.mask:
            masks.append(picture[:, :, 3])
        for row, control in zip(controls, entry.controls, strict=True):
            row.append(control_pixels.control_input(control, entry.interpolation or None))
    return _Pictures(batch, torch.stack(colours), masks, [torch.stack(row) for row in controls])


def _encode_pictures(pictures: _Pictures, job: EncodingJob) -> list[tuple[LatentEntry, Arrays]]:
    batch, device = pictures.batch, job.world.device
    arrays_by_image: list[Arrays] = [{} for _ in batch]

    def keep(name: str, tensor: torch.Tensor) -> None:
        latents = tensor.float().cpu()
        not_finite = [
            w.image for w, latent in zip(batch, latents, strict=True) if not bool(torch.isfinite(latent).all())
        ]
        if not_finite:
            raise NotFiniteError(
                "encoding {some} gave NaN: {advice}",
                some=some_files(not_finite),
                advice=_nan_advice(job.components.vae),
            )
        for arrays, latent in zip(arrays_by_image, latents.numpy(), strict=True):
            arrays[name] = latent

    colours, controls = pictures.colours.to(device), [control.to(device) for control in pictures.controls]
    for ending in ["", *["_flipped"] * batch[0].flip]:
        view = colours.flip(-1) if ending else colours
        with torch.no_grad():
            generators = [image_generator(entry.image, entry.fit.bucket) for entry in batch]
            keep(f"latents{ending}", job.family.latents(job.components, view, generator=generators))
            for number, control in enumerate(controls):
                assert isinstance(job.family, TakesControls)
                control_view = control.flip(-1) if ending else control
                keep(f"control_{number}{ending}", job.family.control_latents(job.components, control_view))
    for arrays, mask in zip(arrays_by_image, pictures.masks, strict=False):
        arrays["alpha_mask"] = mask
    return list(zip(batch, arrays_by_image, strict=True))


def image_generator(image: str, bucket: Size) -> torch.Generator:
    """Return a random generator per image."""
    # Its latents must depend neither on its batch nor on the run.
    name = f"{os.path.basename(image)} {bucket}"
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=7).digest())
    )


def _nan_advice(vae: torch.nn.Module | None) -> str:
    if vae is not None and next(vae.parameters()).dtype == torch.float16:
        return "the VAE overflows in fp16; add no_half_vae, or use bf16, or a VAE made for fp16"
    return "the image or the VAE is damaged; replace it"
