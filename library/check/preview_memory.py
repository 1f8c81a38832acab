"""What sample images take of the GPU's memory while they are decoded, beside a training that waits meanwhile."""

from collections.abc import Iterator
from pathlib import Path

from library import families
from library.check.estimate import BYTES, GIB, SLACK, MemoryEstimate
from library.config.problems import ConfigError, Message
from library.config.run_config import RunConfig
from library.measuring.model_stats import model_stats
from library.sampling import caption_prompts, prompts

HELD = ("model", "text encoders", "what learns", "optimizer", "driver")  # of the estimate's parts, between two steps
SQUARE = 1024 * 1024  # pixels that `decoder_memory` is about


def sentences(needs: MemoryEstimate, config: RunConfig) -> Iterator[tuple[str, Message]]:
    """("ok" or "hint", sentence) about sample images; nothing where none are made or the prompts cannot be read."""
    if not config.sample.wanted:
        return
    try:
        size = largest(config)
    except (ConfigError, OSError):  # which is reported elsewhere
        return
    peak = peak_of(needs, config, size)
    shown = f"{size[0]}x{size[1]}", f"{peak:.1f}"
    if needs.memory and peak > needs.memory * 0.97:
        template = (
            "Sample images of {size} take about {peak} GB of GPU memory at once, more than there is: they are decoded "
            "in tiles, or on the CPU; smaller ones (--w and --h in the prompt file) need less"
        )
        yield "hint", Message(template, size=shown[0], peak=shown[1])
    else:
        yield "ok", Message("Sample images of {size} take about {peak} GB of GPU memory", size=shown[0], peak=shown[1])


def peak_of(needs: MemoryEstimate, config: RunConfig, size: tuple[int, int]) -> float:
    """GiB while an image of this size is decoded at once: what stays between two steps, the VAE and its activations."""
    each = 4 if config.model.float32_vae else BYTES[config.precision.mixed_precision]
    decoding = families.facts(config.family).decoder_memory * each / 2 * size[0] * size[1] / SQUARE
    return (sum(needs.parts.get(name, 0.0) for name in HELD) + model_stats(config).vae * each / GIB + decoding) * SLACK


def largest(config: RunConfig) -> tuple[int, int]:
    """Width and height of the largest sample image. Raises ConfigError where the prompt file cannot be read."""
    if not config.sample.sample_prompts:
        return caption_prompts.SIDE, caption_prompts.SIDE
    family = families.family_for(config)
    found = prompts.read(Path(config.sample.sample_prompts))
    whole = [prompts.with_defaults(one, family.sample_defaults, family.sample_multiple) for one in found]
    sizes = [(one.width or 0, one.height or 0) for one in whole]
    return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
