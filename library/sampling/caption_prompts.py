"""Sample prompts for a training without any: captions of the data set, and one new prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import TypeVar

from library.config.json_types import JsonMapping, JsonObject
from library.config.run_config import ControlUse, RunConfig
from library.data.images import Image, ImageSet
from library.sampling import masks
from library.sampling.prompts import Prompt

T = TypeVar("T")
MAX_SAMPLE_SIDE = 640  # samples have at most SIDE^2 pixels, two fifths of 1024 x 1024
MAX_STEPS = 14  # denoising steps, if the family's default is higher
MAX_SHARED_WORDS = 8  # of the common beginning of all captions
# Appended to the words shared by all captions; the first setting that no caption mentions is used.
SCENES = ("on a beach at sunset", "in a snowy forest", "in front of a brick wall", "under water")
# New prompt if captions share no words: it shows what else the training changes.
SUBJECTS = ("a lighthouse on a cliff", "a red bicycle in front of a bakery", "a bowl of fruit on a wooden table")
EDITS = ("make it a pencil drawing", "make it winter", "make it night")  # the same for models that edit an image


# Computed at each start, as stored prompts would no longer fit after images are added.
# Why: docs/decisions/2026-11-27-samples-from-captions.md
def prompts_from(images: ImageSet, config: RunConfig) -> list[Prompt]:
    """Return `sample_from_captions` captions from all over the data set, and one new prompt."""
    # The choice is the same in every process and every run, so that samples of two trainings can be compared.
    use, number = config.control_images, config.sample.sample_from_captions
    items = shown_from(images, use)
    # Reversed, so that of images with the same caption the first counts.
    by_caption = {text: image for image in reversed(items) if (text := " ".join(image.encoded_caption.split()))}
    captions = [*reversed(by_caption)]
    chosen = [(text, by_caption[text]) for text in evenly_spread(captions, number)]
    if config.caption_change.sentences:  # these replace the captions
        chosen = [(text, items[0]) for text in evenly_spread(config.caption_change.sentences, number)]
    chosen.append((_new(captions, bool(use.most)), chosen[0][1] if chosen else items[0]))
    return [_prompt(text, image, seed, use) for seed, (text, image) in enumerate(chosen, start=1)]


def shown_from(images: ImageSet, use: ControlUse) -> list[Image]:
    """Return the images whose captions become prompts: those held out if a part of them is painted, as the model has
    learned what belongs there in the others."""
    held_out = images.validation.items if use.inpaints and images.validation else []
    return [image for image in held_out or images.items if not image.is_reg]


def with_few_steps(defaults: JsonMapping) -> JsonObject:
    return {**defaults, "sample_steps": min(int(defaults.get("sample_steps") or MAX_STEPS), MAX_STEPS)}


def evenly_spread(items: Sequence[T], number: int) -> list[T]:
    """Return at most `number` items at equal distances, starting with the first."""
    number = min(number, len(items))
    return [items[at * len(items) // number] for at in range(number)]


def _new(captions: Sequence[str], edits: bool) -> str:
    """Return a prompt that no caption contains: the common beginning of all, in another setting."""
    if edits:
        return _absent_caption(EDITS, captions)
    shared = " ".join(commonprefix([text.split() for text in captions[:1000]])[:MAX_SHARED_WORDS]).rstrip(" ,.;:")
    if not shared:
        return _absent_caption(SUBJECTS, captions)
    return f"{shared}, {_absent_caption(SCENES, captions)}"


def _absent_caption(texts: Sequence[str], captions: Iterable[str]) -> str:
    everything = " ".join(captions).lower()
    return next((text for text in texts if text.split()[-1] not in everything), texts[-1])


def _prompt(text: str, image: Image, seed: int, use: ControlUse) -> Prompt:
    """Return a prompt for a small image with the proportions of `image`, and with its control images."""
    width, height = image.fit.bucket
    scale = min(1.0, MAX_SAMPLE_SIDE / (width * height) ** 0.5)
    prompt = Prompt(text, width=round(width * scale), height=round(height * scale), seed=seed)
    return with_images(prompt, image, use)


def with_images(prompt: Prompt, image: Image, use: ControlUse) -> Prompt:
    """Return the prompt with what the model is shown with an image of its training: references or a control image, or
    the image itself and its mask."""
    if use.inpaints and image.controls:
        control = image.controls[0]
        mask = masks.training_mask(control)
        file = control.mask if mask is None else None
        path = (control.path,)
        return replace(prompt, control_image_path=path, control_image_mask_path=file or None, training_mask=mask)
    references = tuple(control.path for control in image.controls if not control.is_masked)
    guide = (image.mask_file or None) if use.guided else None
    return replace(prompt, control_image_path=references[: use.most] or None, controlnet_image=guide)
