"""Checks of sample prompts before a model is loaded: what is missing, unreadable, or without effect."""

from collections.abc import Iterator
from pathlib import Path

from library.config.problems import ConfigError, Problem, counted
from library.config.run_config import RunConfig
from library.data import pixels
from library.families.base import Family
from library.sampling import few_steps, prompt_checks, prompts
from library.sampling.prompt_use import prompt_use


def idle_prompts(config: RunConfig, family: Family) -> list[Problem]:
    """Yield parts of sample prompts that have no effect, or are changed."""
    path = config.sample.sample_prompts
    use = prompt_use(config, family, config.control_images)
    prompt_notes = prompt_checks.notes(path, use) if path and config.sample.sample_images else ()
    own_steps = _prompts_with_own_steps(config, family) if config.sample.wanted else ()
    return [*_unscheduled(config), *own_steps, *prompt_notes]


def _prompts_with_own_steps(config: RunConfig, family: Family) -> Iterator[Problem]:
    """Remark on prompts whose own steps count more than those of a LoRA for few steps."""
    sample = config.sample
    if not (sample.sample_lora and sample.sample_prompts):
        return
    steps = few_steps.prompt_defaults(config, family.sample_defaults)["sample_steps"]
    longer = [prompt for prompt in prompts.read_prompts(sample.sample_prompts) if (prompt.sample_steps or 0) > steps]
    if longer:
        yield Problem(
            "sample_lora",
            ": {name} has {prompts} with more steps (--s) than the {steps} of the LoRA, and theirs count; leave "
            "--s out",
            prompts=counted(len(longer), "prompt"),
            name=Path(sample.sample_prompts).name,
            steps=steps,
        )


def _unscheduled(config: RunConfig) -> Iterator[Problem]:
    """Remark on sample prompts without a schedule."""
    if config.sample.wanted and not config.sample.scheduled:
        yield Problem(
            "sample_prompts" if config.sample.sample_prompts else "sample_from_captions",
            ": samples are generated only on request; set sample_every_n_epochs, sample_every_n_steps or "
            "sample_at_first",
        )


def unusable_prompts(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of samples without a prompt file, and of an unreadable file or unreadable images in it."""
    sample = config.sample
    if sample.scheduled and not sample.wanted:
        yield Problem(
            "sample_prompts",
            ": sample images are scheduled, but there is no prompt file; give one, set sample_from_captions, or switch "
            "sample_images off",
            also="sample_from_captions",
            fix={"sample_from_captions": 2},
        )
    yield from few_steps.setting_problems(config) if sample.wanted else ()
    if sample.sample_prompts and sample.sample_images:
        try:
            yield from prompt_checks.unreadable(sample.sample_prompts, config.control_images, pixels.check_file)
        except ConfigError as e:
            yield from e.problems
