"""Options of what is encoded once, before a training, instead of in every step."""

from collections.abc import Iterator
from dataclasses import dataclass

from library.config.problems import Problem
from library.config.reading import parse_count
from library.config.run_config import RunConfig
from library.config.schema import defaults, opt
from library.config.sections.captions import USUAL_VARIANTS, VARIED, clashes_with_cache

MAX_VARIANTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """What is encoded once, before training, instead of in every step."""

    cache_latents: bool = opt(False, "Encode all images once, before training: faster, less memory. Usually on.")
    cache_latents_to_disk: bool = opt(False, "Save latents next to the images, so that later runs start at once.")
    cache_text_encoder_outputs: bool = opt(
        False, "Encode all captions once: less memory. For shuffled ones see caption variants."
    )
    cache_text_encoder_outputs_to_disk: bool = opt(
        False, "Save encoded captions next to the images, so that later runs start at once."
    )
    cached_caption_variants: int = opt(
        1,
        "Variants of each caption to encode and draw from: shuffled, tags dropped, wildcards.",
        label="Cached caption variants",
        min=1,
        ceiling=MAX_VARIANTS,
        advanced=True,
    )
    vae_batch_size: int = opt(
        1,
        "Images that the VAE encodes at once. 1 needs the least memory.",
        label="VAE batch size",
        min=1,
        ceiling=10_000,
    )
    skip_cache_check: bool = opt(False, "Use caches on disk without checking their contents.", advanced=True)

    @property
    def latents(self) -> bool:
        # Caching to disk implies caching.
        return self.cache_latents or self.cache_latents_to_disk

    @property
    def text(self) -> bool:
        return self.cache_text_encoder_outputs or self.cache_text_encoder_outputs_to_disk

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject options that change an image or a caption by epoch, so that it cannot be encoded once."""
        if self.latents:
            for name in ("color_aug", "random_crop"):
                if getattr(run.data, name):
                    yield Problem(
                        name,
                        "cannot be used with cache_latents: switch one of them off",
                        also="cache_latents cache_latents_to_disk",
                        fix=defaults(run, name),
                    )
        if self.text:
            for name, template in clashes_with_cache(run).items():
                if getattr(run.captions, name):
                    fix = {"cached_caption_variants": USUAL_VARIANTS} if name in VARIED else defaults(run, name)
                    yield Problem(
                        name, template, fix=fix, also="cache_text_encoder_outputs cache_text_encoder_outputs_to_disk"
                    )

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        if self.skip_cache_check and (self.cache_latents_to_disk or self.cache_text_encoder_outputs_to_disk):
            yield Problem("skip_cache_check", ": caches of changed images and captions are used as they are")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextBatchCache(Cache):
    """Like `Cache`, with a separate batch size for captions."""

    text_encoder_batch_size: int | None = opt(
        None, "Captions that are encoded at once. Empty: the batch size.", parse=parse_count
    )
