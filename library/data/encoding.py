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
from library.data.caches import LATENT, Wanted
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
from library.data.folders import some
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

    wanted: dict[tuple[str, tuple[int, int]], Wanted]
    memory: dict[Wanted, Arrays] = field(default_factory=dict)

    def load(self, image: "Image") -> Arrays:
        """Return the latents [C,h,w] of an image, with the other arrays of `Wanted.arrays`."""
        wanted = self.wanted[image.path, image.fit.bucket]
        if wanted in self.memory:
            return self.memory[wanted]
        wanted = existing(wanted)
        try:
            latents = caches.read_latents(wanted)
        except caches.BROKEN as e:
            raise caches.unreadable_cache(wanted.file, e) from e
        if latents["latents"].shape[-2:] != wanted.shape:
            raise caches.unreadable_cache(wanted.file, ValueError(f"its latents are {latents['latents'].shape}"))
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
    work = EncodingJob(family, components, config, world, report)
    every = [*images.items, *(images.validation.items if images.validation else ())]
    if config.cache.latents:
        images.latents = _latents(every, work)
    if config.cache.text:
        images.text = text_encoding.encode_captions(images, work)
    if images.validation:
        images.validation.latents, images.validation.text = images.latents, images.text
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if world.ranks > 1 and torch.distributed.is_initialized():
        torch.distributed.barrier()


def existing(wanted: Wanted) -> Wanted:
    """Return the same latents in the existing file."""
    # Older versions of sd-scripts name those of SDXL differently.
    if wanted.tail or os.path.exists(wanted.file) or wanted.how.turns(wanted.image):
        return wanted
    old = caches.old_latents_file(wanted.image)
    return replace(wanted, file=old) if os.path.exists(old) else wanted


# ---- latents


def _latents(every: Sequence["Image"], work: EncodingJob) -> Latents:
    store = Latents(wanted_latents(every, work.family.latent_cache))
    mine = list(store.wanted.values())
    if not work.config.cache.cache_latents_to_disk:
        _encode_images(mine, work, store.memory.__setitem__)
        return store
    if work.family.latent_cache.architecture:  # its keys contain only the size of a reference image
        refuse_other_references(every)
    mine = share(mine, lambda wanted: wanted.image, work.world)
    there = work.components.vae is not None or "vae" in work.components.deferred
    vae = identity.of_components(work.components, ["vae"]) if there else None
    trust, times = work.config.cache.skip_cache_check, Counter(wanted.image for wanted in store.wanted.values())

    def good(wanted: Wanted) -> bool:
        if trust and times[wanted.image] > 1:  # an existing file may lack some of the sizes
            return caches.has_size(existing(wanted))
        return caches.latents_are_good(existing(wanted), vae, trust)

    checked = spread(good, mine, work.report, Message("checking cached latents"))
    todo = [wanted for wanted, is_good in zip(mine, checked, strict=True) if not is_good]
    clean_up_after([wanted.file for wanted in todo])
    if todo:
        sizes = ((4 * 16 if name != MASK else MASK_BYTES, size) for w in todo for name, size in w.arrays.items())
        need_space(todo[0].file, sum(num_bytes * height * width for num_bytes, (height, width) in sizes))

    def write(wanted: Wanted, arrays: Arrays) -> None:
        caches.write_latents(wanted, arrays, {"vae": vae, "image": stamps.image_stamp(wanted.image)})

    _encode_images(todo, work, write)
    return store


def wanted_latents(every: Iterable["Image"], cache: LatentCache) -> dict[tuple[str, tuple[int, int]], Wanted]:
    """Return the latents to cache by path and bucket: one entry for all data sets with the image at that size."""
    wanted: dict[tuple[str, tuple[int, int]], Wanted] = {}
    seen: set[str] = set()
    for image in every:
        key = image.path, image.fit.bucket
        earlier = wanted.get(key)
        if earlier is None:
            # Upstream keeps one size per file: the first size uses its keys, further sizes get a suffix.
            tail = f"_{key[1][1] // LATENT}x{key[1][0] // LATENT}" if cache.keyed_by_size or image.path in seen else ""
            file = caches.latents_file(image.path, image.size, cache.suffix, image.how)
            more = {"interpolation": image.interpolation or "", "controls": image.controls, "cache": cache}
            earlier = Wanted(image.path, image.size, image.fit, file, tail, **more, how=image.how)
            seen.add(image.path)
        if earlier.controls != image.controls:
            raise ConfigError(SHOWN_TWICE, path=image.path)
        flip, mask = earlier.flip or image.subset.flip_aug, earlier.mask or image.subset.alpha_mask
        wanted[key] = (
            replace(earlier, flip=flip, mask=mask) if (flip, mask) != (earlier.flip, earlier.mask) else earlier
        )
    return wanted


