"""GPU memory of decoding sample images, while the training waits."""

from collections.abc import Iterator
from pathlib import Path

from library import families
from library.check.estimate import BYTES, BYTES_PER_GIB, SLACK, MemoryEstimate
from library.config.problems import ConfigError, Message
from library.config.run_config import RunConfig
from library.measuring.model_stats import model_stats
from library.sampling import caption_prompts, prompts

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
    peak = peak_of(needs, config, size)
    texts = f"{size[0]}x{size[1]}", f"{peak:.1f}"
    if needs.memory and peak > needs.memory * 0.97:
        template = (
            "Sample images of {size} take about {peak} GB of GPU memory at once, more than there is: they are decoded "
            "in tiles, or on the CPU; smaller ones (--w and --h in the prompt file) need less"
        )
        yield "hint", Message(template, size=texts[0], peak=texts[1])
    else:
        yield "ok", Message("Sample images of {size} take about {peak} GB of GPU memory", size=texts[0], peak=texts[1])


def peak_of(needs: MemoryEstimate, config: RunConfig, size: tuple[int, int]) -> float:
    """Return GiB while decoding an image of this size at once: what stays between two steps, the VAE and its
    activations.
    """
    bytes_per_value = 4 if config.model.float32_vae else BYTES[config.precision.mixed_precision]
    # `decoder_memory` is in GiB, for 2 bytes per value.
    decoding = families.facts_of(config.family).decoder_memory * bytes_per_value / 2 * size[0] * size[1] / SQUARE
    held = sum(needs.parts.get(name, 0.0) for name in HELD)
    return (held + model_stats(config).vae * bytes_per_value / BYTES_PER_GIB + decoding) * SLACK


def largest_sample(config: RunConfig) -> tuple[int, int]:
    """Return width and height of the largest sample image. Raises ConfigError if the prompt file is unreadable."""
    if not config.sample.sample_prompts:
        return caption_prompts.MAX_SAMPLE_SIDE, caption_prompts.MAX_SAMPLE_SIDE
    family = families.family_for(config)
    sample_prompts = prompts.read_prompts(Path(config.sample.sample_prompts))
    complete_prompts = [
        prompts.with_defaults(prompt, family.sample_defaults, family.sample_multiple) for prompt in sample_prompts
    ]
    sizes = [(prompt.width or 0, prompt.height or 0) for prompt in complete_prompts]
    return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
