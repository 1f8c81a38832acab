"""How sample images are generated: steps, guidance, noise levels, and a LoRA for few steps."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from library.config.problems import ConfigError, Problem
from library.config.reading import parse_count, positive_or_off
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.config.sections.outputs import Sample
from library.config.strengths import repeated_files, split_files, strength_notes, strength_problems
from library.config.values import parse_finite, quoted, to_int

MAX_STEPS = 1000
NO_GUIDANCE = {"sample_guidance_scale": "this model was not distilled with guidance"}
AUTO = "auto"
LARGEST_BATCH = 64  # images at once
BatchSize = int | Literal["auto"]
OFF = "off"
CacheThreshold = float | Literal["off", "auto"]
SAGE = "sage"  # an attention kernel without gradients


def batch_size(value: Any) -> BatchSize:
    """Parse a number of images, or auto. 0 is neither: elsewhere it stands for "not set", which here is 1."""
    if str(value).strip().lower() == AUTO:
        return AUTO
    number = to_int(value)
    if not 1 <= number <= LARGEST_BATCH:
        template = "must be auto or a number from 1 to {most}, got {value}"
        raise ConfigError(template, most=LARGEST_BATCH, value=quoted(value))
    return number


def cache_threshold(value: Any) -> CacheThreshold:
    """Parse off, auto, or a threshold above 0 and up to 1; forms write "not set" as 0."""
    word = str(value).strip().lower()
    if word in (OFF, AUTO):
        return word
    threshold = parse_finite(value)
    if not 0 <= threshold <= 1:
        raise ConfigError("must be off, auto or a number above 0 and up to 1, got {value}", value=quoted(value))
    return threshold or OFF


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling(Sample):
    """Sample images, and how they are generated."""

    sample_steps: int | None = opt(
        None,
        "Denoising steps of sample images. Empty: as many as the model needs.",
        label="Denoising steps",
        parse=parse_count,
        ceiling=MAX_STEPS,
    )
    sample_scale: float | None = opt(
        None,
        "How strongly images follow the prompt; 1 is twice as fast, without negative prompts.",
        label="CFG scale",
        min=0.0,
        ceiling=MAX_STEPS,
    )
    sample_guidance_scale: float | None = opt(
        None,
        "The guidance of models that were distilled with it: 3.5 is usual.",
        label="Guidance",
        min=0.0,
        ceiling=MAX_STEPS,
        advanced=True,
    )
    sample_shift: float | None = opt(
        None,
        "Above 1, more of the steps are noisy. Empty: the model's usual shift.",
        label="Shift",
        parse=positive_or_off,
        ceiling=MAX_STEPS,
        advanced=True,
    )
    sample_sigmas: tuple[float, ...] = opt(
        (),
        "The noise level of each step, such as 1, 0.75, 0.5, 0.25. Replaces steps and shift.",
        label="Noise levels",
        min=0.0,
        advanced=True,
    )
    sample_batch_size: BatchSize = opt(
        1,
        "Images generated at once: a number from 1 to 64, or auto for as many as fit.",
        label="Images at once",
        parse=batch_size,
        advanced=True,
    )
    sample_cache: CacheThreshold = opt(
        OFF,
        "Skip most blocks in steps that change less than this. auto: 0.15, as measured.",
        label="Skip similar steps",
        parse=cache_threshold,
        advanced=True,
    )
    sample_attention: Literal["auto", "cudnn", "flash", "efficient", "math", "flash3", "flash4", "sage"] = opt(
        "auto",
        "The attention kernel of sample images. auto: as in training. SageAttention is a package.",
        label="Attention for samples",
        advanced=True,
    )
    sample_lora: tuple[str, ...] = opt(
        (),
        "LoRAs for samples alone, as for few steps. Add a strength as in FILE:0.8.",
        label="LoRA for samples",
        kind="files",
        split=split_files,
        weighted=True,
    )

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Require falling noise levels that the model knows, and a usable strength."""
        levels = self.sample_sigmas
        if levels and (levels[-1] <= 0 or any(below >= above for above, below in itertools.pairwise(levels))):
            yield Problem(
                "sample_sigmas",
                "must fall and stay above 0, such as 1, 0.75, 0.5, 0.25; the last step always ends at 0",
            )
        if levels and run.shifts_samples and max(levels) > 1:
            yield Problem(
                "sample_sigmas",
                "must be at most 1, which is pure noise for this model, got {value}",
                value=f"{max(levels):g}",
            )
        if len(levels) > MAX_STEPS:
            yield Problem("sample_sigmas", "has more noise levels than {most}; write fewer", most=MAX_STEPS)
        for file in self.sample_lora:
            problems = strength_problems("sample_lora", file)
            # A fix is one file, which would replace the others, too.
            yield from (problem.replaced(fix={}) for problem in problems) if self.sample_lora[1:] else problems
        yield from repeated_files("sample_lora", self.sample_lora)

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Remark on a LoRA of strength 0, and on a single noise level, which only a LoRA for one step needs."""
        for file in self.sample_lora:
            yield from strength_notes("sample_lora", file)
        if len(self.sample_sigmas) == 1 and not self.sample_lora:
            yield Problem(
                "sample_sigmas",
                "has a single noise level, so samples are generated in one step; write one for each step, such as 1, "
                "0.75, 0.5, 0.25",
                also="sample_lora",
            )
