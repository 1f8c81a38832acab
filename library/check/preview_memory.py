"""GPU memory of generating sample images, while the training waits."""

from collections.abc import Iterator
from pathlib import Path

from library import families
from library.check.estimate import BYTES, BYTES_PER_GIB, SLACK, MemoryEstimate
from library.config.problems import ConfigError, Message
from library.config.run_config import RunConfig
from library.config.sections.sampling import AUTO
from library.measuring.model_stats import model_stats
from library.measuring.operations import count_block_tokens
from library.sampling import caption_prompts, few_steps, prompts
from library.sampling.prompts import Prompt

# Parts of the estimate that stay in memory between two steps.
HELD = ("model", "text encoders", "what learns", "optimizer", "driver")
SQUARE = 1024 * 1024  # number of pixels that `decoder_memory` refers to


def sentences(needs: MemoryEstimate, config: RunConfig) -> Iterator[tuple[str, Message]]:
    """Yield ("ok" or "hint", sentence) about sample images; nothing without any, or if the prompts are unreadable."""
    if not config.sample.wanted:
        return
    try:
        size = largest_sample(config)
    except (ConfigError, OSError):  # reported elsewhere
        return
    decoding, denoising = peak_of(needs, config, size), denoising_peak(needs, config, size)
    texts = {"size": f"{size[0]}x{size[1]}", "peak": f"{max(decoding, denoising):.1f}"}
    limit = needs.memory * 0.97 if needs.memory else None
    if limit and decoding > limit:
        template = (
            "sample images of {size} take about {peak} GB of GPU memory at once, more than is available: they are "
            "decoded in tiles or on the CPU; smaller images (--w and --h in the prompt file) need less"
        )
        yield "hint", Message(template, **texts)
    elif limit and denoising > limit:
        template = (
            "sample images of {size} take about {peak} GB of GPU memory, more than is available: fewer are generated "
            "at once (sample_batch_size); smaller images (--w and --h in the prompt file) need less"
        )
        yield "hint", Message(template, **texts)
    else:
        yield "ok", Message("sample images of {size} take about {peak} GB of GPU memory", **texts)


def peak_of(needs: MemoryEstimate, config: RunConfig, size: tuple[int, int]) -> float:
    """Return GiB while decoding an image of this size at once: what stays between two steps, the VAE and its
    activations.
    """
    bytes_per_value = 4 if config.model.float32_vae else BYTES[config.precision.mixed_precision]
    # `decoder_memory` is in GiB, for 2 bytes per value.
    decoding = families.facts_of(config.family).decoder_memory * bytes_per_value / 2 * size[0] * size[1] / SQUARE
    held = sum(needs.parts.get(name, 0.0) for name in HELD)
    return (held + model_stats(config).vae * bytes_per_value / BYTES_PER_GIB + decoding) * SLACK


def denoising_peak(needs: MemoryEstimate, config: RunConfig, size: tuple[int, int]) -> float:
    """Return GiB while denoising: what stays between two steps, the LoRA for samples, and one block's activations of
    the images in a batch, with both prompts of guidance. `auto` is counted as one image, as it takes what is free.
    """
    model, bytes_per_value = model_stats(config), BYTES[config.precision.mixed_precision]
    batch = 1 if config.sample.sample_batch_size == AUTO else config.sample.sample_batch_size
    largest = 0.0
    for block in model.blocks:
        stream = count_block_tokens(config, block, size) * block.width * bytes_per_value
        largest = max(largest, stream * block.cost.activations)
    lora = sum(path.stat().st_size for path in few_steps.sample_lora(config) if path.is_file())
    held = sum(needs.parts.get(name, 0.0) for name in HELD)
    return (held + (lora + 2 * batch * largest) / BYTES_PER_GIB) * SLACK


def largest_sample(config: RunConfig) -> tuple[int, int]:
    """Return width and height of the largest sample image. Raises ConfigError if the prompt file is unreadable."""
    sizes = [(prompt.width or 0, prompt.height or 0) for prompt in complete_prompts(config)]
    return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))


def complete_prompts(config: RunConfig) -> list[Prompt]:
    """Return the prompts of a training's samples with their defaults; those from captions as large as they can be.
    Raises ConfigError if the prompt file is unreadable.
    """
    family, side = families.family_for(config), caption_prompts.MAX_SAMPLE_SIDE
    defaults = few_steps.prompt_defaults(config, family.sample_defaults)
    if config.sample.sample_prompts:
        from_file = prompts.read_prompts(Path(config.sample.sample_prompts))
        return [prompts.with_defaults(prompt, defaults, family.sample_multiple) for prompt in from_file]
    defaults = few_steps.prompt_defaults(config, caption_prompts.with_few_steps(family.sample_defaults))
    from_caption = prompts.with_defaults(Prompt("", width=side, height=side), defaults, family.sample_multiple)
    return [from_caption] * (config.sample.sample_from_captions + 1)