def _encode_images(todo: list[Wanted], work: EncodingJob, keep: Callable[[Wanted, Arrays], None]) -> None:
    if not todo:
        return
    work.components.read_vae()
    vae = work.components.vae
    if vae is None:
        raise ConfigError(
            "there is no VAE to encode {images} not cached yet: name one", images=counted(len(todo), "image")
        )
    vae.to(work.world.device)
    batches = _by_size(todo, work.config.cache.vae_batch_size)

    def encoded() -> Iterator[list[tuple[Wanted, Arrays]]]:
        for pictures in ahead(_open_pictures, batches, num_workers(LOADERS)):
            yield _encoded(pictures, work)

    def kept(batch: list[tuple[Wanted, Arrays]]) -> int:
        for wanted, arrays in batch:
            keep(wanted, arrays)
        return len(batch)

    finish(kept, encoded(), phases.CACHING_LATENTS, len(todo), work.report)
    vae.to("cpu")


def _by_size(todo: Iterable[Wanted], batch_size: int) -> Iterator[list[Wanted]]:
    """Yield batches of one size each, the largest first."""
    # If memory is short, the largest fails at once.
    groups: dict[tuple, list[Wanted]] = {}
    for wanted in todo:
        controls = tuple(control.fit.bucket for control in wanted.controls)
        groups.setdefault((wanted.fit.bucket, wanted.flip, wanted.mask, controls), []).append(wanted)
    for _, group in sorted(groups.items(), key=lambda item: item[0][0][0] * item[0][0][1], reverse=True):
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


class _Pictures(NamedTuple):
    """One batch from disk: colours [B,3,H,W] in -1..1, masks uint8 [H,W] if needed, and control images."""

    batch: list[Wanted]
    colours: torch.Tensor
    masks: list[np.ndarray]
    controls: list[torch.Tensor]  # [B,3,H,W] in -1..1: first the first one of each image, then the second, ...


def _open_pictures(batch: list[Wanted]) -> _Pictures:
    colours, masks = [], []
    controls: list[list[torch.Tensor]] = [[] for _ in batch[0].controls]
    for wanted in batch:
        picture = pixels.read_pixels(wanted.image, wanted.how, alpha=wanted.mask)
        pixels.expect_size(wanted.image, picture, wanted.size)
        picture = pixels.apply_view(picture, augment.middle(wanted.fit), wanted.interpolation or None)
        colours.append(pixels.to_tensor(picture[:, :, :3]))
        if wanted.mask:
            masks.append(picture[:, :, 3])
        for row, control in zip(controls, wanted.controls, strict=True):
            row.append(control_pixels.control_input(control, wanted.interpolation or None))
    return _Pictures(batch, torch.stack(colours), masks, [torch.stack(row) for row in controls])


def _encoded(pictures: _Pictures, work: EncodingJob) -> list[tuple[Wanted, Arrays]]:
    batch, device = pictures.batch, work.world.device
    found: list[Arrays] = [{} for _ in batch]

    def keep(name: str, tensor: torch.Tensor) -> None:
        latents = tensor.float().cpu()
        bad = [w.image for w, latent in zip(batch, latents, strict=True) if not bool(torch.isfinite(latent).all())]
        if bad:
            raise NotFiniteError(
                "encoding {some} gave NaN: {advice}", some=some(bad), advice=_nan_advice(work.components.vae)
            )
        for arrays, one in zip(found, latents.numpy(), strict=True):
            arrays[name] = one

    colours, controls = pictures.colours.to(device), [control.to(device) for control in pictures.controls]
    for ending in ["", *["_flipped"] * batch[0].flip]:
        seen = colours.flip(-1) if ending else colours
        with torch.no_grad():
            generators = [image_generator(wanted.image, wanted.fit.bucket) for wanted in batch]
            keep(f"latents{ending}", work.family.latents(work.components, seen, generator=generators))
            for number, control in enumerate(controls):
                assert isinstance(work.family, TakesControls)
                shown = control.flip(-1) if ending else control
                keep(f"control_{number}{ending}", work.family.control_latents(work.components, shown))
    for arrays, mask in zip(found, pictures.masks, strict=False):
        arrays["alpha_mask"] = mask
    return list(zip(batch, found, strict=True))


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
