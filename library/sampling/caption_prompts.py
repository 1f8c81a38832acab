"""Sample prompts where nobody wrote any: captions of the data set, and one prompt that is not among them."""

from collections.abc import Iterable, Sequence
from os.path import commonprefix

from library.config.json_types import JsonMapping, JsonObject
from library.config.run_config import ControlUse, RunConfig
from library.data.images import Image, ImageSet
from library.sampling.prompts import Prompt

SIDE = 640  # pixels: samples have at most as many as a square of this side, two fifths of 1024 x 1024
MAX_STEPS = 14  # denoising steps, where the family's default is more
MAX_SHARED_WORDS = 8  # of what all captions begin with
# What follows the words that all captions begin with. The first one that no caption has is used.
SETTINGS = ("on a beach at sunset", "in a snowy forest", "in front of a brick wall", "under water")
# The prompt where captions share no words: it shows what else the training changes.
SUBJECTS = ("a lighthouse on a cliff", "a red bicycle in front of a bakery", "a bowl of fruit on a wooden table")
EDITS = ("make it a pencil drawing", "make it winter", "make it night")  # the same for models that edit a picture


# Why: docs/decisions/2026-11-27-samples-from-captions.md
def prompts_from(images: ImageSet, config: RunConfig) -> list[Prompt]:
    """As many captions as `sample_from_captions` says, from all over the data set, and one prompt that is new.

    They are the same in each process and each time, so that the pictures of two trainings can be compared.
    """
    use, number = config.control_images, config.sample.sample_from_captions
    items = [image for image in images.items if not image.is_reg]
    by_caption = {text: image for image in reversed(items) if (text := _plain(image.encoded_caption))}
    captions = [*reversed(by_caption)]
    chosen = [(text, by_caption[text]) for text in _spread(captions, number)]
    if config.caption_change.sentences:  # which take the place of captions
        chosen = [(text, items[0]) for text in _spread(config.caption_change.sentences, number)]
    chosen.append((_new(captions, bool(use.most)), chosen[0][1] if chosen else items[0]))
    return [_prompt(text, image, seed, use) for seed, (text, image) in enumerate(chosen, start=1)]


def with_few_steps(defaults: JsonMapping) -> JsonObject:
    """The family's defaults of a prompt, with fewer denoising steps where there are many."""
    return {**defaults, "sample_steps": min(int(defaults.get("sample_steps") or MAX_STEPS), MAX_STEPS)}


def _plain(caption: str) -> str:
    return " ".join(caption.split())


def _spread(texts: Sequence[str], number: int) -> list[str]:
    """As many of the texts, from the first one on at equal distances."""
    number = min(number, len(texts))
    return [texts[at * len(texts) // number] for at in range(number)]


def _new(captions: Sequence[str], edits: bool) -> str:
    """A prompt that is not in the captions: what all of them begin with, somewhere else."""
    if edits:
        return _absent(EDITS, captions)
    shared = " ".join(commonprefix([text.split() for text in captions[:1000]])[:MAX_SHARED_WORDS]).rstrip(" ,.;:")
    if not shared:
        return _absent(SUBJECTS, captions)
    return f"{shared}, {_absent(SETTINGS, captions)}"


def _absent(texts: Sequence[str], captions: Iterable[str]) -> str:
    everything = " ".join(captions).lower()
    return next((text for text in texts if text.split()[-1] not in everything), texts[-1])


def _prompt(text: str, image: Image, seed: int, use: ControlUse) -> Prompt:
    """A small picture with the proportions of the image, and with the images that the model is shown beside it."""
    width, height = image.fit.bucket
    scale = min(1.0, SIDE / (width * height) ** 0.5)
    shown = image.controls[0] if use.inpaints and image.controls else None
    references = tuple(control.path for control in image.controls if not control.is_masked)
    mask = shown.mask if shown and shown.mask != shown.path else ""
    return Prompt(
        text,
        width=round(width * scale),
        height=round(height * scale),
        seed=seed,
        control_image_path=(shown.path,) if shown else references[: use.most] or None,
        control_image_mask_path=mask or None,
        controlnet_image=(image.mask_file or None) if use.guided else None,
    )
