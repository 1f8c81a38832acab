"""Time of generating sample images, as a share of the training's."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from library import families
from library.check.estimate import MemoryEstimate, operations
from library.check.preview_memory import complete_prompts
from library.config.environment import process_count
from library.config.problems import ConfigError, Message, counted, ngettext
from library.config.run_config import RunConfig
from library.data.images import ImageSet, summarise_images
from library.families.shared.sampler import Sampler
from library.measuring.model_stats import model_stats
from library.measuring.operations import forward_operations
from library.sampling.prompt_use import idle_sampler
from library.sampling.prompts import Prompt
from library.sampling.requests import imageless_request
from library.train.step.clock import Clock

LARGE_SHARE = 0.2  # of the time: more is worth a hint


@dataclass(frozen=True)
class PreviewTime:
    """How often samples are generated, and how many training steps one time takes as long as."""

    times: int
    images: int
    steps: float  # training steps that last as long as one set of images
    share: float  # of the time of the whole training


def sentences(
    needs: MemoryEstimate, config: RunConfig, images: ImageSet | None, size: tuple[int, int]
) -> Iterator[tuple[str, Message]]:
    """Yield ("ok" or "hint", sentence) about the time of samples; nothing without any, or if prompts or images are
    unreadable. `size` is that of the largest training image.
    """
    if images is None or not images.items or not config.sample.wanted:
        return
    try:
        clock = Clock.of(config, summarise_images(images, process_count())["batches_per_epoch"])
        cost = preview_time(config, clock, size)
    except (ConfigError, OSError):  # reported elsewhere
        return
    if not cost.times:
        return
    share = f"{cost.share:.0%}" if cost.share >= 0.01 else "< 1%"
    seconds = needs.step and cost.steps * needs.step
    each = Message(", {seconds} s each time", seconds=f"{seconds:.2g}") if seconds else ""
    facts = {
        "pictures": counted(cost.images, "sample image"),
        "times": ngettext("once", "{count} times", cost.times),
        "share": share,
        "each": each,
    }
    if cost.share > LARGE_SHARE:
        template = "{pictures} {times} take about {share} of the time{each}: sample less often, or in fewer steps"
        yield "hint", Message(template, **facts)
    else:
        yield "ok", Message("{pictures} {times} take about {share} of the time{each}", **facts)


def preview_time(config: RunConfig, clock: Clock, size: tuple[int, int]) -> PreviewTime:
    """Return the time of samples, if the GPU is busy all the time; `size` is that of the training's images. Raises
    ConfigError if the prompt file is unreadable.
    """
    prompts, model = complete_prompts(config), model_stats(config)
    # Samples are compiled independently of the training; whether `auto` does so is not known yet.
    is_compiled = config.sample.sample_compile == "true"
    slower = model.utilization[config.compile.compile] / model.utilization[is_compiled]
    sampler = idle_sampler(families.family_for(config))
    samples = sum(
        _passes(prompt, sampler) * forward_operations(config, model, (prompt.width or 0, prompt.height or 0))
        for prompt in prompts
    )
    own_share = math.ceil(len(prompts) / process_count()) / max(len(prompts), 1)  # processes share the prompts
    steps = samples * own_share * slower / operations(config, model, size)
    times = count_times(config, clock)
    return PreviewTime(times, len(prompts), steps, times * steps / (clock.total + times * steps))


def count_times(config: RunConfig, clock: Clock) -> int:
    """Return how often a training generates samples by its schedule."""
    sample = config.sample
    left = clock.times_left(sample.sample_every_n_steps, sample.sample_every_n_epochs) if sample.scheduled else 0
    return left + (sample.sample_at_first and not clock.step)


def _passes(prompt: Prompt, sampler: Sampler) -> int:
    """Return the passes of a prompt; families differ in the scales that need two in each step."""
    request = imageless_request(prompt)
    return sampler.count_passes(request) * (2 if sampler.is_guided(request) else 1)
